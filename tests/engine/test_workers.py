"""Worker processes: who gets which task, and what becomes of those that wait behind another."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

from isofed.engine.mailbox import AHEAD, Inbox, Outbox
from isofed.engine.portable import pack
from isofed.engine.worker import Worker
from isofed.engine.workers import Pool, _Tasks
from tests.engine.own_methods import HERE
from tests.engine.plain import small


def test_an_idle_worker_always_gets_the_next_task() -> None:
    todo = _Tasks([(5, "a"), (3, "b"), (0, "c")], takers=2)
    assert [todo.take(0), todo.take(0), todo.take(0), todo.take(0)] == [(5, "a"), (3, "b"), (1, "c"), None]


def test_a_busy_worker_gets_one_only_if_nobody_will_be_idle_for_it() -> None:
    even = _Tasks([(1, n) for n in range(4)], takers=2)
    assert even.take(1) == (1, 0)  # the other one has three for the time of two
    assert even.take(1) == (1, 1)
    assert even.take(1) is None  # one is left: it is for whoever is free first
    assert even.take(0) == (1, 2)
    uneven = _Tasks([(10, "long"), *((1, n) for n in range(8))], takers=2)
    assert uneven.take(0) == (10, "long")
    assert uneven.take(10) is None  # it would wait for ten steps, when the other one is done after eight
    alone = _Tasks([(10, "long"), (1, "short")], takers=1)
    assert alone.take(0) and alone.take(10)


@pytest.mark.parametrize("takers", [2, 3, 8])
def test_no_worker_is_idle_while_a_task_waits(takers: int) -> None:
    """A run of the schedule itself, with clients of very different sizes."""
    sizes = sorted(torch.randint(1, 60, (50,), generator=torch.Generator().manual_seed(takers)).tolist())[::-1]
    todo, queues = _Tasks([(size, None) for size in sizes], takers), [list[int]() for _ in range(takers)]
    ends: list[int] = []
    for now in range(sum(sizes) + 1):
        for queue in queues:
            while len(queue) < AHEAD and (taken := todo.take(sum(queue))):
                queue.append(taken[0])
        if any(not queue for queue in queues):
            assert all(len(queue) < 2 for queue in queues)
        for queue in queues:
            if queue:
                queue[0] -= 1
                if not queue[0]:
                    queue.pop(0)
                    ends.append(now)
    assert len(ends) == len(sizes)


def test_a_letter_stays_while_the_next_is_written(tmp_path: Path) -> None:
    outbox, inbox = Outbox(tmp_path, "box", turns=2), Inbox()
    first = inbox.read(outbox.post({"x": torch.ones(3)}))["x"]
    second = inbox.read(outbox.post({"x": torch.zeros(200_000)}))["x"]
    assert first.tolist() == [1, 1, 1]
    third = inbox.read(outbox.post({"x": torch.full((100_000,), 3.0)}))["x"]
    assert not second.any() and third.eq(3).all()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_worker_keeps_nothing_of_the_run_before(tmp_path: Path) -> None:
    worker, data = Worker(tmp_path, 0), Outbox(tmp_path, "data")
    tensors, plain = pack(small().world)
    letter = data.post(tensors)
    try:
        worker.answer({"do": "set-up", "data": letter, **plain})
        before = weakref.ref(worker.replica)
        worker.answer({"do": "set-up", "data": letter, **plain})
        assert before() is None and worker.replica is not None
        assert gc.get_freeze_count() > 0  # what stays is not looked through again
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("always", [False, True])
def test_a_request_behind_one_that_kills_is_answered(always: bool, tmp_path: Path, one_worker: Pool) -> None:
    """One worker with eight clients, so that the next visit is always there already."""
    settings = {"clients": 8, "partition": "iid", "rounds": 1}
    death = f"{HERE}:Die:flag={tmp_path / 'flag'},client=3,parent={os.getpid()},always={str(always).lower()}"
    run = small(method=f"{death}+scaffold", executor="workers", pool=one_worker, **settings)
    result = run.fit()
    assert (tmp_path / "flag").exists()
    assert [event["client"] for event in result.history[0]["events"]] == ([3] if always else [])
    assert result.history[0]["clients"] == 8 - always
    calm = small(method="scaffold", **settings)
    calm.fit()
    for client in set(range(8)) - ({3} if always else set()):
        assert torch.equal(run.state.clients[client]["scaffold.ck"], calm.state.clients[client]["scaffold.ck"])
    if not always:
        assert torch.equal(run.state.weights, calm.state.weights)
