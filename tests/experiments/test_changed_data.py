"""Runs on data that have changed in between do not stand in one table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isofed
from isofed.data import load
from tests.cli_tools import complaint, everything, succeeds
from tests.cli_tools import isofed as command

WORDS: dict[str, Any] = {"model": "mlp", "partition": "iid", "clients": 2, "local_epochs": 1, "rounds": 1}
WORDS |= {"executor": "serial"}
REFUSED = "have changed since it was started, so it cannot be compared with runs on what they are now: put them back"


def write(file: Path, seed: int) -> Path:
    """A small data set, another one with each seed."""
    rng = np.random.default_rng(seed)
    parts: dict[str, Any] = {
        "x_train": rng.integers(0, 255, (60, 4, 4), dtype=np.uint8),
        "y_train": np.arange(60) % 3,
        "x_test": rng.integers(0, 255, (30, 4, 4), dtype=np.uint8),
        "y_test": np.arange(30) % 3,
    }
    np.savez(file, **parts)
    return file


def test_a_comparison_does_not_go_on_with_other_data(tmp_path: Path) -> None:
    words = [f"{k}={v}" for k, v in WORDS.items()] + [f"data={write(tmp_path / 'm.npz', 1)}", f"out={tmp_path / 'a'}"]
    table = succeeds("compare", "fedavg", "fedprox", *words)
    write(tmp_path / "m.npz", 2)
    before = everything(tmp_path / "a")
    said = complaint(command("compare", "fedavg", "fedprox", "fednova", *words), 2)
    assert said == f"the data of the run {tmp_path / 'a' / 'fedavg' / 'seed-0'} {REFUSED}, or choose another out="
    assert everything(tmp_path / "a") == before
    again = succeeds("compare", "fedavg", "fedprox", *words)  # of one data set, for which nothing need be read
    assert again[again.index("\nmethod") :] == table[table.index("\nmethod") :]
    write(tmp_path / "m.npz", 1)
    succeeds("compare", "fedavg", "fedprox", "fednova", *words)


def test_data_that_were_moved_are_the_same(tmp_path: Path) -> None:
    given = {**WORDS, "data": "npz", "root": str(write(tmp_path / "m.npz", 1)), "out": tmp_path / "a"}
    isofed.compare(["fedavg"], **given)
    moved = {**given, "root": str((tmp_path / "m.npz").rename(tmp_path / "n.npz"))}
    assert [row.method for row in isofed.compare(["fedavg", "fedprox"], **moved).rows] == ["fedavg", "fedprox"]
    by_path = {**WORDS, "data": str(tmp_path / "n.npz"), "out": tmp_path / "b"}
    isofed.compare(["fedavg"], **by_path)
    other = {**by_path, "data": str((tmp_path / "n.npz").rename(tmp_path / "o.npz"))}
    assert len(isofed.compare(["fedavg", "fedprox"], **other).rows) == 2
    write(tmp_path / "p.npz", 2)
    with pytest.raises(isofed.UserError, match=REFUSED):  # also where nothing is missing
        isofed.compare(["fedavg"], **{**by_path, "data": str(tmp_path / "p.npz")})
    with pytest.raises(isofed.UserError, match="holds a run with data=.*, not digits; choose another out="):
        isofed.compare(["fedavg"], **{**by_path, "data": "digits"})


def test_what_was_mixed_before_is_refused_as_well(tmp_path: Path) -> None:
    given = {**WORDS, "data": str(write(tmp_path / "m.npz", 1)), "out": tmp_path / "a"}
    isofed.compare(["fedavg"], **given)
    write(tmp_path / "m.npz", 2)
    isofed.compare(["fedprox"], **given)
    with pytest.raises(isofed.UserError, match=f"fedavg/seed-0 {REFUSED}"):
        isofed.compare(["fedavg", "fedprox"], **given)


@pytest.mark.parametrize("missing", ["lr=0.1", "chosen"])
def test_a_tuning_does_not_go_on_with_other_data(missing: str, tmp_path: Path) -> None:
    given = {**WORDS, "data": str(write(tmp_path / "m.npz", 1)), "out": tmp_path / "a"}
    grid = {"lr": [0.01, 0.1]}
    isofed.tune("fedavg", grid, **given)
    write(tmp_path / "m.npz", 2)
    shutil.rmtree(tmp_path / "a" / missing)
    with pytest.raises(isofed.UserError, match=REFUSED):
        isofed.tune("fedavg", grid, **given)


def test_data_given_in_python_are_looked_at_too(tmp_path: Path) -> None:
    one, two = (load(str(write(tmp_path / "m.npz", seed))) for seed in (1, 2))
    isofed.compare(["fedavg"], dataset=one, out=tmp_path / "a", **WORDS)
    with pytest.raises(isofed.UserError, match=REFUSED):
        isofed.compare(["fedavg", "fedprox"], dataset=two, out=tmp_path / "a", **WORDS)


def test_what_an_earlier_version_noted_of_the_data_counts(tmp_path: Path) -> None:
    """With a validation part that was a fingerprint of the rest, which is another for each seed."""
    given = {**WORDS, "data": str(write(tmp_path / "m.npz", 1)), "out": tmp_path / "a", "validation": 0.2}
    isofed.compare(["fedavg"], seeds=2, **given)
    for seed in range(2):
        run = tmp_path / "a" / "fedavg" / f"seed-{seed}"
        rest = isofed.Federation.resume(run).world.dataset.fingerprint
        environment = json.loads((run / "environment.json").read_text())
        assert environment["data"] != rest
        (run / "environment.json").write_text(json.dumps(environment | {"data": rest}))
    assert len(isofed.compare(["fedavg", "fedprox"], seeds=2, **given).rows) == 2
