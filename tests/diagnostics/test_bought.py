"""Accuracy against what was paid for it, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from isofed.diagnostics.bought import Price, bought
from isofed.diagnostics.cost import cost
from tests.engine.plain import small


def line(number: int, accuracy: float | None, **more: Any) -> dict[str, Any]:
    usual = {"bytes_up": 2_000_000, "bytes_down": 1_000_000, "seconds": 2.0, "samples": 1000, "loss": 1.0 / number}
    return usual | {"round": number, "accuracy": accuracy} | more


def test_costs_add_up_over_all_rounds_and_show_at_those_that_were_judged() -> None:
    found = bought([line(1, None), line(2, 0.4), line(3, None), line(4, 0.6, seconds=4.0)], flops=5e6, classes=5)
    assert found.rounds == [2, 4] and found.accuracy == [0.4, 0.6] and found.loss == [0.5, 0.25]
    assert found.megabytes == [6.0, 12.0] and found.seconds == [4.0, 10.0] and found.gflop == [10.0, 20.0]
    assert found.total == Price(4, 12.0, 10.0, 20.0)
    per = found.points_per()
    assert per == pytest.approx({"megabyte": 40 / 12, "second": 4.0, "gflop": 2.0})
    assert found.until(0.4) == Price(2, 6.0, 4.0, 10.0)
    assert found.until(0.41) == found.total
    assert found.until(0.7) is None


def test_what_cost_nothing_has_no_price() -> None:
    found = bought([line(1, 0.5, bytes_up=0, bytes_down=0)])
    assert found.points_per() == {"megabyte": None, "second": 25.0, "gflop": None}
    assert found.gflop is None and found.total.gflop is None


def test_a_run_that_was_never_judged_has_bought_nothing() -> None:
    with pytest.raises(ValueError, match="no round of this run has been judged"):
        bought([line(1, None)])


def test_on_a_real_run() -> None:
    run = small(rounds=3)
    result = run.fit()
    flops = cost("fedavg", model="mlp", dataset=run.world.dataset, operations=True).flops
    found = bought(result.history, flops, 4)
    assert found.total.megabytes == pytest.approx((result.bytes_up + result.bytes_down) / 1e6)
    assert found.total.seconds == pytest.approx(result.seconds)
    assert flops is not None and found.total.gflop is not None
    assert found.total.gflop == pytest.approx(flops * sum(x["samples"] for x in result.history) / 1e9)
