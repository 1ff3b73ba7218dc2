"""What clients remember: in memory and on file, the same, whatever happens in between."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isofed import state_file, store
from isofed.errors import RunError
from isofed.files import Tensors
from isofed.store import Remembered
from tests.store.tools import after, in_python, same, vector

STATES: dict[str, Tensors] = {
    "nothing": {},
    "a number": {"n": torch.tensor(3.5, dtype=torch.float64)},
    "empty tensors": {"none": torch.zeros(0), "no rows": torch.zeros(0, 3, dtype=torch.int32), "after": torch.ones(2)},
    "types": {
        str(kind): torch.tensor([0, 1, 2, 3]).to(kind)
        for kind in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16, torch.bfloat16)
    },
    "complex": {"conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(), "part": torch.tensor([1 + 2j]).conj().imag},
    "memory formats": {
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "channels": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "spread": torch.ones(1, 3).expand(5, 3),
        "one, far apart": torch.as_strided(torch.arange(4.0), (1,), (3,)),
    },
    "many": {str(n): torch.full((n % 3,), n) for n in range(700)},
    "odd numbers": {"n": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])},
    "names": {"": torch.ones(1), "a/b": torch.ones(1), "größe, \"'\n": torch.ones(1), "isofed.home": torch.ones(3)},
}


@pytest.mark.parametrize("hot", [0, 1 << 30])
@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_as_it_was(name: str, hot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "HOT", hot)
    found = after(Remembered.nothing(3), {1: STATES[name]})
    assert same(found[1], STATES[name])
    assert found.get(0) is None and list(found) == [1] and len(found) == 1
    assert 1 in found and 0 not in found and 3 not in found and -2 not in found
    for value in found[1].values():  # an unaligned view can change the last bit of a result
        assert hot or not value.numel() or value.data_ptr() % 64 == 0
    with pytest.raises(KeyError):
        found[2]


@pytest.mark.parametrize("hot", [0, 100, 1 << 30])
def test_a_moment_stays_what_it_is(hot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "HOT", hot)
    moments = [Remembered.nothing(4)]
    for round in range(20):
        moments.append(after(moments[-1], {client: vector(round, client) for client in (round % 3, 3)}))
    for number, moment in enumerate(moments):
        for client in range(4):
            rounds = [r for r in range(number) if client in (r % 3, 3)]
            state = moment.get(client)
            assert (state is None) == (not rounds)
            assert state is None or state["v"].tolist() == [rounds[-1], client]


def test_the_oldest_leave_memory_first_and_no_file_is_made_before(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(store, "HOT", 3 * 8)
    path = tmp_path / "checkpoints" / "states"
    now = after(Remembered.nothing(9, path), {client: vector(client, 0) for client in (0, 1, 2)})
    assert not path.parent.exists()
    now = after(now, {5: vector(5, 0)})
    assert path.exists()
    assert [len(now._store._hot), now._store._held] == [3, 24]
    path.write_bytes(bytes(path.stat().st_size))
    for client in (1, 2, 5):
        assert now[client]["v"].tolist() == [client, 0]
    with pytest.raises(RunError, match="what client 0 remembers is lost"):
        now[0]


@pytest.mark.parametrize("folder", [True, False])
def test_memory_and_the_file_stay_flat(folder: bool, tmp_path: Path) -> None:
    """Ten of a thousand clients a round: no more than two rounds in memory, and no file that grows with the rounds."""
    path = tmp_path / "states" if folder else None
    rng, now, size = np.random.default_rng(0), Remembered.nothing(1000, path), 10_000
    wanted: dict[int, float] = {}
    for round in range(400):
        chosen = rng.choice(1000, 10, replace=False).tolist()
        now = after(now, {client: {"v": torch.full((size // 4,), round + client / 1000)} for client in chosen})
        wanted |= {client: round + client / 1000 for client in chosen}
        assert sum(map(state_file.size_of, now._store._hot.values())) <= 2 * 10 * size
        if folder and round % 5 == 0:
            with now.saving() as index:
                assert all(len(values) <= 1100 for values in index.values())
    assert now._store._file is not None
    # The slots of the clients, of what the last two checkpoints remember besides, and of the rounds since.
    assert os.fstat(now._store._file).st_size <= (len(wanted) + 2 * 50 + 2 * 10) * 12_288
    assert {client: float(state["v"][0]) for client, state in now.items()} == pytest.approx(wanted)


def test_reading_from_threads_while_states_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "HOT", 50 * 4000)
    now = after(Remembered.nothing(100), {client: {"v": torch.full((1000,), client)} for client in range(100)})
    wrong: list[int] = []

    def read(before: Remembered, offset: int) -> None:
        for turn in range(300):
            client = (offset + 7 * turn) % 100
            if set(before[client]["v"].unique().tolist()) != {float(client)}:
                wrong.append(client)

    for _ in range(3):
        threads = [threading.Thread(target=read, args=(now, offset)) for offset in range(4)]
        for thread in threads:
            thread.start()
        following = now.copy()
        for client in range(100):
            following.take({client: {"v": torch.full((1000,), client)}})
        for thread in threads:
            thread.join()
        now = following
    assert not wrong


# --- any order of events, against a plain dict

# Few clients and few sizes, so that slots are used again soon.
BROUGHT = st.dictionaries(st.integers(0, 3), st.sampled_from([None, 10, 10, 2000]), min_size=1, max_size=3)
EVENTS = st.one_of(
    st.tuples(st.just("round"), BROUGHT),
    st.tuples(st.just("round"), BROUGHT),
    st.tuples(st.just("broken off"), BROUGHT),
    st.tuples(st.just("save"), st.none()),
    st.tuples(st.sampled_from(["fail to save", "save unseen", "killed", "killed, newest damaged"]), st.none()),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(EVENTS, min_size=15, max_size=40), hot=st.sampled_from([0, 5000, 1 << 30]))
def test_any_order_of_events(events: list[Any], hot: int, tmp_path_factory: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(store, "HOT", hot)
    path, stamp = tmp_path_factory.mktemp("any") / "states", 0
    now, model = Remembered.nothing(8, path), dict[int, Tensors]()
    kept: list[tuple[Tensors, dict[int, Tensors]]] = []  # as the folder keeps checkpoints: the last two
    for event, states in events:
        if event in ("round", "broken off"):
            made: dict[int, Tensors] = {}
            for client, length in states.items():
                stamp += 1
                made[client] = {"v": torch.full((length,), float(stamp))} if length else {}
            following = after(now, made)
            if event == "round":
                now, model = following, model | made
            del following
        elif event == "save":
            with now.saving() as index:
                kept = [*kept[-1:], ({k: v.clone() for k, v in index.items()}, dict(model))]
        elif event in ("fail to save", "save unseen"):
            with pytest.raises(KeyboardInterrupt), now.saving() as index:
                if event == "save unseen":  # the file was there, and then came Ctrl-C
                    kept = [*kept[-1:], ({k: v.clone() for k, v in index.items()}, dict(model))]
                raise KeyboardInterrupt
        else:
            if event == "killed, newest damaged":
                kept = kept[:-1]
            del now
            now, model = Remembered.nothing(8, path), {}
            if kept:
                now, model = Remembered.restored(kept[-1][0], 8, path), dict(kept[-1][1])
        assert list(now) == sorted(model)
        assert all(same(now[client], state) for client, state in model.items())
        for index, remembered in kept:
            old = Remembered.restored(index, 8, path)
            assert list(old) == sorted(remembered)
            assert all(same(old[client], state) for client, state in remembered.items())


# --- beside the training


def test_what_must_leave_memory_is_written_beside_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    written, put = Counter[str](), state_file.put

    def noted(file: int, places: state_file.Places, *given: Any) -> list[int]:
        written[threading.current_thread().name] += int(places[:, state_file.LENGTH].sum())
        return put(file, places, *given)

    monkeypatch.setattr(state_file, "put", noted)
    now = Remembered.nothing(1000)
    for number in range(20):
        now = after(now, {10 * number + n: vector(*range(number, number + 1000)) for n in range(10)})
        store._writer().settle()  # the time that a round would take
    assert all(same(now[10 * n + 3], vector(*range(n, n + 1000))) for n in range(20))
    here = threading.current_thread().name
    assert written.total() - written[here] > 5 * written[here] > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one may come to a garbage collection
@pytest.mark.parametrize("seed", range(3))
def test_an_interrupt_leaves_nothing_locked(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come between any two steps of Python, as one did between taking a lock and having it."""
    monkeypatch.setattr(store, "HOT", 250_000)  # of 800,000 bytes of all clients
    rng, armed = np.random.default_rng(seed), False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    now, known, interrupts = Remembered.nothing(100, tmp_path / "states"), dict[int, Tensors](), 0
    end = time.monotonic() + 1
    try:
        while time.monotonic() < end:
            some = rng.choice(100, 10, replace=False).tolist()
            news = {client: {"v": torch.full((2000,), rng.random())} for client in some}
            armed = True
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.random() * 0.003 + 1e-6)
                following = after(now, news)
                if rng.random() < 0.3:
                    with following.saving():
                        pass
                armed = False
                now, known = following, known | news
            except KeyboardInterrupt:
                interrupts += 1
            armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert now._store._lock.acquire(timeout=10), "somebody has the lock who is gone"
            now._store._lock.release()
            assert all(same(now[client], known[client]) for client in list(known)[:3])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 5
    assert isinstance(now._store._lock, type(threading.Lock()))  # which no step of Python's takes in two


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_was_forked_has_a_writer_of_its_own(tmp_path: Path) -> None:
    store._writer().settle()
    child = os.fork()
    if not child:
        code = 1
        try:
            now = Remembered.nothing(10, tmp_path / "states")  # which waits for the writer
            code = 0 if same(after(now, {1: vector(1.0)})[1], vector(1.0)) else 2
        finally:
            os._exit(code)
    end = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert done == (child, 0)


