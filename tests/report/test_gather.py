"""Runs are found, named and grouped as a reader expects, whatever state their folders are in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isofed.report.gather import Reader, Splits, method_text, read_run, run_folders
from tests.report.made import diagnose, line, make_comparison, make_run

MINE = """
from dataclasses import dataclass
from isofed import Method
import pathlib
pathlib.Path(__file__).with_suffix(".ran").touch()

@dataclass(frozen=True)
class Mine(Method):
    amount: float = 1.0

    def loss(self, step):
        return self.amount * step.logits.mean()
"""


def test_a_run_folder_and_the_folder_of_a_comparison_are_found(tmp_path: Path) -> None:
    make_comparison(tmp_path / "pair", {"fedavg": [0.5, 0.6], "fedprox": [0.7, 0.8]})
    make_run(tmp_path / "one", [0.3], seed=7)
    assert run_folders(tmp_path / "one") == [tmp_path / "one"]
    assert len(run_folders(tmp_path / "pair")) == 4
    assert run_folders(tmp_path / "nowhere") == []
    found = Reader().read([tmp_path / "pair"])
    assert {row: list(by_seed) for row, by_seed in found.rows.items()} == {"fedavg": [0, 1], "fedprox": [0, 1]}


def test_rows_are_in_the_order_of_the_table_of_the_comparison_or_of_the_runs_start(tmp_path: Path) -> None:
    make_comparison(tmp_path, {"scaffold": [0.5], "fedavg": [0.6], "feduv": [0.4]})
    assert list(Reader().read([tmp_path]).rows) == ["scaffold", "fedavg", "feduv"]
    table = {"rows": [{"method": "feduv"}, {"method": "scaffold"}], "target": 0.4}
    (tmp_path / "comparison.json").write_text(json.dumps(table))
    found = Reader().read([tmp_path])
    assert list(found.rows) == ["feduv", "scaffold", "fedavg"] and found.target == 0.4


def test_a_row_is_named_by_what_differs(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": 0.1, "seed": 1, "workers": 2}, {"lr": 0.2, "target": 0.3}]
    for number, values in enumerate(given):
        make_run(tmp_path / str(number), [0.5], "fedprox:mu=0.5", **values)
    found = Reader().read([tmp_path])
    assert {row: len(runs) for row, runs in found.rows.items()} == {
        "fedprox:mu=0.5 lr=0.1": 2,
        "fedprox:mu=0.5 lr=0.2": 1,
    }


def test_a_target_at_which_runs_stop_makes_them_others(tmp_path: Path) -> None:
    for number, target in enumerate((0.2, 0.9)):
        make_run(tmp_path / str(number), [0.5], target=target, stop_at_target=True)
    found = Reader().read([tmp_path])
    assert list(found.rows) == ["fedavg target=0.2", "fedavg target=0.9"] and not found.problems


def test_two_runs_of_one_method_and_seed_are_told(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [0.5])
    make_run(tmp_path / "b", [0.7])
    found = Reader().read([tmp_path])
    assert len(found.runs) == 1 and "two runs of fedavg with seed 0" in found.problems[0]
    assert not Reader().read([tmp_path / "a", tmp_path / "a"]).problems


def test_a_method_is_named_without_its_defaults_and_without_running_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    make_run(tmp_path / "run", [0.5], f"fedprox:mu=0.2+{file}:Mine:amount=2", finished=False)
    file.with_suffix(".ran").unlink()
    file.write_text(MINE + "# a new version, which would be run if it were loaded")
    assert read_run(tmp_path / "run").method == "fedprox:mu=0.2+mine.py:Mine:amount=2"
    assert not file.with_suffix(".ran").exists()
    assert method_text([{"fedprox": {"mu": 0.01}}]) == "fedprox"
    assert method_text([{"gone": {"a": 1}}]) == "gone:a=1"


def test_an_unfinished_run_is_of_the_row_of_the_finished_ones(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    for seed, finished in enumerate((True, False)):
        make_run(tmp_path / str(seed), [0.5], f"{tmp_path / 'mine.py'}:Mine", seed, finished)
    found = Reader().read([tmp_path])
    assert list(found.rows) == ["mine.py:Mine"] and found.methods == {"mine.py:Mine"}


def test_a_half_written_line_is_left_out_until_it_is_whole(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [0.2, 0.3], finished=False)
    reader, metrics, text = Reader(), tmp_path / "run" / "metrics.jsonl", json.dumps(line(3, 0.4)) + "\n"
    with metrics.open("a") as file:
        file.write(text[:40])
    assert [x["round"] for x in reader.read([tmp_path]).runs[0].history] == [1, 2]
    with metrics.open("a") as file:
        file.write(text[40:])
    assert [x["round"] for x in reader.read([tmp_path]).runs[0].history] == [1, 2, 3]


def test_a_run_that_has_not_changed_is_not_read_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.2], finished=False)
    reader = Reader()
    first = reader.read([tmp_path]).runs[0]
    assert reader.read([tmp_path]).runs[0] is first
    folder.append(line(2, 0.5))
    assert reader.read([tmp_path]).runs[0] is not first


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "config.yaml", "environment.json"])
def test_a_damaged_run_is_told_and_the_others_are_shown(tmp_path: Path, name: str) -> None:
    make_run(tmp_path / "good", [0.2])
    make_run(tmp_path / "bad", [0.2, 0.3], "fedprox")
    damaged = {"metrics.jsonl": "{]\n{}\n", "config.yaml": "a: [", "environment.json": "{", "result.json": "[]"}
    (tmp_path / "bad" / name).write_text(damaged[name])
    found = Reader().read([tmp_path])
    assert list(found.rows) == ["fedavg"] and "bad" in found.problems[0]


def test_diagnostics_are_read_as_far_as_they_can_be(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [0.2], finished=False)
    diagnose(tmp_path / "run", [1, 5])
    with (tmp_path / "run" / "diagnostics.jsonl").open("a") as file:
        file.write('[1]\n{"round": 5, "significant": 3}\n{"round": 9, "class')
    (tmp_path / "run" / "diagnosis.json").write_text("{half")
    run = read_run(tmp_path / "run")
    assert [x["round"] for x in run.diagnostics] == [1, 5] and run.diagnostics[1]["significant"] == 3
    assert run.diagnosis == {}


def test_the_split_is_that_of_the_run(tmp_path: Path) -> None:
    from isofed import Federation
    from isofed.data.partition import counts

    federation = Federation(data="synthetic:samples=200,test=50", partition="dirichlet:0.3", clients=5, validation=0.1)
    world = federation.world
    make_run(tmp_path / "run", [0.2], partition="dirichlet:0.3", clients=5, validation=0.1)
    config = tmp_path / "run" / "environment.json"
    made_with = json.loads(config.read_text()) | {"data": world.dataset.fingerprint}
    config.write_text(json.dumps(made_with))
    (split,) = Splits().of([read_run(tmp_path / "run")])
    assert split["counts"] == counts(world.clients, world.parts["train"].labels, 10).tolist()
    config.write_text(json.dumps(made_with | {"data": "other"}))
    (split,) = Splits().of([read_run(tmp_path / "run")])
    assert "have changed" in split["problem"] and "counts" not in split


def test_a_split_that_cannot_be_made_again_says_why(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [0.2])
    config = tmp_path / "run" / "config.yaml"
    whole = config.read_text()
    for data, why in (("given:mine", "handed over in Python"), ("no-such-data", "cannot be made again")):
        config.write_text(whole.replace("data: synthetic:samples=200,test=50", f"data: {data}"))
        (split,) = Splits().of([read_run(tmp_path / "run")])
        assert why in split["problem"]
