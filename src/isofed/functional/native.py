"""Functions in C for a processor, compiled by its own C compiler where they are first needed.

What is compiled is kept in ``~/.cache/isofed/native`` (or ``native`` in ``$ISOFED_CACHE``; ``off`` keeps none), by the
text of the file, the compiler's own file and the processor: so nothing is out of date, and different machines may share
a home. Without a compiler there are no such functions, and whoever has them does without.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
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
FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC"),
    # These undo what ``$CC`` may ask for: arithmetic that would change that of the whole process, functions that cannot
    # be found, and C++.
    *("-fno-fast-math", "-fno-unsafe-math-optimizations", "-fvisibility=default", "-xc"),
)
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
        return _made(source, flags)
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("%s is not compiled, and PyTorch's own functions are used: %s", source.name, error)
        return None


def _made(source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    words = [*FLAGS, *flags, f"-I{HEADER.parent}", str(source)]
    if (folder := _folder()) is not None:
        about = f"{source.read_text()}{HEADER.read_text()}{FLAGS}{flags}{_identity()}{_version()}{_processor()}"
        kept = _kept(folder, f"{source.stem}-{_digest(about.encode())}", words)
        with suppress(OSError):  # from some folders nothing may be run
            return _loaded(kept, source)
    with tempfile.TemporaryDirectory() as own:
        return _loaded(_compiled(words, Path(own)), source)  # it stays in memory


def _loaded(made: Path, source: Path) -> ctypes.CDLL:
    """What was made of a C file, if all of its functions can be found there."""
    library = ctypes.CDLL(str(made))
    for name in re.findall(r"^\w+ (isofed_\w+)\(", source.read_text(), re.MULTILINE):
        if not hasattr(library, name):
            raise OSError(f"what was compiled has no {name}")
    return library


def _kept(folder: Path, name: str, words: Sequence[str]) -> Path:
    """What is compiled, in this folder: what is there already, or made now."""
    for kept in folder.glob(f"{name}-*.so"):
        # What others have put there or may change is not loaded, and what is damaged, which could end the process, is
        # made again.
        with suppress(OSError):
            if is_private(kept) and kept.stem == f"{name}-{_digest(kept.read_bytes())}":
                return kept
    with tempfile.TemporaryDirectory(dir=folder) as own:
        made = _compiled(words, Path(own))
        made.chmod(0o700)
        kept = folder / f"{name}-{_digest(made.read_bytes())}.so"
        os.replace(made, kept)  # whole, also where several make it at once
    return kept


def is_private(path: Path) -> bool:
    """Whether nobody but this user can change a file or folder."""
    about = path.stat()
    return about.st_uid == os.getuid() and not about.st_mode & 0o022


def compiler() -> list[str] | None:
    """The command of this machine's C compiler: ``$CC``, which may have words behind it, or one of the usual names."""
    given = os.environ.get("CC", "")
    try:
        commands = [[given], shlex.split(given)]
    except ValueError:  # an open quotation mark
        commands = [[given]]
    commands += [["cc"], ["gcc"], ["clang"]]
    for first, *rest in filter(None, commands):
        if found := shutil.which(first):
            return [found, *rest]
    return None


def compiled_by() -> str:
    """The name of the compiler's file, which mostly has its version in it; ``none`` where nothing can be compiled."""
    first, *rest = _identity() or ["none"]
    return " ".join([Path(first).name, *rest]) if library(HEADER) else "none"


def _identity() -> list[str] | None:
    """To tell compilers apart. To call one it is no good: some programs are many, by the name they are called by."""
    found = compiler()
    return found and [os.path.realpath(found[0]), *found[1:]]


def _version() -> str:
    """To tell a compiler from one that takes its place."""
    found = _identity()
    about = os.stat(found[0]) if found else None
    return f"{about.st_size} {about.st_mtime_ns}" if about else ""


_hanging: set[str] = set()  # compilers that did not come back: one wait is enough


def _compiled(words: Sequence[str], folder: Path) -> Path:
    program, made = compiler(), folder / "made.so"
    if program is None:
        raise FileNotFoundError("there is no C compiler")
    name = shlex.join(program)
    if name in _hanging:
        raise subprocess.SubprocessError(f"{name} did not come back in {_PATIENCE} s")
    try:
        asked = [*program, *words, "-o", str(made)]
        done = subprocess.run(asked, capture_output=True, text=True, errors="replace", timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        _hanging.add(name)
        raise
    if done.returncode:
        raise subprocess.SubprocessError(f"{name}: {done.stderr.strip()[:300]}")
    return made


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def _folder() -> Path | None:
    given = os.environ.get("ISOFED_CACHE")
    if given == "off":
        return None
    try:
        folder = Path(given or "~/.cache/isofed").expanduser() / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(folder):
            return None
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
    return not seen and is_plain(x) and has_numbers(x)


def has_numbers(x: Tensor) -> bool:
    """Whether a tensor's memory holds its numbers: none that are negated when read, that are many at once, or zeros."""
    return not (x.is_neg() or x._is_zerotensor() or torch._C._functorch.is_legacy_batchedtensor(x))
