"""How states lie in a file: a record each, with names, types and shapes before the numbers.

Records are written many at once, by a thread beside the training. After each call that lets go of the interpreter this
thread has to get it back from the training, and then the training waits. So with a C compiler all of it is one call
(``state_file.c``), and what is on a GPU comes to the host together.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from isofed.files import Tensors, raw
from isofed.functional import native

Places = npt.NDArray[np.int64]
OFFSET, ROOM, LENGTH, SUM = range(4)  # the columns of a table of places

CALL = 1 << 20  # bytes that one call to the system writes: Linux can take several times as long over larger ones
_PIECES = 1000  # and pieces: systems take 1024
_NEAR = 1 << 16  # bytes between two records that are written as zeros, to have both in one call
_ALIGN = 64
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


class _Piece(NamedTuple):
    """Bytes and where they go, and of which record's checksum they are a part, or -1."""

    data: Tensor | None  # without any they are zeros
    size: int
    offset: int
    record: int


def size_of(state: Tensors) -> int:
    """Bytes of a state in memory."""
    return sum(value.nbytes for value in state.values())


def length_of(state: Tensors) -> int:
    """Bytes of a state's record."""
    return len(_head_of(state)) + sum(_up(value.nbytes) for value in state.values())


def put(file: int, places: Places, states: Sequence[Tensors], past: Places | None = None) -> list[int]:
    """Write states to their places, rows of a table in its order, and give their checksums.

    The system begins to bring them to the disk, so that a checkpoint need not wait for all of it. Before that it is to
    forget what it has of the ``past`` places, as :func:`forget` does.
    """
    pieces, functions = list(_pieces(places, _on_host(states))), _functions()
    if functions is None:
        if past is not None:
            forget(file, past)
        sums = _put_in_python(file, pieces, len(states))
        forget(file, places)  # there is nothing to forget yet, but Linux begins to write
        return sums
    found = np.zeros(len(states), np.int64)
    given = np.array([(p.data.data_ptr() if p.data is not None else 0, *p[1:]) for p in pieces], np.int64)
    gone = _stretches(places[:0] if past is None else past)
    arguments = given.ctypes.data, len(pieces), CALL, found.ctypes.data, gone.ctypes.data, len(gone)
    if error := functions.isofed_put(file, *arguments):
        raise OSError(error, os.strerror(error))
    return found.tolist()


def forget(file: int, places: Places) -> None:
    """Let the system's memory of the file go where it is on the disk by now, so that it can take what comes next."""
    _advise(file, places, "POSIX_FADV_DONTNEED")


def expect(file: int, places: Places) -> None:
    """Let the system begin to bring from the disk what will be read soon."""
    _advise(file, places, "POSIX_FADV_WILLNEED")


def _advise(file: int, places: Places, advice: str) -> None:
    """Tell the system about places; where it takes no advice, nothing."""
    if not hasattr(os, "posix_fadvise"):
        return
    for start, length in _stretches(places).tolist():
        with suppress(OSError):  # as from a file system that has no memory of its own
            os.posix_fadvise(file, start, length, getattr(os, advice))


