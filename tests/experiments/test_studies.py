"""Comparing and tuning from Python, as the command line does."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import isofed
from isofed import commands, experiments
from isofed.data import load
from isofed.engine import choose
from isofed.engine.workers import Pool
from isofed.experiments import plan_tuning
from isofed.methods import Step
from isofed.tables import Row

SMALL: dict[str, Any] = {"data": "synthetic:samples=120,test=40", "partition": "iid", "clients": 2, "model": "mlp"}
SMALL |= {"local_epochs": 1, "rounds": 2, "executor": "serial"}


def test_a_comparison_gives_the_rows_of_the_command(tmp_path: Path) -> None:
    found = isofed.compare(["fedavg", "fedprox:mu=1"], seeds=2, out=tmp_path / "one", **SMALL)
    words = [f"{key}={value}" for key, value in SMALL.items()]
    commands.compare(
        Console(quiet=True), ["fedavg", "fedprox:mu=1", *words, "seeds=2", f"out={tmp_path / 'two'}"], True
    )
    tables = [json.loads((tmp_path / name / "comparison.json").read_text()) for name in ("one", "two")]
    assert [tables[0][k] == tables[1][k] for k in tables[0] if k != "rows"] == [True] * 5
    for one, other, row in zip(tables[0]["rows"], tables[1]["rows"], found.rows, strict=True):
        assert (one["method"], one["accuracy"], one["low"]) == (other["method"], other["accuracy"], other["low"])
        assert (row.method, row.accuracy, row.low) == (one["method"], one["accuracy"], one["low"])
    assert np.mean([r.accuracy for r in found.results["fedavg"].values()]) == pytest.approx(found.rows[0].accuracy)
    again = isofed.compare(["fedavg"], seeds=2, out=tmp_path / "one", **SMALL)  # read, not run
    assert again.rows[0].accuracy == found.rows[0].accuracy
    assert again.results["fedavg"][0].folder == tmp_path / "one" / "fedavg" / "seed-0"


def test_nothing_is_kept_without_out_and_data_of_ones_own_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dataset = load(SMALL["data"])
    words = {k: v for k, v in SMALL.items() if k != "data"}
    own = isofed.compare(["fedavg"], seeds=[3], dataset=dataset, **words)
    assert own.rows[0].accuracy == isofed.Federation(dataset=dataset, seed=3, **words).fit().accuracy
    assert own.results["fedavg"][3].folder is None and not list(tmp_path.iterdir())
    with pytest.raises(isofed.UserError, match="there is no setting 'roundss': did you mean 'rounds'"):
        isofed.compare(["fedavg"], roundss=3)
    wrong: Any = [1, 2]
    with pytest.raises(isofed.UserError, match=r"the data set is a list: make one with isofed.data.Dataset.build"):
        isofed.compare(["fedavg"], dataset=wrong)


def test_tuning_tries_all_and_judges_the_best_once(tmp_path: Path) -> None:
    grid = {"lr": [1e-6, 0.1], "fedprox.mu": [0.01]}
    found = isofed.tune("fedprox", grid, out=tmp_path / "tuned", **SMALL)
    assert [t.setting for t in found.trials] == ["lr=1e-06 fedprox.mu=0.01", "lr=0.1 fedprox.mu=0.01"]
    best = max(found.trials, key=lambda t: t.validation_accuracy or 0)
    assert found.chosen == best.setting
    lr = float(best.setting.split()[0].removeprefix("lr="))
    alone = isofed.Federation(method="fedprox:mu=0.01", lr=lr, **SMALL).fit()
    assert found.row.accuracy == alone.accuracy and found.row.seeds == 1
    assert json.loads((tmp_path / "tuned" / "tuning.json").read_text())["chosen"] == found.chosen


def test_a_private_method_has_its_epsilon_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{key}={value}" for key, value in SMALL.items()]
    methods = ["fedavg", "gaussian:noise=2"]
    commands.compare(Console(width=160), [*methods, *words, f"out={tmp_path / 'runs'}"], True)
    out = capsys.readouterr().out
    header, plain, private = (line for line in out.splitlines() if line.startswith(("method ", *methods)))
    rows = json.loads((tmp_path / "runs" / "comparison.json").read_text())["rows"]
    (result,) = (tmp_path / "runs").glob("gaussian*/seed-0/result.json")
    epsilon = json.loads(result.read_text())["privacy"]["epsilon"]
    assert header.split()[-1] == "epsilon" and plain.split()[-1] == "-"
    assert float(private.split()[-1]) == pytest.approx(epsilon, rel=0.01)
    assert [row["epsilon"] for row in rows] == [None, epsilon]
    assert "at delta 1e-05." in " ".join(out.split())
    assert "epsilon" in (tmp_path / "runs" / "comparison.csv").read_text().splitlines()[0].split(",")


def test_the_footnote_does_not_count_seeds_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    from isofed.config import settings

    for failed, said in ((0, "over 2 seeds. "), (1, "over 2 seeds, less those that failed. ")):
        rows = [Row("fedavg", seeds=2, accuracy=0.5), Row("fedprox", seeds=2 - failed, accuracy=0.5, failed=failed)]
        commands._print_comparison(Console(width=200), rows, settings({}), 2)
        assert said in " ".join(capsys.readouterr().out.split()) + " "


def test_a_row_without_an_interval_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    from isofed.config import settings

    shared: dict[str, Any] = {"seeds": 3, "accuracy": 0.5, "std": 0.1}
    equal, other = Row("fedprox", difference=-0.003, **shared), Row("fednova", difference=0.1, low=0, high=1, **shared)
    for row, said in ((equal, True), (other, False)):
        commands._print_comparison(Console(width=200), [Row("fedavg", **shared), row], settings({}), 3)
        out = " ".join(capsys.readouterr().out.split())
        assert ("and there is none where differences have no spread." in out) == said


def test_workers_are_started_where_all_runs_together_are_worth_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    many, started = dict(SMALL, executor="auto"), []

    class Counted(Pool):
        def __init__(self, count: int) -> None:
            started.append(count)
            super().__init__(count)

    monkeypatch.setattr(experiments, "Pool", Counted)
    steps = 2 * 2 * 2  # two rounds of two clients with two batches each
    monkeypatch.setattr(choose, "WORTH_WORKERS", 3 * steps)
    short = isofed.compare(["fedavg", "fedprox", "central"], out=tmp_path / "runs", **many)
    assert [by_seed[0].executor for by_seed in short.results.values()] == ["serial"] * 3 and not started
    # Two runs of these six are there, and those on pooled data have one client at a time.
    longer = isofed.compare(["fedavg", "fedprox", "central"], seeds=3, out=tmp_path / "runs", **many)
    assert [r.executor for r in longer.results["fedavg"].values()] == ["serial", "workers:2", "workers:2"]
    assert longer.results["central"][1].executor == "serial" and started == [2]


@dataclasses.dataclass(frozen=True)
class Pull(isofed.Method):
    """A pull of one's own."""

    strength: float = 0.5

    def gradient(self, step: Step) -> None:
        step.grad.add_(step.weights - step.start, alpha=self.strength)


