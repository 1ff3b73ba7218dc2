"""What clients remember between their visits: in memory while there is room, the rest in one file.

A hundred thousand clients of which a hundred train in a round must cost what a hundred clients cost. So only about
the states of a round are held in memory, the newest; older ones go to a file, by a thread beside the training, and are
read back one at a time.

The file is made of *slots*. A new state never replaces an old one: it gets a slot that neither a state in use nor one
of the last two checkpoints needs. So the file stays small, nothing has to be copied to tidy it up, and whenever a run
is killed, everything that its checkpoints name is there. A checkpoint holds the table of slots, with a checksum of
each state. What the file has beyond that is of rounds that will be made again.

Nothing is ever unpickled. Where a run has no folder, the file has no name, and goes with the process.
"""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
import threading
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isofed.errors import RunError
from isofed.files import Tensors, raw, write_error

Slots = npt.NDArray[np.int64]

HOT = 1 << 30  # bytes of states held in memory at most, however many a round has
_ALIGN, _PAGE = 64, 4096
_BATCH = 8 << 20  # bytes of states that are written together, beside the training: room comes in pieces of that size
_CALL = 1 << 20  # bytes that one call writes: Linux can take several times as long over larger ones
_PIECES = 1000  # and pieces: systems take 1024
_NOBODY, _NOTHING = -1, -2  # in place of a slot: a client not visited yet, and one that has nothing to remember
_OFFSET, _ROOM, _LENGTH, _SUM = range(4)  # the columns of the table of slots; a sum of -1: not on file yet
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


class Remembered(Mapping[int, Tensors]):
    """What the clients visited so far remember, at one moment of a run.

    The next moment is a :meth:`copy` that takes new states in; this one stays what it is for as long as somebody
    holds it. Reading is safe from any thread.
    """

    def __init__(self, store: _Store, slots: Slots) -> None:
        self._store, self._slots = store, slots
        self.taken: list[int] = []  # clients whose states this moment has changed
        self._bytes = 0  # of these
        store.views.append(weakref.ref(self))

    @classmethod
    def nothing(cls, clients: int, path: Path | None = None, device: torch.device | str = "cpu") -> Remembered:
        """Before the first round of so many clients. States may go to the file ``path``, or to one without a name."""
        return cls(_Store(path, torch.device(device)), np.full(clients, _NOBODY, np.int64))

    @classmethod
    def restored(cls, index: Tensors, clients: int, path: Path, device: torch.device | str = "cpu") -> Remembered:
        """As it was when ``index`` came from :meth:`saving`."""
        if not _fits(index, clients):
            raise RunError(f"the checkpoint in {path.parent} does not belong to this run; start a new run")
        store = _Store(path, torch.device(device))
        visited, table, before = (index[name].numpy() for name in ("visited", "table", "before"))
        slots = np.full(clients, _NOBODY, np.int64)
        slots[visited[0]] = visited[1]
        store.take_up(table, [before, slots[slots >= 0]])
        return cls(store, slots)

    def __getitem__(self, client: int) -> Tensors:
        if client not in self:
            raise KeyError(client)
        slot = int(self._slots[client])
        return {} if slot == _NOTHING else self._store.read(slot, client)

    def __contains__(self, client: object) -> bool:
        return isinstance(client, int) and 0 <= client < len(self._slots) and bool(self._slots[client] != _NOBODY)

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self._slots != _NOBODY).tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self._slots != _NOBODY))

    def copy(self) -> Remembered:
        """The same, to take new states into."""
        made = Remembered(self._store, self._slots.copy())
        self._store.sweep()
        return made

    def take(self, states: dict[int, Tensors]) -> None:
        """Let clients remember these states. They leave ``states``, and nobody may change their tensors from now on."""
        for client in list(states):
            state = states.pop(client)
            self._bytes += _size(state)
            self._slots[client] = self._store.add(state, self._bytes) if state else _NOTHING
            self.taken.append(client)

    def check(self) -> None:
        """Raise what kept a state from being read; an executor may have taken it for a failure of its client."""
        if self._store.broken:
            raise self._store.broken

    @contextmanager
    def saving(self) -> Iterator[Tensors]:
        """Put everything on file, and give the tensors that a checkpoint needs; it counts if the block ends well."""
        store = self._store
        visited = np.flatnonzero(self._slots != _NOBODY)
        mine = self._slots[self._slots >= 0]
        table = store.flush(mine)
        before = np.unique(np.concatenate([*store.kept[-1:], *store.unsure, mine[:0]]))
        store.unsure.append(mine)  # if the block fails, the checkpoint may be on disk, or not
        index = {"visited": np.stack([visited, self._slots[visited]]), "table": table, "before": before}
        yield {name: torch.from_numpy(values) for name, values in index.items()}
        store.kept, store.unsure = [*store.kept[-1:], *store.unsure], []