class Cache:
    """What a system has of a file in its memory, reckoned from what it is told: by place, whether it is on the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.saved: dict[int, bool] = {}
        self._put = state_file._put_in_python
        in_python(monkeypatch)
        monkeypatch.setattr(state_file, "_put_in_python", self._write)
        monkeypatch.setattr(os, "fsync", lambda file: self.saved.update(dict.fromkeys(self.saved, True)))
        monkeypatch.setattr(os, "posix_fadvise", self._advise)

    def _write(self, file: int, pieces: Sequence[state_file._Piece], records: int) -> list[int]:
        self.saved.update({piece.offset: False for piece in pieces if not piece.offset % 4096})
        return self._put(file, pieces, records)

    def _advise(self, file: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        for place in [place for place in self.saved if start <= place < start + length]:
            if self.saved.pop(place) is False:  # Linux begins to write, and keeps it
                self.saved[place] = True


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("enough", [False, True])
def test_the_system_lets_go_of_the_file_if_it_cannot_have_all(enough: bool, quick: bool, monkeypatch: Any) -> None:
    """Whoever wrote it: the writer, a checkpoint, or the training, where the writer is not quick enough."""
    monkeypatch.setattr(store, "_memory", lambda: 8.0 * 4096 * (1000 if enough else 999))
    monkeypatch.setattr(store, "_BEHIND", 200_000)
    if not quick:
        monkeypatch.setattr(store, "_write_ahead", lambda _: None)
    cache, now = Cache(monkeypatch), Remembered.nothing(1000)
    for number in range(30):
        now = after(now, {10 * number + n: vector(*range(number, number + 1000)) for n in range(10)})
        if quick:
            store._writer().settle()
        if number % 9 == 8:
            with now.saving():
                pass
    with now.saving():
        pass
    if enough:
        assert len(cache.saved) == 300
    else:
        assert 60_000 <= 4096 * len(cache.saved) <= 200_000
    assert all(same(now[10 * n + 3], vector(*range(n, n + 1000))) for n in range(30))


def test_what_a_round_will_read_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = rounds(Remembered.nothing(1000), range(9))
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *given: asked.append(given))
    now.expect([])
    now.expect([85, 500])  # in memory, and never visited
    assert asked == []
    now.expect([31, 500, 5, 6, 85])
    places = now._store._table[now._slots[[5, 6, 31]]]
    first, _, last = places[:, state_file.OFFSET].tolist()
    room = int(places[0, state_file.ROOM])
    assert asked == [(first, 2 * room, os.POSIX_FADV_WILLNEED), (last, room, os.POSIX_FADV_WILLNEED)]

    def refused(*_: Any) -> None:
        raise OSError("this file system takes no advice")

    monkeypatch.setattr(os, "posix_fadvise", refused)
    now.expect([5])
    monkeypatch.delattr(os, "posix_fadvise")
    now.expect([5])
    assert right(now, range(90))


class Held:
    """From :meth:`hold` to :meth:`let_go` whatever is written beside the training waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting, self._go, self._put = threading.Event(), threading.Event(), state_file.put
        self._go.set()
        self.hold, self.let_go = self._go.clear, self._go.set
        monkeypatch.setattr(state_file, "put", self._wait_and_put)

    def _wait_and_put(self, *given: Any) -> list[int]:
        if threading.current_thread().name.startswith("isofed-store") and not self._go.is_set():
            self.waiting.set()
            assert self._go.wait(60)
        return self._put(*given)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.let_go()
    store._writer().settle()


