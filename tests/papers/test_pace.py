"""How long a run may take, and when that ends one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isofed.papers import budget, pace
from isofed.papers.budget import Budget, BudgetOver, Timed
from isofed.papers.plan import Job
from isofed.papers.results import Results
from isofed.progress import Watcher

from .made import cell, write

EPOCHS = {"local_steps": None, "local_epochs": 2}


def job(method: str = "FedAvg", **values: Any) -> Job:
    return Job(cell(method, {**EPOCHS, **values}), 0)


def test_a_run_is_expected_to_take_what_one_like_it_took(tmp_path: Path) -> None:
    write(tmp_path, job(), {"accuracy": 1.0}, seconds=20.0, evaluation=4.0, after=3.0, rounds=4)
    results = Results(tmp_path)
    assert pace.expected(job(rounds=10), results) == pytest.approx(10 * 6.0 + 3)
    assert pace.expected(job("FedUV"), results) == pytest.approx(4 * 6.0 + 3)  # nothing better is known
    assert pace.expected(job(local_epochs=4), results) == pytest.approx(4 * 12.0 + 3)
    assert pace.expected(job(participation=0.5), results) == pytest.approx(4 * 3.0 + 3)
    assert pace.expected(job(local_epochs=None, local_steps=3), results) is None
    assert pace.expected(job(model="cnn"), results) is None
    assert pace.expected(Job(job().cell, 0, how=(("precision", "bf16"),)), results) is None
    write(tmp_path, job("FedUV"), {"accuracy": 1.0}, seconds=40.0, rounds=4)
    assert pace.expected(job("FedUV", rounds=8), Results(tmp_path)) == pytest.approx(80.0)
    assert pace.expected(job("fedprox"), Results(tmp_path)) == pytest.approx(40.0)  # the slowest


def test_what_the_first_round_takes_longer_is_expected_once(tmp_path: Path) -> None:
    # Three rounds of 4 s after one of 100, and 1 s each to evaluate.
    write(tmp_path, job(), {"seconds": 4.0}, seconds=112.0, evaluation=4.0, rounds=4)
    assert pace.expected(job(rounds=50), Results(tmp_path)) == pytest.approx(50 * 5.0 + 96)
    assert pace.expected(job(rounds=50, local_epochs=4), Results(tmp_path)) == pytest.approx(50 * 10.0 + 96)


def timed(seconds: float, took: list[float], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of the rounds are made, when they take so long and so many seconds are there for all of them."""
    clock = [0.0]
    monkeypatch.setattr("isofed.papers.budget.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(budget, "RESERVE", 0.0)
    watch = Timed(Watcher(), Budget(seconds, 0.0), whole=True)
    watch.start(SimpleNamespace(settings=SimpleNamespace(rounds=len(took))))  # type: ignore[arg-type]
    for number, each in enumerate(took, 1):
        clock[0] += each
        try:
            watch.round({"round": number})
        except BudgetOver:
            return number
    return len(took)


def test_one_slow_round_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosed = [3.0, *[1.0] * 18, 4.0, *[1.0] * 10]
    assert timed(40.0, diagnosed, monkeypatch) == 30
    assert timed(30.0, diagnosed, monkeypatch) == 3  # the first one that can tell
    assert timed(15.0, diagnosed, monkeypatch) == 2  # and one that need not be exact


def test_a_command_counts_from_its_start(tmp_path: Path) -> None:
    """Not from when the libraries are read, which takes seconds."""
    script = (
        "import time; time.sleep(1); from isofed.papers.budget import Budget; b = Budget.of_command(100.0); "
        "print(b.left)"
    )
    began = time.monotonic()
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert 100 - (time.monotonic() - began) - 0.1 < float(said) < 99.1
