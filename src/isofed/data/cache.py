"""Decoded data kept on disk, so that only the first start decodes: whole entries or none, mapped into memory.

An entry is a folder with one ``.npy`` file for each array and ``entry.json``, which says what the arrays are of. It is
made under another name and renamed when it is whole, so a process that is killed leaves nothing that counts. Processes
that open the same entry share its memory: the pages of a file exist once. The folder is ``$ISOFED_CACHE``
(``off`` for none) or ``~/.cache/isofed/data``; where it cannot be written, arrays are made in memory instead.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

if sys.platform != "win32":
    import fcntl

Array = npt.NDArray[Any]
Shapes = Mapping[str, tuple[tuple[int, ...], str]]

FORMAT = 1  # part of every key: a change of how entries are written makes all older ones unknown
UNUSED_DAYS = 90  # an entry that nothing has opened for so long is removed when the next one is made
CHEAP = 16 << 20  # up to so many bytes, every byte is checked when an entry is opened
RESERVE = 256 << 20  # bytes that stay free on the disk
_BLOCK, _BLOCKS = 4096, 64  # the sample of a larger file that is checked each time
_ABOUT = "entry.json"
# What makes an entry older than another, rather than one of something else.
_VERSION = ("files", "version")

_log = logging.getLogger(__name__)
_guard = threading.RLock()  # record locks keep out other processes, not other threads
_busy: set[Path] = set()


def fingerprint(files: Iterable[Path]) -> list[Any]:
    """What changes when one of these files does: their folder, then name, size and time of change of each, in order.

    Give it as ``files`` in the ``about`` of :func:`cached`.
    """
    paths = [os.path.abspath(file) for file in files]
    if not paths:
        return [""]
    folder = os.path.commonpath({os.path.dirname(path) for path in paths})
    cut = len(os.path.join(folder, ""))  # every path begins with it
    found = ((path, os.stat(path)) for path in paths)
    return [folder, *([path[cut:], s.st_size, s.st_mtime_ns] for path, s in found)]


def cached(
    kind: str,
    about: Mapping[str, Any],
    shapes: Shapes,
    fill: Callable[[dict[str, Array]], None],
) -> dict[str, Array]:
    """The arrays that ``fill`` writes into arrays of these ``shapes`` (name: shape and dtype), from disk if known.

    ``about`` (JSON values) holds everything the content depends on: paths, options, and under ``files`` the
    :func:`fingerprint` of what is read. An entry that differs only in ``files`` (of the same folder) or ``version``
    is an older one and is removed. The arrays may be written to: changes stay in this process.
    """
    if not re.fullmatch(r"[\w.-]+", kind) or not all(re.fullmatch(r"\w+", name) for name in shapes):
        raise ValueError(f"kind and names must be plain words, not {kind!r} and {list(shapes)}")
    dtypes = {name: (tuple(map(int, shape)), np.dtype(dtype)) for name, (shape, dtype) in shapes.items()}
    if any(dtype.hasobject for _, dtype in dtypes.values()):
        raise ValueError("Python objects cannot be kept")
    plain = [(name, list(shape), dtype.str) for name, (shape, dtype) in sorted(dtypes.items())]
    text = json.dumps([FORMAT, kind, about, plain], sort_keys=True)
    entry = f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"

    folder = _folder()
    if folder is not None:
        found = _open(folder / entry, dtypes)
        if found is not None:
            return found
        made = _make(folder, entry, kind, about, dtypes, fill)
        if made is not None:
            return made
    arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in dtypes.items()}
    fill(arrays)
    return arrays


def _folder() -> Path | None:
    given = os.environ.get("ISOFED_CACHE") or "~/.cache/isofed/data"
    if given == "off":
        return None
    try:
        folder = Path(given).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        _note(f"decoded data are not kept, because the folder {given} cannot be made ({error})")
        return None
    return folder


def _note(text: str) -> None:
    _log.info(text)  # not a warning: nothing is wrong with the data, only the next start is slower


Dtypes = dict[str, tuple[tuple[int, ...], "np.dtype[Any]"]]


def _make(
    folder: Path,
    entry: str,
    kind: str,
    about: Mapping[str, Any],
    dtypes: Dtypes,
    fill: Callable[[dict[str, Array]], None],
) -> dict[str, Array] | None:
    """Make an entry, or wait for whoever does; None where the disk does not let us."""
    with _guard, _lock(folder / f".{entry}.lock") as locked:
        if not locked:
            return None
        place = folder / entry
        found = _open(place, dtypes)  # another process may have made it while we waited
        if found is not None:
            return found
        _tidy(folder, entry, kind, about)
        temporary = folder / f".{entry}.{secrets.token_hex(4)}.tmp"
        try:
            try:
                arrays = _allocate(temporary, dtypes)
            except OSError as error:
                _note(f"decoded data are not kept in {folder}: {error.strerror or error}")
                return None
            fill(arrays)
            try:
                _finish(temporary, place, kind, about, arrays)
            except OSError as error:
                _note(f"decoded data are not kept in {folder}: {error.strerror or error}")
                return {name: np.array(array) for name, array in arrays.items()}
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return _open(place, dtypes) or {name: np.array(array) for name, array in arrays.items()}


def _allocate(temporary: Path, dtypes: Dtypes) -> dict[str, Array]:
    """Arrays in files whose room on the disk is taken, because a write into a mapped file cannot fail: it kills."""
    need = sum(_bytes(shape, dtype) for shape, dtype in dtypes.values())
    if shutil.disk_usage(temporary.parent).free < need + RESERVE:
        raise OSError(f"it has no room for {need / 1e6:,.0f} MB more")
    temporary.mkdir()
    arrays: dict[str, Array] = {}
    for name, (shape, dtype) in dtypes.items():
        with (temporary / f"{name}.npy").open("xb") as file:
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.flush()
            start, size = file.tell(), _bytes(shape, dtype)
            _reserve(file.fileno(), start, size)
        if size:
            mapped = np.memmap(temporary / f"{name}.npy", dtype, "r+", start, shape)
            arrays[name] = np.asarray(mapped)
        else:
            arrays[name] = np.zeros(shape, dtype)
    return arrays


def _bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize


def _reserve(handle: int, start: int, size: int) -> None:
    if not size:
        return
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, start, size)
        return
    for at in range(start, start + size, 1 << 20):
        os.pwrite(handle, bytes(min(1 << 20, start + size - at)), at)


def _finish(temporary: Path, place: Path, kind: str, about: Mapping[str, Any], arrays: dict[str, Array]) -> None:
    """Write the description, put everything on the disk, and give the entry its name."""
    files = {}
    for name, array in arrays.items():
        if isinstance(array.base, np.memmap):
            array.base.flush()
        with (temporary / f"{name}.npy").open("rb+") as file:
            os.fsync(file.fileno())
        files[name] = _describe(temporary / f"{name}.npy", whole=True)
    # The list of a million files would be slow to read back; its hash says as much.
    text = json.dumps({"kind": kind, "about": _brief(about), "files": files}, indent=1)
    with (temporary / _ABOUT).open("x") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    if place.exists():  # damaged, or we would not be here
        _remove(place)
    os.rename(temporary, place)


def _describe(path: Path, whole: bool) -> dict[str, Any]:
    """Size and checksums of a file: of blocks spread over it, and of every byte where that is asked for."""
    size = path.stat().st_size
    step = max(_BLOCK, size // _BLOCKS)
    sample = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for start in (*range(0, size, step), max(0, size - _BLOCK)):
            file.seek(start)
            sample.update(file.read(_BLOCK))
        found: dict[str, Any] = {"bytes": size, "sample": sample.hexdigest()}
        if whole:
            file.seek(0)
            found["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _open(place: Path, dtypes: Dtypes) -> dict[str, Array] | None:
    """The arrays of an entry that is there and sound."""
    thorough = os.environ.get("ISOFED_CACHE_CHECK") == "1"
    try:
        files = json.loads((place / _ABOUT).read_text())["files"]
        arrays: dict[str, Array] = {}
        for name, (shape, dtype) in dtypes.items():
            path, told = place / f"{name}.npy", files[name]
            found = _describe(path, thorough or _bytes(shape, dtype) <= CHEAP)
            if any(told[key] != value for key, value in found.items()):
                return None
            # Copy on write: torch warns about arrays that cannot be written, and nobody can change the file.
            mapped = np.load(path, mmap_mode="c" if _bytes(shape, dtype) else None, allow_pickle=False)
            array = np.asarray(mapped)
            if array.shape != shape or array.dtype != dtype:
                return None
            arrays[name] = array
        with suppress(OSError):
            os.utime(place / _ABOUT)  # used today
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return arrays


def _brief(about: Mapping[str, Any]) -> dict[str, Any]:
    """``about`` with the list of files shortened to their folder and a hash."""
    brief = dict(about)
    if isinstance(files := brief.get("files"), list):
        digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        brief["files"] = [files[0] if files else "", len(files) - 1, digest]
    result: dict[str, Any] = json.loads(json.dumps(brief))
    return result


def _tidy(folder: Path, entry: str, kind: str, about: Mapping[str, Any]) -> None:
    """Remove what a killed process left, older entries of the same source, and what nobody has used for long."""
    mine = _brief(about)
    for path in folder.glob(".*.tmp"):
        owner = path.name[1:].rsplit(".", 2)[0]
        if owner == entry:
            shutil.rmtree(path, ignore_errors=True)
            continue
        with _lock(folder / f".{owner}.lock", wait=False) as free:
            if free:
                shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"*/{_ABOUT}"):
        try:
            told, used = json.loads(path.read_text()), path.stat().st_mtime
            old = told["kind"] == kind and path.parent.name != entry and _older(told["about"], mine)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if old or time.time() - used > UNUSED_DAYS * 86400:
            _remove(path.parent)


def _older(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if "files" not in other:
        return False
    rest = [{k: v for k, v in about.items() if k not in _VERSION} for about in (one, other)]
    return rest[0] == rest[1] and one["files"][0] == other["files"][0]


def _remove(place: Path) -> None:
    """Remove an entry in one step as others see it; who has it open keeps its pages."""
    gone = place.with_name(f".{place.name}.{secrets.token_hex(4)}.tmp")
    with suppress(OSError):
        os.rename(place, gone)
        shutil.rmtree(gone, ignore_errors=True)


@contextmanager
def _lock(path: Path, wait: bool = True) -> Iterator[bool]:
    """Hold a lock between processes; False where it is held by another (without waiting) or cannot be made.

    A record lock, not ``flock``: a forked child would keep the latter after its parent was killed.
    """
    if path in _busy:
        yield False
        return
    handle = _acquire(path, wait)
    if handle is None:
        yield False
        return
    _busy.add(path)
    try:
        yield True
    finally:
        _busy.discard(path)
        with suppress(OSError):
            path.unlink()  # while it is held: whoever waits sees that the name is gone and asks again
        os.close(handle)


def _acquire(path: Path, wait: bool) -> int | None:
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            _note(f"decoded data are not kept in {path.parent}: {error.strerror}")
            return None
        if sys.platform == "win32":
            return handle
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            if wait:  # a file system without locks: two may do the same work, and the first to rename wins
                return handle
            os.close(handle)
            return None
        with suppress(OSError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
        os.close(handle)