def _stretches(places: Places) -> Places:
    """Where places without others between them begin, and their bytes: what lies between may be wanted otherwise."""
    if not len(places):
        return np.zeros((0, 2), np.int64)
    places = places[np.argsort(places[:, OFFSET], kind="stable")]
    starts, ends = places[:, OFFSET], places[:, OFFSET] + places[:, ROOM]
    first = np.concatenate([[True], starts[1:] != ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([starts[first], ends[last] - starts[first]], 1)


def get(file: int, offset: int, length: int, checksum: int) -> Tensors | None:
    """The state of a record; None where there is no record with this checksum."""
    # Nothing is allocated for what the file does not hold.
    held = max(0, min(length, os.fstat(file).st_size - offset))
    record, got = torch.empty(held, dtype=torch.uint8), 0
    data = raw(record)
    while count := os.preadv(file, [data[got:]], offset + got):
        got += count
    if got < length or zlib.crc32(data) != checksum:
        return None
    try:
        return _unpack(record)
    except (LookupError, TypeError, ValueError, RuntimeError):  # whole, and nothing that was ever written
        return None


@functools.cache
def _functions() -> Any:
    """What state_file.c has, or nothing where it cannot be compiled."""
    found = native.library(Path(__file__).with_suffix(".c")) if native.allowed() else None
    if found is not None:
        place, number = ctypes.c_void_p, ctypes.c_int64
        found.isofed_put.argtypes = [ctypes.c_int, place, number, number, place, place, number]
        found.isofed_put.restype = ctypes.c_int
    return found


def _pieces(places: Places, states: Sequence[Tensors]) -> Iterator[_Piece]:
    """All that is to be written; neighbours, with zeros between them, so that they go in one call."""
    end = after = -1
    for number, ((offset, room, _, _), state) in enumerate(zip(places.tolist(), states, strict=True)):
        if offset == after and 0 < offset - end <= _NEAR:
            yield _Piece(None, offset - end, end, -1)
        end, after = offset, offset + room
        for value in (_head_of(state), *state.values()):
            size = value.nbytes
            if size:
                yield _Piece(value, size, end, number)
            if fill := _up(size) - size:
                yield _Piece(None, fill, end + size, number)
            end += size + fill


def _put_in_python(file: int, pieces: Sequence[_Piece], records: int) -> list[int]:
    sums, run, start, end = [0] * records, list[memoryview](), 0, -1
    for data, size, offset, record in pieces:
        if offset != end:
            _write_all(file, run, start)
            run, start = [], offset
        run.append(memoryview(bytes(size)) if data is None else raw(data))
        if record >= 0:
            sums[record] = zlib.crc32(run[-1], sums[record])
        end = offset + size
    _write_all(file, run, start)
    return sums


def _write_all(file: int, pieces: list[memoryview], offset: int) -> None:
    while pieces:
        done = os.pwritev(file, _first(pieces), offset)
        offset += done
        while pieces and done >= len(pieces[0]):
            done -= len(pieces.pop(0))
        if done:
            pieces[0] = pieces[0][done:]


def _first(pieces: list[memoryview]) -> list[memoryview]:
    """What one call writes."""
    some, room = list[memoryview](), CALL
    for piece in pieces[:_PIECES]:
        some.append(piece[:room])
        room -= len(some[-1])
        if not room:
            break
    return some


def _on_host(states: Sequence[Tensors]) -> list[Tensors]:
    """The same in the host's memory, each tensor's numbers in their order; those of a GPU come together."""
    found = [{name: _plain(value) for name, value in state.items()} for state in states]
    places = [(state, name) for state in found for name, value in state.items() if value.is_cuda and value.numel()]
    for device in {state[name].device for state, name in places}:
        here = [(state, name) for state, name in places if state[name].device == device]
        lane = _lane(device)
        lane.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(lane):
            copies = _copied([state[name] for state, name in here])
        lane.synchronize()
        for (state, name), value in zip(here, copies, strict=True):
            state[name] = value
    return found


@functools.cache
def _lane(device: torch.device) -> torch.cuda.Stream:
    """A stream of its own: what the training has its GPU do next need not wait for copies."""
    return torch.cuda.Stream(device)


def _copied(values: Sequence[Tensor]) -> list[Tensor]:
    """Tensors on the host, once their stream has come so far; the small ones of a type in one copy."""
    made: dict[int, Tensor] = {}
    alike: dict[torch.dtype, list[int]] = defaultdict(list)
    for n, value in enumerate(values):
        if value.nbytes <= CALL:
            alike[value.dtype].append(n)
    for numbers in alike.values():
        some = [values[n] for n in numbers]
        with suppress(torch.OutOfMemoryError):  # it takes as much memory again, which only saves time
            flat = _flatten_dense_tensors(some)
            made |= dict(zip(numbers, _unflatten_dense_tensors(_coming(flat, locked=flat.is_cuda), some), strict=True))
    return [made[n] if n in made else value.to("cpu", non_blocking=True) for n, value in enumerate(values)]


def _coming(value: Tensor, locked: bool) -> Tensor:
    """A tensor on its way to the host's memory, which should be locked there.

    A GPU writes into locked memory by itself, and PyTorch keeps that for the next time. Into other memory its driver
    copies piece by piece, and a thread that wants to start kernels meanwhile may have to wait for it.
    """
    try:
        here = torch.empty_like(value, device="cpu", pin_memory=locked)
    except RuntimeError:  # the system locks no more, or there is no GPU
        here = torch.empty_like(value, device="cpu")
    return here.copy_(value, non_blocking=True)


def _plain(value: Tensor) -> Tensor:
    """The same numbers in order, and nothing that is still to be done with them."""
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    return value if value.is_contiguous() else value.contiguous()


def _head_of(state: Tensors) -> Tensor:
    return _head(tuple((name, value.dtype, value.shape) for name, value in state.items()))


@functools.lru_cache(maxsize=64)
def _head(described: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> Tensor:
    """Names, types and shapes, up to where the first tensor starts."""
    text = json.dumps([[name, str(kind).removeprefix("torch."), list(shape)] for name, kind, shape in described])
    data = len(text).to_bytes(8, "little") + text.encode()  # JSON is plain ASCII
    return torch.frombuffer(bytearray(data.ljust(_up(len(data)), b"\0")), dtype=torch.uint8)


def _unpack(record: Tensor) -> Tensors:
    """The tensors of a record, as views of it."""
    data = record.numpy()
    end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    state, start = {}, _up(end)
    for name, kind, shape in json.loads(data[8:end].tobytes()):
        value = state[name] = _view(record, start, _DTYPES[kind], shape)
        start += _up(value.nbytes)
    return state


def _up(size: int) -> int:
    """So many bytes, filled up: an unaligned tensor can change the last bit of a result."""
    return -(-size // _ALIGN) * _ALIGN


def _view(record: Tensor, start: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return record[start : start + count * dtype.itemsize].view(dtype).view(shape)
