"""Functions in C for a processor, compiled by its own C compiler where they are first needed.

What is compiled is kept in ``~/.cache/isofed/native`` (or ``native`` in ``$ISOFED_CACHE``; ``off`` keeps none), by the
text of the file, the compiler and the processor: nothing is out of date, and different machines may share a home.
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
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

HEADER = Path(__file__).with_suffix(".h")
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
def library(source: Path, *flags: str) -> ctypes.CDLL | None:
    """The functions of a C file, or nothing where they cannot be compiled."""
    try:
        words = [*FLAGS, *flags, f"-I{HEADER.parent}", str(source)]
        about = f"{source.read_text()}{HEADER.read_text()}{FLAGS}{flags}{_file_of_compiler()}{_processor()}"
        folder = _folder()
        if folder is None:
            with tempfile.TemporaryDirectory() as own:
                return ctypes.CDLL(str(_compiled(words, Path(own))))  # it stays in memory
        kept = folder / f"{source.stem}-{hashlib.sha256(about.encode()).hexdigest()[:24]}.so"
        # What somebody else has put there is not loaded, and what is damaged is made again.
        if kept.is_file() and kept.stat().st_uid == os.getuid():
            with suppress(OSError):
                return ctypes.CDLL(str(kept))
        with tempfile.TemporaryDirectory(dir=folder) as own:
            os.replace(_compiled(words, Path(own)), kept)  # whole, also where several make it at once
        return ctypes.CDLL(str(kept))
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("%s is not compiled, and PyTorch's own functions are used: %s", source.name, error)
        return None


def compiler() -> str | None:
    """The C compiler of this machine: ``$CC``, or one of the usual names."""
    names = (os.environ.get("CC") or "cc", "gcc", "clang")
    return next((found for name in names if (found := shutil.which(name))), None)


def compiled_by() -> str:
    """The name of the compiler's file, which mostly has its version in it; ``none`` where there is no compiler."""
    return Path(_file_of_compiler() or "none").name


def _file_of_compiler() -> str | None:
    """To tell compilers apart. To call one it is no good: some programs are many, by the name they are called by."""
    found = compiler()
    return found and os.path.realpath(found)


def _compiled(words: Sequence[str], folder: Path) -> Path:
    program, made = compiler(), folder / "made.so"
    if program is None:
        raise FileNotFoundError("there is no C compiler")
    asked = [program, *words, "-o", str(made)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=_PATIENCE)
    if done.returncode:
        raise subprocess.SubprocessError(f"{program}: {done.stderr.strip()[:300]}")
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


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is one of a processor and nothing has to be done with a call that only PyTorch's own can do."""
    if type(x) not in (Tensor, nn.Parameter) or x.device.type != "cpu" or x.dtype != torch.float32:
        return False
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    forward = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return not (traced or forward or torch.is_autocast_enabled("cpu")) and x.layout == torch.strided


def reads(x: Tensor) -> bool:
    """Whether C can read a tensor, and nobody wants to see or change what PyTorch does with it."""
    seen = torch._C._len_torch_function_stack() > 0 or torch._C._len_torch_dispatch_stack() > 0
    return not seen and is_plain(x) and not x.is_neg()
