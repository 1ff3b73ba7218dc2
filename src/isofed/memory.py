"""The most memory that a run took, and what to say when there is none left."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import torch

_PROC = Path("/proc")
_measured: set[int] = set()  # processes of which a run has been measured before


class PeakMemory:
    """From its making on: what PyTorch held of a GPU, or what this process and its workers held of the main memory.

    Pages that processes share are counted in each of them. Of the first run in a process, reading the data counts too.
    Ray's actors are not counted, and where the system does not tell, nothing is known.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        elif os.getpid() in _measured:
            for process in _processes():
                with suppress(OSError):
                    (_PROC / str(process) / "clear_refs").write_text("5")  # sets the peak to what is held now
        _measured.add(os.getpid())

    def bytes(self) -> int | None:
        """The peak so far."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_reserved(self._device))
        found = [_peak(process) for process in _processes()]
        return sum(found) or None


def shortage(error: BaseException) -> str | None:
    """What to tell of an error that means that memory is used up; of any other, nothing.

    >>> shortage(MemoryError("Unable to allocate 7.28 TiB for an array"))[:44]
    'there is not enough memory (Unable to alloca'
    >>> shortage(ValueError("out of memory")) is None
    True
    """
    from isofed.engine.lane import starved

    said = str(error).strip().split("\n")[0].rstrip(".")
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in said):
        return (
            f"there is not enough memory ({said or 'none is left'}): fewer workers, a smaller batch_size, network or "
            "data set takes less. A run that had begun is kept as far as it came, and goes on with isofed run --resume"
        )
    if starved(error):
        return (
            f"the GPU has no memory left ({said}): nvidia-smi shows what else uses it; fewer slots, a smaller "
            "batch_size or network takes less, and device=cpu none. A run that had begun is kept as far as it came, "
            "and goes on with isofed run --resume"
        )
    return None


def _processes() -> list[int]:
    """This process and those that it has started."""
    children: list[int] = []
    for thread in (_PROC / "self" / "task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            children += map(int, thread.read_text().split())
    return [os.getpid(), *children]


def _peak(process: int) -> int:
    """The largest resident size of a process, in bytes; 0 where it is not known."""
    with suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB", (_PROC / str(process) / "status").read_text(), re.MULTILINE)
        return 1024 * int(found[1]) if found else 0
    return 0
