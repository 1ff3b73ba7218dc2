"""What clients remember between their visits: in memory while there is room, the rest in one file.

A hundred thousand clients of which a hundred train in a round must cost what a hundred clients cost. So only about
the states of a round are held in memory, the newest; older ones go to a file, by a thread beside the training, and are
read back one at a time.

The system keeps files in memory as well. Where the states of all clients are too many for that, what was written a
while ago is of no use there: almost no client comes back before it would have to go. So the system is told to let go
of it, and its memory takes what comes next; and told which states a round will read, so that they are on their way.

The file is made of *slots*. A new state never replaces an old one: it gets a slot that neither a state in use nor one
of the last two checkpoints needs. So the file stays small, nothing has to be copied to tidy it up, and whenever a run
is killed, everything that its checkpoints name is there. A checkpoint holds the table of slots, with a checksum of
each state. What the file has beyond that is of rounds that will be made again.

Nothing is ever unpickled. Where a run has no folder, the file has no name, and goes with the process.
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from isofed import state_file
from isofed.background import Background
from isofed.errors import RunError
from isofed.files import Tensors, write_error
from isofed.state_file import LENGTH, OFFSET, ROOM, SUM, length_of, size_of

Slots = npt.NDArray[np.int64]

HOT = 1 << 30  # bytes of states held in memory at most, however many a round has
_PAGE = 4096
_BATCH = 8 << 20  # bytes of states that are written together, beside the training: room comes in pieces of that size
_BEHIND = 128 << 20  # bytes of the file that the system may have in memory, where it cannot have a good part of all
_SHARE = 8  # a good part fits into this part of the machine's memory
_NOBODY, _NOTHING = -1, -2  # in place of a slot: a client not visited yet, and one that has nothing to remember


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
        return cls(_Store(path, torch.device(device), clients), np.full(clients, _NOBODY, np.int64))

    @classmethod
    def restored(cls, index: Tensors, clients: int, path: Path, device: torch.device | str = "cpu") -> Remembered:
        """As it was when ``index`` came from :meth:`saving`."""
        if not _fits(index, clients):
            raise RunError(f"the checkpoint in {path.parent} does not belong to this run; start a new run")
        store = _Store(path, torch.device(device), clients)
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
            self._bytes += size_of(state)
            self._slots[client] = self._store.add(state, self._bytes) if state else _NOTHING
            self.taken.append(client)

    def expect(self, clients: Sequence[int]) -> None:
        """These will be asked for soon: what is not in memory can be on its way until then."""
        slots = self._slots[clients]
        self._store.expect(slots[slots >= 0])

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
    places = table[:, :SUM]
    rows = (places >= 0).all() and (places < far).all() and (table[:, LENGTH] <= table[:, ROOM]).all()
    return bool(known and rows)


class _Store:
    """The states that all moments of a run share: the newest in memory, the others in the slots of a file."""

    def __init__(self, path: Path | None, device: torch.device, clients: int) -> None:
        if path is not None:
            _settle()
        self.path, self.device, self._clients = path, device, clients
        self.views: list[weakref.ref[Remembered]] = []
        self.kept: list[Slots] = []  # the slots of the last two checkpoints,
        self.unsure: list[Slots] = []  # and of those that may have failed since
        self.broken: RunError | None = None
        self._hot: dict[int, Tensors] = {}  # by slot, in the order in which they came
        self._held = 0  # bytes of them
        self._unsaved: dict[int, int] = {}  # those that are not on file, with their bytes, the oldest first
        self._waiting = 0  # bytes of these
        self._most = 0  # bytes that a round has brought
        self._table = np.zeros((64, 4), np.int64)  # places in the file; a sum of -1: not there yet
        self._count = 0  # of its rows
        self._free: dict[int, list[int]] = {}  # slots by their room
        self._file: int | None = None
        self._synced = True
        self._spills = False  # whether memory was ever too small: only then is it worth writing ahead
        self._asked = False  # whether somebody is to do that
        self._behind: deque[Slots] = deque()  # places of what was written last, if the system is to let go of it
        self._moving: list[int] = []  # the slots that are being written ahead, without the lock
        self._lock = threading.Lock()  # which is taken in a single step: an interrupt comes before or after it
        self._moved = threading.Condition(self._lock)  # whoever waits here waits for those that are being written

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
            self._held = sum(map(size_of, self._hot.values()))
            self._unsaved = {slot: size for slot, size in self._unsaved.items() if slot in self._hot}
            self._waiting, self._asked = sum(self._unsaved.values()), False
            for slots in (*self.kept, *self.unsure, np.array(self._moving, np.int64)):
                used[slots] = True
            self._free = {}
            for slot in np.flatnonzero(~used)[::-1].tolist():  # so that the first are taken first
                self._free.setdefault(int(self._table[slot, ROOM]), []).append(slot)

    def add(self, state: Tensors, brought: int) -> int:
        """Take in a state and give its slot; older ones make room, so a round brings its own room along."""
        with self._lock:
            slot, size = self._reserve(length_of(state)), size_of(state)
            self._hot[slot], self._unsaved[slot] = state, size
            self._held += size
            self._waiting += size
            self._most = max(self._most, brought)
            while self._held > self._room and self._hot:
                oldest = next(iter(self._hot))
                while oldest in self._moving:
                    self._moved.wait()
                if self._table[oldest, SUM] < 0:
                    self._write([oldest])
                self._held -= size_of(self._hot.pop(oldest))
                self._spills = True
            # Not for each state: waking the writer costs the training more than the writing does.
            if self._spills and not self._asked and self._waiting > 0.75 * self._room:
                self._asked = True
                _writer().do(functools.partial(_write_ahead, weakref.ref(self)))
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
            past = self._past() if moving else None
        sums: list[int] = []
        try:
            if moving and self._file is not None:
                with suppress(OSError):  # whoever needs the room meets the same error, and can raise it
                    sums = state_file.put(self._file, places, states, past)
        finally:
            with self._lock:
                self._written(moving[: len(sums)], sums)
                self._asked, self._moving = bool(sums), []
                self._moved.notify_all()
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
            state = state_file.get(self._file, offset, length, checksum)
        except OSError as error:
            state, why = None, f"cannot be read ({error.strerror})"
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
                self._moved.wait()
            new = [s for s in sorted(self._hot.keys() & set(slots.tolist())) if self._table[s, SUM] < 0]
            while batch := self._batch(new):
                self._write(batch)
                del new[: len(batch)]
            if self._file is not None and not self._synced:
                try:
                    os.fsync(self._file)  # its name lasts with that of the checkpoint, in the same folder
                except OSError as error:
                    raise write_error(Path(self._name), error) from error
                self._synced = True
            if self._file is not None:
                state_file.forget(self._file, self._past())
            return self._table[: self._count].copy()

    def expect(self, slots: Slots) -> None:
        """Let the system bring states from the disk that will be read soon."""
        with self._lock:
            away = sorted(set(slots.tolist()) - self._hot.keys())
            places, file = self._table[away], self._file
        if file is not None:
            state_file.expect(file, places)

    def _past(self) -> Slots:
        """Places that were written a while ago, which the system may forget: see the top."""
        passed, size = [self._table[:0]], sum(int(places[:, ROOM].sum()) for places in self._behind)
        while size > _BEHIND:
            passed.append(self._behind.popleft())
            size -= int(passed[-1][:, ROOM].sum())
        return np.concatenate(passed)

    def _reserve(self, length: int) -> int:
        """A slot with room for so many bytes, that nothing needs."""
        # Eight sizes from a power of two to the next, so that a state that grows a little finds used slots again.
        step = max(_PAGE, 1 << length.bit_length() >> 4)
        room = -(-length // step) * step
        if free := self._free.get(room):
            slot = free.pop()
            self._table[slot] = self._table[slot, OFFSET], room, length, -1
            return slot
        slot = self._count
        if slot == len(self._table):
            self._table = np.concatenate([self._table, np.zeros((max(slot, 64), 4), np.int64)])
        end = int(self._table[slot - 1, OFFSET] + self._table[slot - 1, ROOM]) if slot else 0
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
            size += size_of(self._hot[slot])
        return sorted(chosen)

    def _write(self, slots: list[int]) -> None:
        """Copy states from memory to their slots; whoever needs the lock waits."""
        try:
            file = self._open(os.O_RDWR | os.O_CREAT | os.O_TRUNC)  # what is there already belongs to no checkpoint
            sums = state_file.put(file, self._table[slots], [self._hot[slot] for slot in slots])
        except OSError as error:
            raise write_error(Path(self._name), error) from error
        self._written(slots, sums)

    def _written(self, slots: list[int], sums: list[int]) -> None:
        """The states of these slots are on file, but not yet for good."""
        self._synced = self._synced and not slots
        self._table[slots, SUM] = sums
        if slots and self._clients * int(self._table[slots, ROOM].max()) > _memory() / _SHARE:
            self._behind.append(self._table[slots])
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
def _memory() -> float:
    """Bytes that this machine has; no end of them where it does not tell."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf


@functools.cache
def _writer() -> Background:
    """One thread that writes beside the training, for all runs of this process."""
    return Background("isofed-store")


os.register_at_fork(after_in_child=_writer.cache_clear)  # a child has none of its parent's threads


def _write_ahead(store: weakref.ref[_Store]) -> None:
    while (here := store()) is not None and here.write_some():
        del here  # a run that is over need not wait


def _settle() -> None:
    """Wait for what the writer is at: another store, that is over, may have the same file, and its slots are free."""
    if _writer.cache_info().currsize:
        _writer().settle()
