"""The other processes of the tests of run folders: they train, write, hold a lock or fill a disk until they are killed.

Run as a script, this file is such a process. Each function runs in one of its own, and prints one line of JSON when it
is ready.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import isofed
from isofed.errors import RunError, UserError
from isofed.records import RunFolder, save_tensors, write_atomic
from tests.records.tools import check_state, new_run, one_sentence, state, strays

SCRIPT = __file__
ROOT = str(Path(__file__).resolve().parents[2])


def say(value: Any) -> None:
    print(json.dumps([os.getpid(), value]), flush=True)


def train(path: str) -> None:
    """Go on with the run for ever, as a training process would."""
    folder = RunFolder.open(path)
    with folder.lock():
        checkpoint = folder.latest()
        round = checkpoint.round if checkpoint else 0
        folder.rewind(round)
        say(strays(folder.path))
        while True:
            round += 1
            folder.append({"round": round, "padding": "x" * 3000})
            folder.checkpoint(round, state(round, size=200_000), {"round": round})


def rewrite(path: str) -> None:
    """Replace one large file for ever: here most of the time goes into writing, where a kill hurts."""
    contents = [bytes([number]) * 4_000_000 for number in range(4)]
    write_atomic(path, contents[0])
    say(None)
    while True:
        for content in contents:
            write_atomic(path, content)


def hold(path: str) -> None:
    """Hold the lock, with a forked child that outlives this process."""
    with RunFolder.open(path).lock():
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        say(child)
        time.sleep(60)


def limited(path: str) -> None:
    """Write under a limit on the size of files, which makes writes fail halfway."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    folder = RunFolder.open(path)
    say([*failures(folder, 3, 70_000), os.path.getsize(folder.path / "metrics.jsonl")])


def failures(folder: RunFolder, round: int, line: int) -> list[str]:
    """The messages of a checkpoint and of a line, repeated until it fails."""
    messages = []
    with pytest.raises(RunError) as error:
        folder.checkpoint(round, state(round, size=400_000), {"round": round})
    messages.append(one_sentence(error))

    def append() -> None:
        for _ in range(1000):
            folder.append({"round": round, "padding": "x" * line})

    with pytest.raises(RunError) as error:
        append()
    messages.append(one_sentence(error))
    return messages


def full_disk(path: str) -> None:
    """Fill the small file system mounted at this path, then make it read-only."""
    folder = new_run(Path(path) / "run")
    folder.append({"round": 1})
    folder.checkpoint(1, state(1), {"round": 1})
    messages = failures(folder, 2, 10_000)
    lines = len(folder.metrics())
    check_state(folder.latest())
    left = strays(folder.path)
    subprocess.run(["mount", "-o", "remount,ro", path], check=True)
    with pytest.raises(RunError) as error:
        folder.checkpoint(2, state(2), {"round": 2})
    messages.append(one_sentence(error))
    for use in (lambda: new_run(Path(path) / "other"), lambda: folder.lock().__enter__()):
        with pytest.raises(UserError) as refused:
            use()
        messages.append(one_sentence(refused))
    check_state(folder.latest())
    say({"messages": messages, "lines": lines, "strays": left})


def save(path: str) -> None:
    """Write tensors in an order that depends on this process's hash seed."""
    names = list({f"tensor-{number}" for number in range(50)})
    save_tensors(path, {name: torch.full((3,), float(len(name))) for name in names}, dict.fromkeys(names, 1))
    say(names)


def nursery() -> None:
    """Fork a process for each line read: importing torch once makes many of them cheap."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel clears away the dead
    for line in sys.stdin:
        name, path = line.rstrip("\n").split(" ", 1)
        if os.fork() == 0:
            globals()[name](path)
            os._exit(0)


def child_environment(hash_seed: int) -> dict[str, str]:
    package = str(Path(isofed.__file__).parents[1])
    path = os.pathsep.join([package, ROOT, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(hash_seed)}


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
