"""How many slots are made: while they pay, measured with steps or whole visits, and as many as share a round evenly."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from isofed import Method
from isofed.engine import slots as executors
from isofed.engine.replica import Job, one_thread
from isofed.engine.serial import Serial
from isofed.engine.slots import Slots
from isofed.methods import Visit
from tests.engine.test_slots import CPU, assert_same, start, two_rounds, world


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread(CPU):
        yield


def test_slots_are_made_only_while_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {1: 100.0, 2: 180.0, 4: 200.0, 8: 205.0}
    of = world(None, clients=40, rounds=10_000, partition="iid")
    monkeypatch.setattr(Slots, "_speed", lambda self: rates[len(self.slots)])
    executor = Slots(of, CPU)
    list(executor.train([Job(1, c, 0.05, 0.1) for c in range(40)], *start(of)))
    assert len(executor.slots) == 8  # twice as many were hardly faster, which shows when they are there
    for rate in (201.0, 190.0):  # as fast, as far as one can tell, and slower: half of them are given up again
        rates |= {8: rate}
        executor = Slots(of, CPU)
        list(executor.train([Job(1, c, 0.05, 0.1) for c in range(40)], *start(of)))
        assert len(executor.slots) == 4
    ten = Slots(world(None, clients=10, rounds=10_000, partition="iid"), CPU)
    list(ten.train([Job(1, c, 0.05, 0.1) for c in range(10)], *start(ten.world)))
    assert len(ten.slots) == 5  # who share ten visits evenly: with four or eight, some would have nothing to do
    monkeypatch.setattr(Slots, "_speed", lambda self: 1e9 * len(self.slots))  # the whole run is over in no time
    few = Slots(world(None, clients=40, rounds=1, partition="iid"), CPU)
    list(few.train([Job(1, c, 0.05, 0.1) for c in range(40)], *start(few.world)))
    assert len(few.slots) == 2  # a short run does not wait for more


def test_the_first_slot_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fresh process, where its libraries are loaded and its kernels compiled."""
    of = world(None, clients=40, rounds=500, partition="iid")
    executor, add = Slots(of, CPU), Slots._add
    steps = 500 * sum(count * executor._steps[samples] for samples, count in executor._clients.items())

    def slow(executor: Slots, *rest: Any) -> bool:
        time.sleep(0 if executor.slots else 0.6)
        return add(executor, *rest)

    monkeypatch.setattr(Slots, "_add", slow)
    # Twice as many are hardly faster, but enough; a tenth of the run's time, which may go into slots, is a second.
    monkeypatch.setattr(Slots, "_speed", lambda self: steps / 10 * len(self.slots) ** 0.1)
    list(executor.train([Job(1, c, 0.05, 0.1) for c in range(40)], *start(of)))
    assert len(executor.slots) > 8


def test_slots_that_are_given_up_give_all_their_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    of = world(4)
    executor = Slots(of, CPU)
    list(executor.train([Job(1, c, 0.05, 0.1) for c in range(6)], *start(of)))
    replicas = [weakref.ref(slot.replica) for slot in executor.slots]
    left: list[int] = []

    def give_back(device: torch.device) -> None:
        gc.collect()
        left.append(sum(replica() is not None for replica in replicas))

    monkeypatch.setattr(executors, "give_back_memory", give_back)
    executor._share_evenly(2, more=False)
    assert len(executor.slots) == 2 and left == [2]


@dataclass(frozen=True)
class CountsItsVisits(Method):
    ends: ClassVar[list[int]] = []

    def end(self, visit: Visit) -> None:
        self.ends.append(visit.client)


def watched(executor: Slots) -> list[Any]:
    """What was measured with whole visits."""
    found, measure = [], executor._speed_of_visits

    def spy(*given: Any) -> float:
        found.append(given)
        return measure(*given)

    vars(executor)["_speed_of_visits"] = spy
    return found


def test_how_fast_slots_are_is_measured_with_whole_visits_where_these_are_short() -> None:
    of = world(None, rounds=10_000)
    executor = Slots(of, CPU)
    measured = watched(executor)
    found = two_rounds(executor, of)
    assert measured and executor._visit is None  # which would keep the first round's weights
    assert_same(found, two_rounds(Serial(of, CPU), of))
    long = world(None, rounds=10_000, local_epochs=40)
    executor = Slots(long, CPU)
    measured = watched(executor)
    list(executor.train([Job(1, c, 0.05, 0.1) for c in range(2)], *start(long)))
    assert not measured and len(executor.slots) > 0  # steps were


def test_a_method_of_ones_own_sees_no_visits_but_its_own() -> None:
    of = world(None, rounds=10_000, method=[CountsItsVisits()])
    executor = Slots(of, CPU)
    measured = watched(executor)
    two_rounds(executor, of)
    assert not measured and sorted(CountsItsVisits.ends) == sorted([*range(6)] * 2)


def test_a_measurement_that_fails_is_no_failure() -> None:
    of = world(None, rounds=10_000)
    executor = Slots(of, CPU)

    def fails(*given: Any) -> float:
        executor.slots[0].begin(given[0], given[1], given[2], None)
        raise ValueError("no")

    vars(executor)["_speed_of_visits"] = fails
    assert_same(two_rounds(executor, of), two_rounds(Serial(of, CPU), of))
