"""The run folder: made, opened, filled line by line and round by round, and read back after damage to its files."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import isofed
from isofed.errors import RunError, UserError
from isofed.records import DamagedFile, RunFolder, load_tensors
from tests.records.tools import CONFIG, check_state, flip, new_run, one_sentence, state, strays

# --- making and opening a run


def test_create_and_open(tmp_path):
    made = new_run(tmp_path / "deep" / "er" / "run")
    folder = RunFolder.open(str(made.path))
    assert folder.config == CONFIG
    assert list(folder.config) == list(CONFIG)
    assert folder.environment["isofed"] == isofed.__version__
    assert folder.environment["torch"] == torch.__version__
    assert folder.environment["data"] == "abc"
    assert all(folder.environment[key] for key in ("python", "numpy", "platform", "device", "device_name"))
    assert (folder.metrics(), folder.latest(), folder.result()) == ([], None, None)


def test_the_configuration_is_plain_yaml(tmp_path):
    shared = ["a"]
    RunFolder.create(tmp_path / "run", {"x": shared, "y": shared, "z": (1, 2)}, {})
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "&" not in text
    assert yaml.safe_load(text) == {"x": ["a"], "y": ["a"], "z": [1, 2]}


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    folder = new_run(tmp_path / "run")
    folder.append({"round": 1})
    with pytest.raises(UserError) as error:
        RunFolder.create(tmp_path / "run", {"other": 1}, {})
    assert f"isofed run --resume {tmp_path / 'run'}` or choose another out=" in one_sentence(error)
    assert RunFolder.open(tmp_path / "run").config == CONFIG
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(UserError, match="already holds a run"):
        new_run(tmp_path / "run")


def test_a_folder_with_other_things_or_half_a_beginning_can_become_a_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "environment.json").write_text("{}")
    assert new_run(tmp_path).environment["data"] == "abc"
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_places_where_no_run_can_be(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "file" / "deep" / "run"):
        with pytest.raises(UserError, match="file in its place") as error:
            new_run(path)
        one_sentence(error)
    if os.path.isdir("/proc/self"):
        with pytest.raises(UserError, match="cannot make"):
            new_run(Path("/proc/self/run"))


def test_what_is_missing_is_said(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="it is a file"):
        RunFolder.open(tmp_path / "file")
    with pytest.raises(UserError, match="does not exist"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"it has no config.yaml and no environment.json$"):
        RunFolder.open(tmp_path)
    (tmp_path / "config.yaml").write_text("a: 1")
    with pytest.raises(UserError, match=r"it has no environment.json$"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2", "", "a: !!python/object/apply:os.getcwd []", "\x00"])
def test_a_spoilt_configuration_is_one_sentence(tmp_path, text):
    folder = new_run(tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml") as error:
        folder.config  # noqa: B018
    one_sentence(error)


# --- metrics


def test_lines_come_back_and_are_valid_json(tmp_path):
    folder = new_run(tmp_path)
    folder.append({"round": 1, "loss": math.nan, "nested": {"x": [math.inf, 1.5]}, "text": "ü\n\u2028"})
    folder.append({"round": 2, "loss": np.float32(0.5), "count": np.int64(3), "t": torch.tensor([1.0, -math.inf])})
    expected = [
        {"round": 1, "loss": None, "nested": {"x": [None, 1.5]}, "text": "ü\n\u2028"},
        {"round": 2, "loss": 0.5, "count": 3, "t": [1.0, None]},
    ]
    assert folder.metrics() == expected

    def refuse(name: str) -> None:
        raise AssertionError(name)

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse) for line in lines] == expected


def test_a_half_written_last_line_is_left_out_wherever_it_ends(tmp_path):
    folder = new_run(tmp_path)
    for round in (1, 2):
        folder.append({"round": round, "loss": 0.5})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        assert [line["round"] for line in folder.metrics()] == [1]
        again = RunFolder.open(tmp_path)
        again.append({"round": 7})
        assert [line["round"] for line in again.metrics()] == [1, 7]
    for tail in (b"\0\0\0", b"\xff\xfe\n", b'{"round": 3, "lo\n', b"12\n"):
        path.write_bytes(whole + tail)
        assert [line["round"] for line in folder.metrics()] == [1, 2]
        RunFolder.open(tmp_path).append({"round": 3})
        assert [line["round"] for line in folder.metrics()] == [1, 2, 3]


def test_a_damaged_middle_line_is_named(tmp_path):
    folder = new_run(tmp_path)
    for round in range(1, 5):
        folder.append({"round": round})
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b'{"rou\n', lines[3]]))
    for use in (folder.metrics, lambda: folder.rewind(1), lambda: RunFolder.open(tmp_path).append({"round": 5})):
        with pytest.raises(DamagedFile, match="line 3 of") as error:
            use()
        one_sentence(error)


def test_rewind_drops_later_rounds_and_a_half_line(tmp_path):
    folder = new_run(tmp_path)
    folder.rewind(3)
    assert not (tmp_path / "metrics.jsonl").exists()
    folder.append({"note": "no round"})
    for round in range(1, 7):
        folder.append({"round": round, "loss": 1 / round})
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()
    folder.rewind(6)
    assert path.read_bytes() == before
    with path.open("ab") as file:
        file.write(b'{"round": 7, "lo')
    folder.rewind(6)
    assert path.read_bytes() == before
    folder.rewind(4)
    assert before.startswith(path.read_bytes())
    assert [line.get("round") for line in folder.metrics()] == [None, 1, 2, 3, 4]
    folder.append({"round": 5})
    assert folder.metrics()[-1] == {"round": 5}
    folder.rewind(0)
    assert folder.metrics() == [{"note": "no round"}]
    assert strays(tmp_path) == []


# --- checkpoints, kept models and the end


def test_the_last_two_checkpoints_stay(tmp_path):
    folder = new_run(tmp_path)
    for round in (1, 2, 5, 999_999, 1_000_000):
        folder.checkpoint(round, state(round), {"round": round})
        checkpoint = folder.latest()
        check_state(checkpoint)
        assert checkpoint is not None
        assert (checkpoint.round, checkpoint.note) == (round, None)
    names = sorted(os.listdir(tmp_path / "checkpoints"))
    assert names == ["round-1000000.safetensors", "round-999999.safetensors"]
    # Going on from an earlier round leaves that one and no later ones.
    folder.checkpoint(7, state(7), {"round": 7})
    assert os.listdir(tmp_path / "checkpoints") == ["round-000007.safetensors"]


@pytest.mark.parametrize("damage", ["empty", "half", "header", "data", "info"])
def test_a_damaged_newest_checkpoint_is_skipped_with_a_note(tmp_path, damage):
    folder = new_run(tmp_path)
    for round in (11, 12):
        folder.checkpoint(round, state(round), {"round": round})
    path = tmp_path / "checkpoints" / "round-000012.safetensors"
    data = path.read_bytes()
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "half":
        path.write_bytes(data[: len(data) // 2])
    else:
        flip(path, {"header": 3, "data": len(data) - 1, "info": data.index(b"12")}[damage], 0x01)
    checkpoint = RunFolder.open(tmp_path).latest()
    check_state(checkpoint)
    assert checkpoint is not None
    assert checkpoint.note == (
        "round-000012.safetensors is damaged, so the newest state that can be read is that of round 11"
    )
    folder.checkpoint(12, state(12), {"round": 12})
    after = folder.latest()
    assert after is not None
    assert (after.round, after.note) == (12, None)


def test_when_every_checkpoint_is_damaged(tmp_path):
    folder = new_run(tmp_path)
    for round in (1, 2):
        folder.checkpoint(round, state(round), {"round": round})
        flip(tmp_path / "checkpoints" / f"round-{round:06d}.safetensors", -1)
    with pytest.raises(RunError, match=r"round-000002.safetensors, round-000001.safetensors damaged") as error:
        folder.latest()
    assert "out=" in one_sentence(error)


def test_kept_models_and_the_end(tmp_path):
    folder = new_run(tmp_path)
    folder.keep(10, state(10), {"round": 10})
    folder.keep(10, state(3), {"round": 10, "client": 3}, client=3)
    kept = tmp_path / "kept"
    assert sorted(os.listdir(kept)) == ["round-000010-client-000003.safetensors", "round-000010.safetensors"]
    assert load_tensors(kept / "round-000010-client-000003.safetensors")[1] == {"round": 10, "client": 3}
    folder.finish(state(20), {"round": 20}, {"accuracy": 0.9, "loss": math.nan})
    assert folder.result() == {"accuracy": 0.9, "loss": None}
    assert load_tensors(tmp_path / "model.safetensors")[0]["count"] == 20
    for text in ("{", "[1]", ""):
        (tmp_path / "result.json").write_text(text)
        with pytest.raises(DamagedFile, match=r"result\.json is damaged"):
            folder.result()
