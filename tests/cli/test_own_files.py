"""Methods and data in files of one's own, from whatever folder a command is given."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.cli_tools import (
    MINE,
    SMALL,
    model,
    result,
    same_record,
    succeeds,
)


def test_a_method_file_in_an_odd_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my [/bold] code, 2"
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text(MINE)
    out = succeeds("run", *SMALL, "rounds=1", f"method={folder / 'mine.py'}:Mine:scale=0.25", f"out={tmp_path / 'run'}")
    assert "mine.py:Mine:scale=0.25" in out
    succeeds("run", tmp_path / "run" / "config.yaml", f"out={tmp_path / 'again'}")
    same_record(tmp_path / "again", tmp_path / "run")


def unfinished(run: Path) -> bytes:
    """Take the end of a run away, as a kill just before it would; gives the model it had."""
    before = model(run)
    for name in ("result.json", "model.safetensors"):
        (run / name).unlink()
    return before


def test_a_method_file_gives_the_same_bytes_from_any_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "elsewhere" / "there"
    here.mkdir()
    there.mkdir(parents=True)
    (here / "mine.py").write_text(MINE)
    succeeds("run", *SMALL, "method=mine.py:Mine", "rounds=3", "out=run", cwd=here)
    method, before = result(here / "run")["method"], unfinished(here / "run")
    succeeds("run", "--resume", here / "run", cwd=there)
    assert model(here / "run") == before
    assert result(here / "run")["method"] == method
    succeeds("run", here / "run" / "config.yaml", "out=again", cwd=there)
    same_record(there / "again", here / "run")


def test_relative_paths_still_hold_when_a_run_goes_on_from_elsewhere(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    rng = np.random.default_rng(0)
    np.savez(here / "data.npz", images=rng.integers(0, 255, (60, 4, 4), dtype=np.uint8), labels=np.arange(60) % 3)
    (here / "split.json").write_text(json.dumps([list(range(20)), list(range(20, 48))]))
    words = ("model=mlp", "rounds=2", "partition=from_file:split.json")
    for name, data in (("path", ["data=data.npz"]), ("root", ["data=npz", "root=data.npz"])):
        succeeds("run", *words, *data, f"out={name}", cwd=here)
        before = unfinished(here / name)
        succeeds("run", "--resume", here / name, cwd=there)
        assert model(here / name) == before
        succeeds("run", here / name / "config.yaml", f"out={name}", cwd=there)
        same_record(there / name, here / name)


def test_methods_explains_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    out = succeeds("methods", "mine.py:Mine", cwd=tmp_path)
    assert "A method of one's own." in out and "option:  scale = 0.5" in out and "acts at: aggregate" in out