def test_one_method_needs_no_list_and_seeds_may_be_a_range() -> None:
    assert [r.method for r in isofed.compare("fedprox:mu=1", **SMALL).rows] == ["fedprox:mu=1"]
    (row,) = isofed.compare(Pull(), seeds=range(1, 3), **SMALL).rows
    assert (row.method, row.seeds) == ("pull", 2)


@pytest.mark.parametrize("name", ["pull.strength", "Pull.strength"])
def test_options_of_an_object_are_tuned(name: str) -> None:
    found = isofed.tune(["fedprox:mu=0.1", Pull()], {name: [0.2, 1], "fedprox.mu": [0.3]}, **SMALL)
    wanted = {"method": "fedprox:mu=0.5", "validation": 0.1, "final_test": False}
    assert found.trials[0].setting == f"{name}=0.2 fedprox.mu=0.3"
    assert found.trials[0].validation_accuracy == isofed.Federation(**SMALL | wanted).fit().accuracy
    with pytest.raises(isofed.UserError, match="there is no part of the method 'pull' called 'pulled': did you mean"):
        isofed.tune(Pull(), {"pulled.strength": [1]}, **SMALL)
    with pytest.raises(isofed.UserError, match="called 'strenght': did you mean 'strength'"):
        isofed.tune(Pull(), {"pull.strenght": [1]}, **SMALL)


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        (["lr"], "the grid must be a dict"),
        ({"lr": 0.1}, r"the values to try of 'lr' must be a list, such as \[0.1\]"),
        ({"lr": "0.1,0.2"}, r"the values to try of 'lr' must be a list, such as \[0.1,0.2\]"),
        ({"lr": []}, "'lr' has no value to try"),
        ({}, "nothing to tune"),
    ],
)
def test_what_is_no_grid_is_refused(grid: Any, said: str) -> None:
    with pytest.raises(isofed.UserError, match=said):
        isofed.tune("fedavg", grid, **SMALL)


def test_a_value_that_is_given_twice_is_tried_once(tmp_path: Path) -> None:
    plans, _ = plan_tuning("fedavg", {"lr": ["0.1", "0.1", "0.2"]}, [0], SMALL, tmp_path)
    assert [plan.row for plan in plans] == ["lr=0.1", "lr=0.2"]
