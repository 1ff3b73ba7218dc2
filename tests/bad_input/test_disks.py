"""Disks that are full, limited or read-only: one sentence, and nothing lost or left lying."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from isofed.files import load_tensors
from tests.cli_tools import TINY, Done, complaint, everything, isofed, metrics, model, succeeds

LONG = (*TINY, "rounds=150")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("tiny") / "run"
    succeeds("run", *LONG, f"out={run}")
    return run


def sound(run: Path, whole: Path) -> None:
    """What a failed run has written must be whole."""
    rounds = [line["round"] for line in metrics(run)]
    assert rounds == list(range(1, len(rounds) + 1)) and len(rounds) < 150
    for path in (run / "checkpoints").glob("*.safetensors"):
        load_tensors(path)
    assert not [p for p in run.rglob("*") if p.name.endswith(".tmp")]
    succeeds("run", "--resume", run)
    assert model(run) == model(whole)
    assert [line["round"] for line in metrics(run)] == list(range(1, 151))


@pytest.mark.parametrize(("limit", "what"), [(1000, "round-000001"), (18_700, "round-0"), (20_000, "metrics.jsonl")])
def test_a_limit_on_files_fails_in_one_sentence_and_loses_nothing(
    limit: int, what: str, tiny: Path, tmp_path: Path
) -> None:
    """A model takes 18,720 bytes and the metrics in the end more: each limit hits another file first."""
    done = isofed("run", *LONG, f"out={tmp_path / 'run'}", limit=limit)
    said = complaint(done, 1)
    assert "cannot write" in said and what in said
    sound(tmp_path / "run", tiny)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 kB, where this process may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(disk)]
    try:
        mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("this process may not mount a file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_fails_in_one_sentence_and_loses_nothing(small_disk: Path, tiny: Path) -> None:
    run = small_disk / "run"
    said = complaint(isofed("run", *LONG, f"out={run}"), 1)
    assert "disk or the quota is full" in said
    assert len(metrics(run)) > 10
    subprocess.run(["mount", "-o", "remount,size=10m", str(small_disk)], check=True)
    sound(run, tiny)


def test_a_full_disk_when_a_comparison_is_written(small_disk: Path) -> None:
    words = ("compare", "fedavg", "fedprox", *LONG, "rounds=2", f"out={small_disk / 'runs'}")
    (small_disk / "filler").write_bytes(b"0" * 60_000)
    said = complaint(isofed(*words), 1)
    assert "full" in said
    (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=10m", str(small_disk)], check=True)
    assert "fedprox" in succeeds(*words)


def test_a_read_only_folder_is_refused(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=10m", str(small_disk)], check=True)
    succeeds("run", *LONG, "rounds=2", f"out={small_disk / 'run'}")
    (small_disk / "run" / "result.json").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    before = everything(small_disk)
    for words in (
        ("run", *LONG, f"out={small_disk / 'new'}"),
        ("run", "--resume", str(small_disk / "run")),
        ("compare", "fedavg", *LONG, f"out={small_disk / 'new'}"),
    ):
        said = complaint(isofed(*words), 2)
        assert "cannot" in said and str(small_disk) in said
    picture = f"picture={small_disk / 'split.png'}"
    assert "split.png" in complaint(isofed("data", "digits", "clients=2", "partition=iid", picture), 2)
    assert everything(small_disk) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not apply to root")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    done: Done = isofed("run", *LONG, f"out={tmp_path / 'closed' / 'run'}")
    assert "cannot make the run folder" in complaint(done, 2)
