"""What clients remember: in memory and on file, the same, whatever happens in between."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isofed import store
from isofed.errors import RunError
from isofed.files import Tensors
from isofed.store import Remembered
from tests.store.tools import after, same, vector

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
        assert sum(map(store._size, now._store._hot.values())) <= 2 * 10 * size
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
    writers: list[str] = []
    write = os.pwrite

    def noted(*arguments: Any) -> int:
        writers.append(threading.current_thread().name)
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", noted)
    now = Remembered.nothing(1000)
    for number in range(20):
        now = after(now, {10 * number + n: vector(*range(number, number + 1000)) for n in range(10)})
        store._writer().submit(lambda: None).result()  # the time that a round would take
    assert all(same(now[10 * n + 3], vector(*range(n, n + 1000))) for n in range(20))
    here = threading.current_thread().name
    assert sum(name != here for name in writers) > 5 * sum(name == here for name in writers) > 0


def test_a_federation_that_fits_writes_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise AssertionError("nothing has to leave memory here")

    monkeypatch.setattr(os, "pwrite", refuse)
    now = Remembered.nothing(10)
    for number in range(20):
        now = after(now, {n: vector(*range(number, number + 1000)) for n in range(10)})
        store._writer().submit(lambda: None).result()
    assert same(now[3], vector(*range(19, 1019)))
