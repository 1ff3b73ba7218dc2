"""Methods and data in files of one's own, from whatever folder a command is given."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from tests.cli_tools import (
    MINE,
    SMALL,
    complaint,
    isofed,
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


def test_what_is_in_names_is_shown_as_it_is(tmp_path: Path) -> None:
    """``:M:`` is a picture of an M elsewhere, and brackets are markup."""
    (tmp_path / "mine.py").write_text(MINE.replace("class Mine", "class M"))
    out = succeeds("run", *SMALL, "rounds=1", "method=mine.py:M:scale=0.25", "out=:dog:", cwd=tmp_path)
    assert out.startswith("mine.py:M:scale=0.25 on ") and out.endswith("recorded in :dog:\n")
    table = succeeds("compare", *SMALL, "rounds=1", "mine.py:M:scale=0.25", "out=a", cwd=tmp_path)
    assert "\nmine.py:M:scale=0.25 " in table
    rng = np.random.default_rng(0)
    pictures, kinds = rng.integers(0, 255, (60, 4, 4), dtype=np.uint8), np.array(["grade [low]", "a[/b]"] * 30)
    np.savez(tmp_path / "pets[copy].npz", images=pictures, labels=kinds, domains=np.array(["[x]", "[/y]"] * 30))
    shown = succeeds("data", "pets[copy].npz", "partition=domain", cwd=tmp_path)
    assert "pets[copy]: 48 train" in shown and "domains [/y], [x]" in shown and "a[/b] grade [low]" in shown
    out = succeeds("run", *SMALL[1:], "data=pets[copy].npz", "rounds=1", "partition=iid", "out=b", cwd=tmp_path)
    assert "fedavg on pets[copy]: " in out


def test_a_file_that_ends_the_process_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE + "\nimport sys\nsys.exit(0)\n")
    said = complaint(isofed("run", *SMALL, "method=mine.py:Mine", "out=a", cwd=tmp_path), 2)
    assert "mine.py could not be run: it calls sys.exit(); put what is to be run by itself below if __name__" in said
    ends = "    def begin(self, visit):\n        raise SystemExit(3)\n"
    (tmp_path / "mine.py").write_text(f"{MINE}\n\n@dataclass(frozen=True)\nclass Ends(Method):\n{ends}")
    done = isofed("run", *SMALL, "method=mine.py:Ends", "executor=serial", "out=a", cwd=tmp_path)
    assert done.code == 1
    where = r"\(mine.py, line \d+, in Ends.begin\)"
    assert re.search(rf"code of your own called sys.exit\(3\) {where}: raise an exception instead", done.err)


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