def rounds(now: Remembered, numbers: range, of: int = 10) -> Remembered:
    """Rounds of ten clients at most, of whom none comes twice."""
    for number in numbers:
        now = after(now, {10 * number + n: vector(*range(number, number + 1000)) for n in range(of)})
    return now


def right(now: Remembered, clients: range) -> bool:
    return all(same(now[c], vector(*range(c // 10, c // 10 + 1000))) for c in clients)


def four_rounds(path: Path, held: Held) -> Remembered:
    """All on file, and from now on the writer is held: when 16 states wait for it, it takes the first six or more."""
    now = rounds(Remembered.nothing(100, path), range(4))
    with now.saving():
        held.hold()
    return now


def test_the_training_need_not_wait_for_what_is_being_written(held: Held, tmp_path: Path) -> None:
    now = rounds(rounds(four_rounds(tmp_path / "states", held), range(4, 5)), range(5, 6), of=9)
    assert held.waiting.wait(60)
    now = rounds(now, range(6, 7), of=1)
    assert right(now, range(59)) and right(now, range(60, 61))  # those in memory, and those on file
    assert now._store._moving
    held.let_go()
    now = rounds(now, range(7, 10))
    assert right(now, range(59)) and right(now, range(70, 100))


def test_a_slot_that_is_being_written_is_not_given_away(held: Held, tmp_path: Path) -> None:
    now = four_rounds(tmp_path / "states", held)
    following = rounds(rounds(now, range(4, 5)), range(5, 6), of=9)
    assert held.waiting.wait(60)
    moving = set(now._store._moving)
    assert len(moving) >= 6 and moving <= set(following._slots[40:50].tolist())
    del following  # a round that is broken off: nobody needs these slots any more
    now = rounds(now, range(6, 7))
    assert not moving & set(now._slots.tolist())
    held.let_go()
    with now.saving() as index:
        again = Remembered.restored(index, 100, tmp_path / "states")
    assert right(again, range(40)) and right(again, range(60, 70))
    assert moving & set(rounds(now, range(7, 9))._slots.tolist())  # and then it is


def test_a_checkpoint_waits_for_what_is_being_written(held: Held, tmp_path: Path) -> None:
    now = rounds(rounds(four_rounds(tmp_path / "states", held), range(4, 5)), range(5, 6), of=9)
    assert held.waiting.wait(60)
    saved: list[Tensors] = []

    def save() -> None:
        with now.saving() as index:
            saved.append(index)

    saver = threading.Thread(target=save)
    saver.start()
    saver.join(0.2)
    assert not saved
    held.let_go()
    saver.join(60)
    assert right(Remembered.restored(saved[0], 100, tmp_path / "states"), range(59))


def test_who_goes_on_with_the_file_waits_for_what_is_being_written(held: Held, tmp_path: Path) -> None:
    now = rounds(rounds(four_rounds(tmp_path / "states", held), range(4, 5)), range(5, 6), of=9)
    assert held.waiting.wait(60)
    made: list[Remembered] = []
    maker = threading.Thread(target=lambda: made.append(Remembered.nothing(100, tmp_path / "states")))
    maker.start()
    maker.join(0.2)
    assert not made and right(now, range(59))
    held.let_go()
    maker.join(60)
    assert len(made) == 1 and not now._store._moving


def test_neighbours_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, write = list[int](), os.pwritev

    def noted(*arguments: Any) -> int:
        calls.append(write(*arguments))
        return calls[-1]

    in_python(monkeypatch)
    monkeypatch.setattr(os, "pwritev", noted)
    now = after(Remembered.nothing(9, tmp_path / "states"), {n: vector(*range(n, n + 2000)) for n in range(9)})
    with now.saving() as index:
        pass
    assert len(calls) == 1
    again = Remembered.restored(index, 9, tmp_path / "states")
    assert all(same(again[n], vector(*range(n, n + 2000))) for n in range(9))
    now = after(after(now, {n: vector(-n) for n in (2, 5, 6)}), {8: vector(8)})
    with now.saving():
        pass
    with now.saving():
        pass  # so that what the first checkpoint had is free
    calls.clear()
    now = after(now, {n: vector(*range(2000)) for n in range(9)})
    with now.saving():
        pass
    assert 1 < len(calls) < 9
    monkeypatch.setattr(state_file, "CALL", 5000)  # less than a state has
    calls.clear()
    now = after(now, {n: vector(*range(n, n + 2000)) for n in range(9)})
    with now.saving() as index:
        again = Remembered.restored(index, 9, tmp_path / "states")
    assert len(calls) > 9 and max(calls) == 5000
    assert all(same(again[n], vector(*range(n, n + 2000))) for n in range(9))


def test_a_federation_that_fits_writes_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> list[int]:
        raise AssertionError("nothing has to leave memory here")

    monkeypatch.setattr(state_file, "put", refuse)
    now = Remembered.nothing(10)
    for number in range(20):
        now = after(now, {n: vector(*range(number, number + 1000)) for n in range(10)})
        store._writer().settle()
    assert same(now[3], vector(*range(19, 1019)))
