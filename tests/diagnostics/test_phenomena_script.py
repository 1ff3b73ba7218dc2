"""benchmarks/phenomena.py, at the smallest scale."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "phenomena.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_it_measures_judges_and_writes_after_each_run(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    words = ["--model", "mlp", "--rounds", "1", "--epochs", "1", "--clients", "4", "--samples", "100"]
    monkeypatch.setattr(sys, "argv", ["phenomena.py", *words, "--json", str(file)])
    script["main"]()
    out, record = capsys.readouterr().out, json.loads(file.read_text())
    assert set(record["found"]["fedavg"]) == set(script["SPLITS"])
    even = record["found"]["fedavg"]["iid"]
    assert len(even["significant"]) == 5 and len(even["spectrum"]) == 64  # one global model and four local ones
    assert even["cosine"] > record["found"]["fedavg"]["dirichlet:0.01"]["cosine"]
    by_claim = {line["claim"]: line["verdict"] for line in record["verdicts"]}
    assert by_claim["a frozen head keeps its spectrum"] == "shown"
    assert all(claim in out for claim in by_claim) and "left out" not in out
    assert record["environment"]["torch"] and record["settings"]["rounds"] == 1


def test_runs_that_the_time_does_not_suffice_for_are_left_out_and_named(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "mlp", "--rounds", "1", "--epochs", "1", "--clients", "4", "--samples", "50"]
    monkeypatch.setattr(sys, "argv", ["phenomena.py", *words, "--minutes", "0.0001"])
    script["main"]()
    out = capsys.readouterr().out
    assert "left out for want of time: fedavg on iid, feddecorr on dirichlet:0.05" in out
    assert "not measured  a frozen head keeps its spectrum" in out


def test_a_trend_is_shown_at_the_ends_or_not(script: dict[str, Any]) -> None:
    trend = script["trend"]
    assert trend([4, 3, 3, 1]) == "shown" and trend([4, 5, 1]) == "at the ends" and trend([1, 2]) == "not shown"
    assert trend([1, 2], -1) == "shown" and trend([1]) == "not measured" and trend([2, 2]) == "not shown"


def test_the_tail_is_the_mean_logarithm_beyond_an_eighth_up_to_a_half(script: dict[str, Any]) -> None:
    values = [100.0, 50.0, 4.0, 4.0, *[math.e**2] * 12, *[0.0] * 16]
    assert script["tail"](values) == pytest.approx(2)


def test_a_data_set_that_is_not_there_is_one_sentence(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["phenomena.py", "--data", str(tmp_path)])
    with pytest.raises(SystemExit, match="phenomena.py: .*cifar"):
        script["main"]()
