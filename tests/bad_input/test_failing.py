"""Clients and servers that fail during a run: it goes on where it can, and otherwise keeps the last good state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isofed.files import load_tensors
from tests.cli_tools import SMALL, complaint, isofed, metrics, result, succeeds

# --- things that go on


def test_an_empty_client_is_recorded_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "split.json").write_text(json.dumps([list(range(100)), [], list(range(100, 200))]))
    words = (*SMALL[:2], f"partition=from_file:{tmp_path / 'split.json'}", "local_epochs=1", "rounds=30")
    out = succeeds("run", *words, f"out={tmp_path / 'run'}")
    for line in metrics(tmp_path / "run"):
        assert line["events"] == [{"client": 1, "event": "has no data"}]
        assert line["clients"] == 2 and line["samples"] == 200
    assert "client 1 has no data" in out
    assert len(out.splitlines()) <= 20, "the same event every round must not fill the screen"
    assert result(tmp_path / "run")["events"] == 30


def test_a_client_whose_loss_becomes_nan_is_left_out_and_recorded(here: Path, tmp_path: Path) -> None:
    words = (*SMALL, "rounds=4", "method=methods.py:Broken", "keep_clients=every:1")
    out = succeeds("run", *words, f"out={tmp_path / 'run'}", cwd=here)
    lines = metrics(tmp_path / "run")
    assert [len(line["events"]) for line in lines] == [0, 1, 1, 1]
    assert [line["clients"] for line in lines] == [2, 1, 1, 1]
    assert lines[1]["events"][0]["client"] == 1 and "NaN" in lines[1]["events"][0]["event"]
    assert "round 2" in out and "client 1" in out and "3 events" in out
    # With one client left, its model is the next global one.
    left, _ = load_tensors(tmp_path / "run" / "kept" / "round-000004-client-000000.safetensors")
    final, _ = load_tensors(tmp_path / "run" / "model.safetensors")
    for name, value in final.items():
        assert (value - left[name]).abs().max() < 1e-6


@pytest.mark.parametrize("executor", ["serial", "workers"])
def test_a_mistake_in_a_method_costs_its_client_and_is_told(executor: str, here: Path, tmp_path: Path) -> None:
    words = (*SMALL, "rounds=2", "method=methods.py:Raises", f"executor={executor}", "workers=1")
    out = succeeds("run", *words, f"out={tmp_path / 'run'}", cwd=here)
    event = metrics(tmp_path / "run")[0]["events"][0]
    assert event["client"] == 0
    said = "failed with ValueError: no [/bold] idea [red] (methods.py, line "
    assert event["event"].startswith(said) and event["event"].endswith(", in Raises.begin)")
    assert f"client 0 {said}" in out


def test_a_loss_that_is_nan_is_noticed(here: Path, tmp_path: Path) -> None:
    split = [list(range(200))[::2], [199]]
    (tmp_path / "split.json").write_text(json.dumps(split))
    words = (*SMALL[:2], "local_epochs=1", "rounds=2", "method=methods.py:LossIsNan")
    succeeds("run", *words, f"partition=from_file:{tmp_path / 'split.json'}", f"out={tmp_path / 'run'}", cwd=here)
    assert [e["client"] for line in metrics(tmp_path / "run") for e in line["events"]] == [1, 1]


# --- things that fail


def test_when_everything_becomes_nan_the_last_good_state_is_kept(here: Path, tmp_path: Path) -> None:
    words = (*SMALL, "rounds=5", "method=methods.py:Broken:first=3,everyone=true")
    done = isofed("run", *words, f"out={tmp_path / 'run'}", cwd=here)
    said = complaint(done, 1)
    assert "round 3" in said and "NaN" in said and str(tmp_path / "run") in said
    assert [line["round"] for line in metrics(tmp_path / "run")] == [1, 2]
    tensors, _ = load_tensors(tmp_path / "run" / "checkpoints" / "round-000002.safetensors")
    assert all(bool(t.isfinite().all()) for t in tensors.values())
    assert not (tmp_path / "run" / "result.json").exists()
    assert complaint(isofed("run", "--resume", tmp_path / "run", cwd=here), 1) == said  # it stays so


def test_a_learning_rate_out_of_all_proportion(tmp_path: Path) -> None:
    said = complaint(isofed("run", *SMALL, "rounds=5", "lr=1e30", f"out={tmp_path / 'run'}"), 1)
    assert "round 1 has no client left" in said and "NaN" in said
    assert "is kept in" not in said, "nothing was finished, so nothing is kept"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_server_step_that_diverges_does_not_spoil_what_is_kept(here: Path, tmp_path: Path) -> None:
    words = (*SMALL, "method=methods.py:ServerDiverges")
    said = complaint(isofed("run", *words, "rounds=5", f"out={tmp_path / 'run'}", cwd=here), 1)
    assert "round 3" in said and "NaN" in said
    kept, _ = load_tensors(tmp_path / "run" / "checkpoints" / "round-000002.safetensors")
    assert (kept["server/sum"] == 2).all()
    assert all(bool(t.isfinite().all()) for t in kept.values())


def test_a_mistake_in_a_server_step_is_one_sentence_too(here: Path, tmp_path: Path) -> None:
    words = (*SMALL, "rounds=2", "method=methods.py:ServerRaises", f"out={tmp_path / 'run'}")
    code, _, err = isofed("run", *words, cwd=here)
    assert code == 1 and len(err.splitlines()) == 1 and "Traceback" not in err
    assert "ZeroDivisionError" in err and "nothing to divide by" in err
    code, _, err = isofed("run", "--resume", tmp_path / "run", "--debug", cwd=here)
    assert code == 1 and "Traceback" in err and "in aggregate" in err
