"""Files that are whole or absent: atomic writes, checked tensor files, and a lock between processes.

Nothing here is ever unpickled, so a file from somebody else can be read without running its code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from isofed.errors import RunError, UserError

if sys.platform != "win32":
    import fcntl

Tensors = dict[str, torch.Tensor]

# Safetensors keeps metadata in a hash map, so a second key would make the order of the bytes random.
_KEY = "isofed"
_PREFIX, _SUFFIX = ".isofed-", ".tmp"


class DamagedFile(RunError):
    """A file is there but does not hold what was written into it."""


def write_error(path: Path, error: OSError) -> RunError:
    """The sentence for a write that the operating system refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        why = "the disk or the quota is full"
    elif error.errno == errno.EFBIG:
        why = "the file would be larger than the file system or a limit on this process allows"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        why = "its folder is not writable"
    else:
        why = error.strerror or str(error)
    return RunError(f"cannot write {path}: {why}; nothing already written is lost")


def write_atomic(path: Path | str, data: bytes) -> None:
    """Write ``data`` to ``path`` so that a reader, a kill or a power cut sees the old file or the new one, whole."""
    path = Path(path)
    temporary = path.with_name(f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")
    try:
        try:
            # "x" and not tempfile: that would hide the file from the user's group, whatever the umask says.
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)
    except OSError as error:
        raise write_error(path, error) from error


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system can do that."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders, and a folder may be writable without being readable
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def remove_strays(folder: Path) -> None:
    """Remove the temporary files that a killed writer left in a folder."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):
            path.unlink()


def plain(value: Any, nan: bool = False) -> Any:
    """The same value in JSON's own types; a NaN or an infinity becomes None unless ``nan`` is true."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return plain(value.tolist(), nan)
    if isinstance(value, dict):
        return {str(key): plain(item, nan) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, nan) for item in value]
    if isinstance(value, float) and not nan and not math.isfinite(value):
        return None
    return value


def save_tensors(path: Path | str, tensors: Tensors, info: dict[str, Any]) -> None:
    """Write tensors and ``info`` (JSON values) as one safetensors file with a checksum, atomically.

    The bytes depend on the content alone: not on the order of the names, the memory format or the device.
    """
    ready: Tensors = {}
    storages: set[int] = set()
    for name in sorted(tensors):
        tensor = tensors[name].detach().resolve_conj().resolve_neg().cpu().contiguous()
        # Safetensors refuses tensors that overlap in memory, such as tied weights: each gets its own copy.
        if tensor.untyped_storage().data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        ready[name] = tensor
    text = json.dumps(plain(info, nan=True), sort_keys=True)
    content = {"checksum": _checksum(ready, text), "info": json.loads(text)}
    write_atomic(path, safetensors.torch.save(ready, {_KEY: json.dumps(content, sort_keys=True)}))


def load_tensors(path: Path | str) -> tuple[Tensors, dict[str, Any]]:
    """Read what :func:`save_tensors` wrote: tensors on the CPU in the order of their names, and ``info``.

    Raises :class:`DamagedFile` if anything in the file is not as it was written.
    """
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            content = json.loads((file.metadata() or {})[_KEY])
            views = {name: file.get_tensor(name) for name in sorted(file.keys())}
        checksum, info = content["checksum"], content["info"]
        sound = isinstance(info, dict) and checksum == _checksum(views, json.dumps(info, sort_keys=True))
    except FileNotFoundError as error:
        raise RunError(f"there is no file {path}") from error
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedFile(f"{path} is damaged, or is not a tensor file that isofed wrote") from error
    if not sound:
        raise DamagedFile(f"{path} is damaged: its checksum does not fit its content")
    # The views lie in the mapped file, at any address: a copy is aligned and outlives a change of the file.
    return {name: view.clone() for name, view in views.items()}, info


def raw(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in order; no copy, if it lies like that in the host's memory."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if flat.stride() != (1,):  # where there is one number, or none, any stride counts as contiguous
        flat = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
    return flat.view(torch.uint8).numpy().data


def _checksum(tensors: Tensors, text: str) -> str:
    """SHA-256 over the info's text and over names, dtypes, shapes and raw bytes in the order of the names."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(raw(tensor))
    return digest.hexdigest()


_held: set[tuple[int, str]] = set()
_guard = threading.Lock()


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file ``path``, or raise a UserError saying that ``what`` is in use.

    This is a POSIX record lock and not ``flock``: forked workers inherit the latter and would keep it after
    their parent was killed. A record lock does not keep out its own process, hence the list of those held.
    """
    key = (os.getpid(), os.path.realpath(path))
    with _guard:
        if key in _held:
            raise UserError(f"{what} is in use by this process already")
        _held.add(key)
    try:
        with _record_lock(path, what) if sys.platform != "win32" else _exclusive_file(path, what):
            yield
    finally:
        with _guard:
            _held.discard(key)


if sys.platform != "win32":

    @contextmanager
    def _record_lock(path: Path, what: str) -> Iterator[None]:
        """A lock that the kernel drops when the process ends, however it ends."""
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(f"cannot write in {path.parent}: {error.strerror}") from error
        try:
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    raise UserError(f"{what} is in use by another process") from error
                # Some network file systems have no locks.
                with _exclusive_file(path.with_name(f"{path.name}-held"), what):
                    yield
            else:
                yield
        finally:
            os.close(handle)  # which releases the lock


@contextmanager
def _exclusive_file(path: Path, what: str) -> Iterator[None]:
    """A lock by a file that only one process can create, for systems without record locks.

    Windows removes the file when its process ends; elsewhere a killed process leaves it behind.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_TEMPORARY", 0), 0o666)
    except FileExistsError as error:
        raise UserError(f"{what} is in use by another process (if there is none, delete {path})") from error
    except OSError as error:
        raise UserError(f"cannot write in {path.parent}: {error.strerror}") from error
    try:
        yield
    finally:
        os.close(handle)
        with suppress(OSError):
            path.unlink()
