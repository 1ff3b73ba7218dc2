"""The run folder against other processes, kills, and disks that are full or may not be written."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isofed.errors import RunError, UserError
from isofed.files import _exclusive_file, remove_strays
from isofed.records import RunFolder, load_tensors
from tests.records.processes import SCRIPT, child_environment
from tests.records.tools import CONFIG, check_state, new_run, one_sentence, state, strays


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[str, Path], tuple[int, Any]]]:
    """Start one of the functions of ``processes.py`` in its own process; returns the process's id and what it said."""
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    with subprocess.Popen(
        [sys.executable, SCRIPT, "nursery"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(hash_seed=1),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        pids = []

        def begin(name: str, path: Path) -> tuple[int, Any]:
            stdin.write(f"{name} {path}\n")
            stdin.flush()
            pid, value = json.loads(stdout.readline())
            pids.append(pid)
            return pid, value

        yield begin
        stdin.close()
        for pid in pids:
            kill(pid)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def kill(pid: int) -> None:
    """End a process of this test as the kernel would for want of memory, and wait until it is gone."""
    if alive(pid):
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.001)
    assert not alive(pid)


def test_two_processes_write_the_same_bytes(tmp_path, start):
    _, names = start("save", tmp_path / "one")
    done = subprocess.run(
        [sys.executable, SCRIPT, "save", str(tmp_path / "two")],
        check=True,
        capture_output=True,
        timeout=60,
        env=child_environment(hash_seed=2),
    )
    _, others = json.loads(done.stdout)
    assert names != others
    assert sorted(names) == sorted(others) == list(load_tensors(tmp_path / "two")[0])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_file_is_whole_after_a_kill(tmp_path, start):
    path = tmp_path / "file"
    rng = random.Random(1)
    for _ in range(25):
        pid, _ = start("rewrite", path)
        time.sleep(rng.uniform(0, 0.02))
        kill(pid)
        content = path.read_bytes()
        assert len(content) == 4_000_000
        assert content == content[:1] * len(content)
    # Some of the kills came while a file was being written, or this test would show nothing.
    assert strays(tmp_path) != []
    remove_strays(tmp_path)
    assert os.listdir(tmp_path) == ["file"]


def test_a_run_survives_being_killed_again_and_again(tmp_path, start):
    folder = new_run(tmp_path / "run")
    rng = random.Random(0)
    reached = 0
    for _ in range(30):
        pid, left = start("train", folder.path)
        assert left == []
        time.sleep(rng.uniform(0, 0.05))
        kill(pid)
        checkpoint = RunFolder.open(folder.path).latest()
        rounds = [line["round"] for line in folder.metrics()]
        assert rounds == list(range(1, len(rounds) + 1))
        if checkpoint is not None:
            check_state(checkpoint)
            assert checkpoint.note is None
            assert reached <= checkpoint.round <= len(rounds) <= checkpoint.round + 1
            reached = checkpoint.round
    assert reached > 10
    with folder.lock():
        assert strays(folder.path) == []
        folder.checkpoint(reached + 1, state(reached + 1), {"round": reached + 1})
    assert len(os.listdir(folder.path / "checkpoints")) == 2


def test_the_lock_keeps_others_out_and_ends_with_its_process(tmp_path, start):
    folder = new_run(tmp_path / "run")
    pid, child = start("hold", folder.path)
    with pytest.raises(UserError, match="in use by another process") as error, folder.lock():
        raise AssertionError("two processes hold the lock")
    assert str(folder.path) in one_sentence(error)
    with pytest.raises(UserError):
        new_run(folder.path)
    kill(pid)
    try:
        assert alive(child)
        with folder.lock():  # although a forked child lives on
            assert folder.metrics() == []
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_lock_keeps_its_own_process_out_and_is_released(tmp_path):
    folder = new_run(tmp_path)
    for _ in range(2):
        with folder.lock(), pytest.raises(UserError, match="in use"), RunFolder.open(tmp_path).lock():
            raise AssertionError("held twice")
    with pytest.raises(KeyError), folder.lock():
        raise KeyError
    with folder.lock():
        assert folder.config == CONFIG


def test_the_lock_by_a_file_for_systems_without_record_locks(tmp_path):
    path = tmp_path / "lock"
    for _ in range(2):
        with (
            _exclusive_file(path, "the run"),
            pytest.raises(UserError, match="in use"),
            _exclusive_file(path, "the run"),
        ):
            raise AssertionError("held twice")
    assert not path.exists()
    with pytest.raises(UserError, match="cannot write in"), _exclusive_file(tmp_path / "no" / "lock", "the run"):
        raise AssertionError("no folder")


def test_strays_go_when_the_run_is_locked_and_other_files_stay(tmp_path):
    folder = new_run(tmp_path)
    folder.checkpoint(1, state(1), {"round": 1})
    folder.keep(1, state(1), {})
    places = [tmp_path, tmp_path / "checkpoints", tmp_path / "kept"]
    for place in places:
        (place / ".isofed-0123.tmp").write_bytes(b"half")
        (place / "mine.tmp").write_bytes(b"mine")
    check_state(folder.latest())
    with folder.lock():
        assert strays(tmp_path) == ["mine.tmp"] * 3


def test_a_write_that_fails_halfway_loses_nothing(tmp_path, start):
    folder = new_run(tmp_path / "run")
    for round in (1, 2):
        folder.append({"round": round})
        folder.checkpoint(round, state(round), {"round": round})
    _, (checkpoint, line, size) = start("limited", folder.path)
    for message in (checkpoint, line):
        assert "larger than the file system or a limit" in message
        assert "nothing already written is lost" in message
    assert strays(folder.path) == []
    latest = folder.latest()
    check_state(latest)
    assert latest is not None
    assert (latest.round, latest.note) == (2, None)
    assert [line["round"] for line in folder.metrics()] == [1, 2, 3, 3]
    metrics = folder.path / "metrics.jsonl"
    assert metrics.stat().st_size == size
    assert metrics.read_bytes().endswith(b"\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission(tmp_path):
    folder = new_run(tmp_path / "run")
    folder.checkpoint(1, state(1), {"round": 1})
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        path.chmod(0o555)
    try:
        with pytest.raises(RunError, match="not writable") as error:
            folder.checkpoint(2, state(2), {"round": 2})
        one_sentence(error)
        with pytest.raises(UserError, match="Permission denied"):
            RunFolder.create(tmp_path / "run" / "other", CONFIG, {})
        check_state(folder.latest())
    finally:
        for path in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
            path.chmod(0o755)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare here")
def test_a_full_disk_and_a_read_only_one(tmp_path):
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" || exit 77; exec "$2" "$3" full_disk "$1"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        env=child_environment(hash_seed=0),
    )
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip("no file system can be mounted here")
    assert done.returncode == 0, done.stderr
    _, said = json.loads(done.stdout)
    full, line, read_only, create, lock = said["messages"]
    for message in (full, line):
        assert message.endswith("the disk or the quota is full; nothing already written is lost")
    assert read_only.endswith("its folder is not writable; nothing already written is lost")
    assert "Read-only file system" in create
    assert "Read-only file system" in lock
    assert said["lines"] > 10
    assert said["strays"] == []
