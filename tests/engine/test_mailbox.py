"""Tensors between processes: letters arrive as they were sent, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from isofed.engine.mailbox import Inbox, Outbox, process_space, shared_folder
from isofed.engine.workers import Pool


def test_letters_arrive_as_they_were_sent(tmp_path: Path) -> None:
    outbox, inbox = Outbox(tmp_path, "box"), Inbox()
    sent = {
        "floats": torch.randn(3, 5),
        "doubles": torch.randn(7, dtype=torch.float64),
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 4),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
        "numbers": torch.tensor([2**62, -1]),
        "turned": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    read = inbox.read(outbox.post(sent))
    assert list(read) == list(sent)
    for name, value in sent.items():
        assert read[name].shape == value.shape and read[name].dtype == value.dtype
        assert read[name].contiguous().numpy().tobytes() == value.contiguous().numpy().tobytes(), name
        assert not value.numel() or read[name].data_ptr() % 64 == 0


def test_a_box_grows_and_is_used_again(tmp_path: Path) -> None:
    outbox, inbox = Outbox(tmp_path, "box"), Inbox()
    for size in (1, 100_000, 10, 200_000, 3):
        value = torch.randn(size)
        assert torch.equal(inbox.read(outbox.post({"x": value}))["x"], value)
        assert len(list(tmp_path.iterdir())) == 1  # the file that was too small is gone


def test_folders_of_the_dead_are_cleared() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    mine = shared_folder()
    dead = mine.parent / f"isofed-{gone.pid}-{process_space()}-test"
    dead.mkdir()
    # Of another container, whose processes cannot be seen from here: it may be at work.
    other = mine.parent / f"isofed-{gone.pid}-{process_space() + 1}-test"
    other.mkdir()
    again = shared_folder()
    assert mine.exists() and again.exists() and mine != again
    assert not dead.exists() and other.exists()
    for folder in (mine, again, other):
        folder.rmdir()


def test_a_closed_pool_leaves_nothing(one_worker: Pool) -> None:
    with Pool(1) as pool:
        folder, process = pool.folder, pool.processes[0].process
        assert folder.exists()
    assert not folder.exists()
    assert process.returncode is not None  # gone, by itself or, while it still starts, by force
    assert one_worker.folder.exists()


SCRIPT = """
import sys, time
from isofed.federation import Federation
from isofed.engine.workers import Pool
pool = Pool(1)
Federation(data="synthetic:samples=50,test=10,classes=3", model="mlp", clients=2, partition="iid", rounds=1,
           executor="workers", pool=pool).fit()
print(pool.folder, pool.processes[0].process.pid, flush=True)
time.sleep(60)
"""


def test_workers_leave_when_their_parent_is_killed() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    with parent.stdout:
        folder, worker = parent.stdout.readline().split()
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    for _ in range(100):
        alive = Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]
        if not alive and not Path(folder).exists():
            return
        time.sleep(0.05)
    pytest.fail("the worker or its folder is still there")