def _fits(index: Tensors, clients: int) -> bool:
    """Whether the tensors of a checkpoint are those of :meth:`Remembered.saving`, for so many clients."""
    found = [index.get(name) for name in ("visited", "table", "before")]
    if any(t is None or t.dtype != torch.int64 or t.dim() != d for t, d in zip(found, (2, 2, 1), strict=True)):
        return False
    visited, table, before = (t.numpy() for t in found if t is not None)
    if len(visited) != 2 or table.shape[1] != 4:
        return False
    who, slots = visited[0], visited[1]
    used = np.concatenate([slots[slots != _NOTHING], before])
    known = (who >= 0).all() and (who < clients).all() and (used >= 0).all() and (used < len(table)).all()
    far = 2**60  # more than any file holds, and their sums are still numbers
    places = table[:, :_SUM]
    rows = (places >= 0).all() and (places < far).all() and (table[:, _LENGTH] <= table[:, _ROOM]).all()
    return bool(known and rows)


class _Store:
    """The states that all moments of a run share: the newest in memory, the others in the slots of a file."""

    def __init__(self, path: Path | None, device: torch.device) -> None:
        if path is not None:
            _settle()
        self.path, self.device = path, device
        self.views: list[weakref.ref[Remembered]] = []
        self.kept: list[Slots] = []  # the slots of the last two checkpoints,
        self.unsure: list[Slots] = []  # and of those that may have failed since
        self.broken: RunError | None = None
        self._hot: dict[int, Tensors] = {}  # by slot, in the order in which they came
        self._held = 0  # bytes of them
        self._unsaved: dict[int, int] = {}  # those that are not on file, with their bytes, the oldest first
        self._waiting = 0  # bytes of these
        self._most = 0  # bytes that a round has brought
        self._table = np.zeros((64, 4), np.int64)
        self._count = 0  # of its rows
        self._free: dict[int, list[int]] = {}  # slots by their room
        self._file: int | None = None
        self._synced = True
        self._spills = False  # whether memory was ever too small: only then is it worth writing ahead
        self._asked = False  # whether somebody is to do that
        self._moving: list[int] = []  # the slots that are being written ahead, without the lock
        self._lock = threading.Condition(threading.Lock())  # whoever waits here waits for these

    def take_up(self, table: Slots, kept: list[Slots]) -> None:
        """Go on with the file and the table of a checkpoint."""
        self._table, self._count, self.kept = table.copy(), len(table), kept
        if any(len(slots) for slots in kept):
            try:
                self._open(os.O_RDWR)
            except OSError as error:
                why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be opened ({error.strerror})"
                raise RunError(
                    f"{self.path}, with what the clients remember, {why}: "
                    "put it back, or start the run again with another out="
                ) from error
        self.sweep()

    def sweep(self) -> None:
        """Let go of what no moment that is still held, and no checkpoint, needs. Mends what an interrupt left."""
        with self._lock:
            used = np.zeros(self._count, bool)
            self.views = [view for view in self.views if view() is not None]
            for view in [view() for view in self.views]:
                if view is not None:
                    used[view._slots[view._slots >= 0]] = True
            self._hot = {slot: state for slot, state in self._hot.items() if used[slot]}
            self._held = sum(map(_size, self._hot.values()))
            self._unsaved = {slot: size for slot, size in self._unsaved.items() if slot in self._hot}
            self._waiting, self._asked = sum(self._unsaved.values()), False
            for slots in (*self.kept, *self.unsure, np.array(self._moving, np.int64)):
                used[slots] = True
            self._free = {}
            for slot in np.flatnonzero(~used)[::-1].tolist():  # so that the first are taken first
                self._free.setdefault(int(self._table[slot, _ROOM]), []).append(slot)

    def add(self, state: Tensors, brought: int) -> int:
        """Take in a state and give its slot; older ones make room, so a round brings its own room along."""
        with self._lock:
            slot, size = self._reserve(_length(state)), _size(state)
            self._hot[slot], self._unsaved[slot] = state, size
            self._held += size
            self._waiting += size
            self._most = max(self._most, brought)
            while self._held > self._room and self._hot:
                oldest = next(iter(self._hot))
                while oldest in self._moving:
                    self._lock.wait()
                if self._table[oldest, _SUM] < 0:
                    self._write([oldest])
                self._held -= _size(self._hot.pop(oldest))
                self._spills = True
            # Not for each state: waking the writer costs the training more than the writing does.
            if self._spills and not self._asked and self._waiting > 0.75 * self._room:
                self._asked = True
                _writer().submit(_write_ahead, weakref.ref(self))
        return slot

    @property
    def _room(self) -> int:
        """Bytes that may be held: twice a round, what its clients remember from before and what they bring back."""
        return min(HOT, 2 * self._most)

    def write_some(self) -> bool:
        """Put the oldest states on file that will have to leave the memory soon; whether there were any.

        Only the writer may call it. It has the lock before and after, but not while it writes, or the training would
        wait for the disk. Meanwhile nobody else writes to these slots, and none of them is free.
        """
        with self._lock:
            late = self._waiting - self._room // 2  # a round's states may stay: some will be replaced
            moving = self._moving = self._batch(self._unsaved, late)
            places, states = self._table[moving], [self._hot[slot] for slot in moving]
        sums: list[int] = []
        try:
            if moving and self._file is not None:
                with suppress(OSError):  # whoever needs the room meets the same error, and can raise it
                    sums = _put(self._file, places, states)
                    _begin_to_save(self._file, places)
        finally:
            with self._lock:
                self._written(moving[: len(sums)], sums)
                self._asked, self._moving = bool(sums), []
                self._lock.notify_all()
        return bool(sums)

    def read(self, slot: int, client: int) -> Tensors:
        """The state in a slot."""
        with self._lock:
            if slot in self._hot:
                return self._hot[slot]
            offset, _, length, checksum = self._table[slot].tolist()
        assert self._file is not None
        why = "is damaged there"
        try:
            # Nothing is allocated for what the file does not hold.
            held = max(0, min(length, os.fstat(self._file).st_size - offset))
            record, got = torch.empty(held, dtype=torch.uint8), 0
            data = raw(record)
            while count := os.preadv(self._file, [data[got:]], offset + got):
                got += count
            state = _unpack(record) if got == length and zlib.crc32(data) == checksum else None
        except OSError as error:
            state, why = None, f"cannot be read ({error.strerror})"
        except (LookupError, TypeError, ValueError, RuntimeError):  # whole, and nothing that was ever written
            state = None
        if state is None:
            self.broken = RunError(
                f"what client {client} remembers is lost, because {self._name} {why}: "
                "put back a copy of the run folder, or start the run again with another out="
            )
            raise self.broken
        return {name: value.to(self.device) for name, value in state.items()}

    def flush(self, slots: Slots) -> Slots:
        """Put what is only in memory on file, for good, and give the table."""
        with self._lock:
            while self._moving:
                self._lock.wait()
            new = [s for s in sorted(self._hot.keys() & set(slots.tolist())) if self._table[s, _SUM] < 0]
            while batch := self._batch(new):
                self._write(batch)
                del new[: len(batch)]
            if self._file is not None and not self._synced:
                try:
                    os.fsync(self._file)  # its name lasts with that of the checkpoint, in the same folder
                except OSError as error:
                    raise write_error(Path(self._name), error) from error
                self._synced = True
            return self._table[: self._count].copy()

    def _reserve(self, length: int) -> int:
        """A slot with room for so many bytes, that nothing needs."""
        # Eight sizes from a power of two to the next, so that a state that grows a little finds used slots again.
        step = max(_PAGE, 1 << length.bit_length() >> 4)
        room = -(-length // step) * step
        if free := self._free.get(room):
            slot = free.pop()
            self._table[slot] = self._table[slot, _OFFSET], room, length, -1
            return slot
        slot = self._count
        if slot == len(self._table):
            self._table = np.concatenate([self._table, np.zeros((max(slot, 64), 4), np.int64)])
        end = int(self._table[slot - 1, _OFFSET] + self._table[slot - 1, _ROOM]) if slot else 0
        self._table[slot] = end, room, length, -1
        self._count += 1
        return slot

    def _batch(self, slots: Iterable[int], most: float = math.inf) -> list[int]:
        """The first of some slots, so many that their states have these bytes, or are enough to be written at once."""
        chosen: list[int] = []
        size = 0
        for slot in slots:
            if size >= min(most, _BATCH):
                break
            chosen.append(slot)
            size += _size(self._hot[slot])
        return sorted(chosen)

    def _write(self, slots: list[int]) -> None:
        """Copy states from memory to their slots; whoever needs the lock waits."""
        try:
            file = self._open(os.O_RDWR | os.O_CREAT | os.O_TRUNC)  # what is there already belongs to no checkpoint
            sums = _put(file, self._table[slots], [self._hot[slot] for slot in slots])
        except OSError as error:
            raise write_error(Path(self._name), error) from error
        self._written(slots, sums)

    def _written(self, slots: list[int], sums: list[int]) -> None:
        """The states of these slots are on file, but not yet for good."""
        self._synced = self._synced and not slots
        self._table[slots, _SUM] = sums
        for slot in slots:
            self._waiting -= self._unsaved.pop(slot, 0)

    @property
    def _name(self) -> str:
        return str(self.path or Path(tempfile.gettempdir()) / "a temporary file")

    def _open(self, flags: int) -> int:
        """The file, which the system closes when the last moment is gone."""
        if self._file is None:
            if self.path is None:
                self._file, name = tempfile.mkstemp(prefix="isofed-")
                os.unlink(name)
            else:
                self.path.parent.mkdir(exist_ok=True)
                self._file = os.open(self.path, flags | os.O_CLOEXEC, 0o666)
            weakref.finalize(self, os.close, self._file)
        return self._file


@functools.cache
def _writer() -> ThreadPoolExecutor:
    """One thread that writes beside the training, for all runs of this process."""
    return ThreadPoolExecutor(1, "isofed-store")


def _write_ahead(store: weakref.ref[_Store]) -> None:
    while (here := store()) is not None and here.write_some():
        del here  # a run that is over need not wait


def _settle() -> None:
    """Wait for what the writer is at: another store, that is over, may have the same file, and its slots are free."""
    if _writer.cache_info().currsize:
        _writer().submit(lambda: None).result()


def _put(file: int, places: Slots, states: Sequence[Tensors]) -> list[int]:
    """Write states to their places, rows of a table in its order, and give their checksums.

    Neighbours go in one call: after each call this thread has to get the interpreter back from the training.
    """
    sums, run, start, end, after = list[int](), list[memoryview](), 0, 0, -1
    for (offset, room, length, _), state in zip(places.tolist(), _on_host(states), strict=True):
        if offset == after:
            run.append(memoryview(bytes(offset - end)))
        else:
            _write_all(file, run, start)
            run, start = [], offset
        pieces = list(_pieces(state))
        checksum = 0
        for piece in pieces:
            checksum = zlib.crc32(piece, checksum)
        sums.append(checksum)
        run += pieces
        end, after = offset + length, offset + room
    _write_all(file, run, start)
    return sums


def _begin_to_save(file: int, places: Slots) -> None:
    """Let the system begin to bring to the disk what was written, so that a checkpoint need not wait for all of it.

    Linux does so when it is told that nobody will read these places soon; what is not on the disk yet, it keeps.
    """
    if hasattr(os, "posix_fadvise"):
        start, end = places[0, _OFFSET], places[-1, _OFFSET] + places[-1, _ROOM]
        os.posix_fadvise(file, int(start), int(end - start), os.POSIX_FADV_DONTNEED)


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
    some, room = list[memoryview](), _CALL
    for piece in pieces[:_PIECES]:
        some.append(piece[:room])
        room -= len(some[-1])
        if not room:
            break
    return some


def _on_host(states: Sequence[Tensors]) -> Sequence[Tensors]:
    """The same in the host's memory; a GPU copies all of it before it is waited for."""
    devices = {value.device for state in states for value in state.values() if value.is_cuda}
    if not devices:
        return states
    copies = [{name: value.to("cpu", non_blocking=True) for name, value in state.items()} for state in states]
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _size(state: Tensors) -> int:
    return sum(value.numel() * value.element_size() for value in state.values())


def _head(state: Tensors) -> bytes:
    """Names, types and shapes, up to where the first tensor starts."""
    text = json.dumps([[name, str(v.dtype).removeprefix("torch."), list(v.shape)] for name, v in state.items()])
    data = len(text).to_bytes(8, "little") + text.encode()  # JSON is plain ASCII
    return data.ljust(_up(len(data)), b"\0")


def _length(state: Tensors) -> int:
    """Bytes of a state's record."""
    return len(_head(state)) + sum(_up(v.numel() * v.element_size()) for v in state.values())


def _pieces(state: Tensors) -> Iterator[memoryview]:
    """The record of a state, piece by piece, without a copy of what is in the host's memory."""
    yield memoryview(_head(state))
    for value in state.values():
        data = raw(value)
        yield data
        yield memoryview(bytes(_up(len(data)) - len(data)))


def _unpack(record: Tensor) -> Tensors:
    """The tensors of a record, as views of it."""
    raw = record.numpy()
    end = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    state, start = {}, _up(end)
    for name, kind, shape in json.loads(raw[8:end].tobytes()):
        value = state[name] = _view(record, start, _DTYPES[kind], shape)
        start += _up(value.numel() * value.element_size())
    return state


def _up(size: int) -> int:
    """So many bytes, filled up: an unaligned tensor can change the last bit of a result."""
    return -(-size // _ALIGN) * _ALIGN


def _view(record: Tensor, start: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return record[start : start + count * dtype.itemsize].view(dtype).view(shape)
