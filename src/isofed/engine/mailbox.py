"""Tensors handed between processes through shared memory, without copying them into a message.

The sender lays tensors into a memory-mapped file and sends only a *letter*: names, types, shapes and offsets, as plain
JSON values. The receiver maps the same file and reads in place. Nothing is pickled. Files live in a folder of the
session; the folder goes when the session closes, when a worker sees that its parent is gone, or at the next start.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isofed.errors import RunError
from isofed.layout import Tensors

AHEAD = 2  # requests that a worker may have: the one it works on, and the next
Letter = dict[str, Any]
_ALIGN = 64


def shared_folder() -> Path:
    """A new folder for mailboxes, in memory where the system offers that, after clearing those of dead processes."""
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    space = process_space()
    for old in base.glob(f"isofed-*-{space}-*"):
        owner = old.name.split("-")[1]
        if owner.isdigit() and not _alive(int(owner)):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"isofed-{os.getpid()}-{space}-", dir=base))


def process_space() -> int:
    """Where the number of a process means something: containers may share this memory and not know each other's."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # only Linux has them
        return 0


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


class Outbox:
    """The sending side: files that take turns, each written again for a later letter and replaced when too small.

    With two ``turns`` a letter stays as it is while the next one is written.
    """

    def __init__(self, folder: Path, name: str, turns: int = 1) -> None:
        self._boxes = [_Box(folder, f"{name}.{turn}") for turn in range(turns)]
        self._posted = 0

    def post(self, tensors: Tensors) -> Letter:
        """Lay tensors into a file; the receiver must be done with the letter that was there."""
        items, offset = [], 0
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            items.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
            offset += -(-size // _ALIGN) * _ALIGN
        box = self._boxes[self._posted % len(self._boxes)]
        self._posted += 1
        memory = box.room(max(offset, 1))
        for tensor, item in zip(tensors.values(), items, strict=True):
            if tensor.numel():
                _view(memory, item).copy_(tensor)
        return {"box": box.name, "file": str(box.path), "items": items}


class _Box:
    """One file of an outbox."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.path = name, Path()
        self._folder, self._version = folder, 0
        self._memory: mmap.mmap | None = None

    def room(self, size: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < size:
            if self._memory is not None:
                self.path.unlink(missing_ok=True)  # whoever still maps the old file keeps it
            self._version += 1
            self.path = self._folder / f"{self.name}-{self._version}"
            self._memory = _create(self.path, size)
        return self._memory


class Inbox:
    """The receiving side: keeps the sender's files mapped."""

    def __init__(self) -> None:
        self._mapped: dict[str, tuple[str, mmap.mmap]] = {}  # by box: its present file

    def read(self, letter: Letter) -> Tensors:
        """The tensors of a letter, as views of the sender's memory: copy what must outlive its turn."""
        file, memory = self._mapped.get(letter["box"], ("", None))
        if memory is None or letter["file"] != file:
            with open(letter["file"], "r+b") as opened:
                memory = mmap.mmap(opened.fileno(), 0)
            self._mapped[letter["box"]] = letter["file"], memory
        return {item[0]: _view(memory, item) for item in letter["items"]}


def _create(path: Path, size: int) -> mmap.mmap:
    try:
        with open(path, "x+b") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)  # or a full disk would kill the process at first touch
            else:
                file.truncate(size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise RunError(
            f"no room for {size / 1e6:.0f} MB of shared memory in {path.parent.parent} ({error.strerror}); "
            "use fewer workers or executor=serial"
        ) from None


def _view(memory: mmap.mmap, item: list[Any]) -> Tensor:
    _, kind, shape, offset = item
    dtype = getattr(torch, kind)
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
