"""``benchmarks/goals.py``: what was measured stands beside what is aimed at, and is measured once."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
SMALL = "--samples 300 --classes 4 --model mlp --repeats 1 --device cpu"


@pytest.fixture
def goals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    yield importlib.import_module("goals")
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(folder: Path, **found: Any) -> None:
    for name, record in found.items():
        (folder / f"{name}.json").write_text(json.dumps(record))


def called(goals: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["goals.py", *words])
    with pytest.raises(SystemExit) as end:
        goals.main()
    return int(end.value.code or 0)


def test_what_was_measured_stands_beside_the_aim(
    goals: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(seconds: float, peak: float, start: float) -> dict[str, float]:
        return {"round": seconds, "peak": peak, "start": start, "kept": 9, "visited": 9}

    def case(network: str, rates: list[float], ratios: list[float]) -> dict[str, Any]:
        slots = [{"rates": rates, "ratios": ratios}]
        return {"network": network, "precision": "tf32", "slots": slots}

    def peer(rate: float, *accuracies: float) -> dict[str, Any]:
        return {"rate": rate, "accuracy": {str(10 * n): a for n, a in enumerate(accuracies, 1)}}

    small, large = [run(1.0, 100, 2), run(2.0, 100, 2)], [run(1.1, 104, 11), run(2.0, 112, 12)]
    write(tmp_path, clients={"runs": {"100": small, "100000": large}})
    steps = [case("pfl-cnn", [100.0, 120.0, 110.0], [12.5, 11.0, 13.0]), case("resnet18", [50.0], [3.4])]
    write(tmp_path, **{"steps-tf32": {"cases": steps}}, free={"cases": [case("pfl-cnn", [132.0, 99.0, 121.0], [1.0])]})
    write(tmp_path, methods={"found": {"resnet18": {"moon": {"ratios": [1.7]}, "fedavg": {"rates": [1.0]}}}})
    ours, theirs = [peer(20.0, 0.1, 0.2, 0.30), peer(22.0, 0.1, 0.2, 0.32)], [peer(2.0, 0.2, 0.2, 0.33)] * 2
    write(tmp_path, peers={"runs": {"isofed:1x1": ours, "pfl:1x1": theirs}})
    assert called(goals, monkeypatch, "--out", str(tmp_path), "--show") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "100,000 clients: a round, beside 100 clients 1.05 (1 to 1.1) at most 1.05 met",
        "100,000 clients: memory, beside 100 clients 1.08 (1.04 to 1.12) at most 1.1 met",
        "100,000 clients: start-up, seconds 11.5 (11 to 12) at most 10 missed",
        "100,000 clients: states kept, of those visited 1 (1 to 1) at least 1 met",
        "steps: pfl-cnn tf32, beside the eager loop 12.5 (11 to 13) at least 12 met",
        "steps: resnet18 tf32, beside the eager loop 3.4 at least 3.5 missed",
        "time of a fixed order: pfl-cnn tf32, beside a free one 1.1 at most 1.1 met",
        "time of a round: moon on resnet18, beside FedAvg 1.7 at most 1.7 met",
        "rounds a second, beside pfl:1x1 10.5 (10 to 11) at least 10 met",
        "accuracy after round 30, points from pfl:1x1's 2 at most 1 missed",
        "7 met, 3 missed; medians (ranges)",
        "not measured: steps-bf16, methods-small, precision, refit, limits",
    ]


def test_each_is_measured_once_and_a_failure_ends_no_other(
    goals: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    parts = {
        "limits": goals.Part("refit.py --samples many", goals._limits),
        "refit": goals.Part(f"refit.py {SMALL}", goals._refit),
        "precision": goals.Part("precision.py --root", goals._precision, True),
    }
    monkeypatch.setattr(goals, "PARTS", parts)
    assert called(goals, monkeypatch, "--out", str(tmp_path / "made")) == 1
    out = capsys.readouterr().out
    assert "limits: failed after" in out and "argument --samples: invalid int value: 'many'" in out
    assert "precision: left out, it needs --data" in out and "not measured: limits, precision" in out
    assert "time of CCVR, beside FFC" in out
    assert "refit.json" in {file.name for file in (tmp_path / "made").iterdir()}
    assert called(goals, monkeypatch, "--out", str(tmp_path / "made"), "--only", "refit") == 0
    assert f"refit: refit.py {SMALL}" not in capsys.readouterr().out


def test_what_the_time_is_too_short_for_is_left_for_the_next_call(
    goals: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = "--out", str(tmp_path), "--only", "refit,limits", "--seconds", "0.05"
    assert called(goals, monkeypatch, *words) == 0
    out = capsys.readouterr().out
    assert "refit: the time was up after 0 s" in out and "limits: limits.py" not in out
    assert "0 met, 0 missed" in out and not list(tmp_path.glob("*.json"))


def test_mistakes_are_found_before_any_work(
    goals: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(goals, monkeypatch, "--out", str(tmp_path), "--only", "step") == 2
    assert "there is no part 'step'; choose of clients, steps-bf16" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert called(goals, monkeypatch, "--out", str(tmp_path / "file")) == 2
    assert "cannot be made: File exists" in capsys.readouterr().err
