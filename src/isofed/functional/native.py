"""Functions in C for a processor, compiled by its own C compiler where they are first needed.

What is compiled is kept in ``~/.cache/isofed/native`` (or ``native`` in ``$ISOFED_CACHE``; ``off`` keeps none), by the
text of the file and the processor: nothing is out of date, and a home folder may be shared by different machines.
Without a compiler there are no such functions, and whoever has them does without.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")
_PATIENCE = 60  # seconds for a file of a few hundred lines

_log = logging.getLogger(__name__)


def allowed() -> bool:
    """``ISOFED_FUSED=0`` leaves everything to PyTorch."""
    return os.environ.get("ISOFED_FUSED", "1") != "0"


@cache
def wide() -> bool:
    """Whether the processor, and PyTorch on it, have registers of sixteen numbers, for which some of it is written."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


@cache
def library(source: Path) -> ctypes.CDLL | None:
    """The functions of a C file, or nothing where they cannot be compiled."""
    try:
        name = (
            f"{source.stem}-{hashlib.sha256(f'{source.read_text()}{FLAGS}{_processor()}'.encode()).hexdigest()[:24]}.so"
        )
        folder = _folder()
        if folder is not None:
            kept = folder / name
            # What somebody else has put there is not loaded.
            if not (kept.is_file() and kept.stat().st_uid == os.getuid()):
                with tempfile.TemporaryDirectory(dir=folder) as own:
                    os.replace(_compiled(source, Path(own)), kept)  # whole, also where several make it at once
            return ctypes.CDLL(str(kept))
        with tempfile.TemporaryDirectory() as own:
            return ctypes.CDLL(str(_compiled(source, Path(own))))  # it stays in memory
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("%s is not compiled, and PyTorch's own functions are used: %s", source.name, error)
        return None


def _compiled(source: Path, folder: Path) -> Path:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        raise FileNotFoundError("there is no C compiler")
    made = folder / "made.so"
    done = subprocess.run(
        [compiler, *FLAGS, str(source), "-o", str(made)], capture_output=True, text=True, timeout=_PATIENCE
    )
    if done.returncode:
        raise subprocess.SubprocessError(f"{compiler}: {done.stderr.strip()[:300]}")
    return made


def _folder() -> Path | None:
    given = os.environ.get("ISOFED_CACHE")
    if given == "off":
        return None
    try:
        folder = Path(given or "~/.cache/isofed").expanduser() / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # it cannot be written, or this user has no home
        return None


def _processor() -> str:
    """What a compiler may make of ``native``."""
    try:
        found = re.findall(r"^(?:model name|flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = []
    return "\n".join(sorted(set(found))) or f"{platform.machine()} {platform.processor()}"
