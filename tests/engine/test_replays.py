"""Recorded work that is replayed as a CUDA graph would be gives the bits of work that is done each time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from isofed.engine import slot as module
from isofed.engine import step as steps
from isofed.engine.lane import Lane
from isofed.engine.replica import one_thread
from isofed.engine.serial import Serial
from isofed.engine.slots import Slots
from tests.engine.replaying import Replaying
from tests.engine.test_slots import CPU, assert_same, two_rounds, world


@pytest.fixture(autouse=True)
def replaying(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "Lane", Replaying)
    with one_thread(CPU):
        yield


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {"momentum": 0.9, "persistent_momentum": True}),
        ("scaffold:option=1+fedavgm", {"last_batch": "drop"}),
        ("feduv+fedsam", {}),
        ("moon+feddecorr", {}),
        ("fedalign+stochdepth", {"model": "resnet8"}),
        ("gradaug:sizes=none", {}),
        # Widths come twice in a step, also in the first one of a size: where its pieces must not be captured yet.
        ("gradaug:n=3,lower=0.95,sizes=none", {}),
        ("gradaug:lower=1,sizes=none+fedsam", {}),
    ],
)
@pytest.mark.parametrize("ahead", [1, 4])
def test_replays_give_the_bits_of_what_is_done(
    method: str, more: dict[str, Any], ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "steps_ahead", lambda batch, images: ahead)  # pictures that are made ready together
    of = world(2, method=method, clients=4, data="synthetic:samples=160,test=60,size=8", **more)
    executor = Slots(of, CPU)
    found = two_rounds(executor, of)
    assert all(slot.graphs is not None and slot.graphs._made for slot in executor.slots)
    monkeypatch.setattr(module, "Lane", Lane)
    assert_same(found, two_rounds(Serial(of, CPU), of))


def test_a_replay_repeats_operations_on_the_same_memory() -> None:
    a, b = torch.ones(3), torch.zeros(3)
    lane = Replaying(CPU)

    def work() -> None:
        b.add_((a * 2)[1:].sum())

    replay = lane.record(work)
    assert b.tolist() == [0, 0, 0]  # recording does nothing
    a.fill_(2)
    replay()
    assert b.tolist() == [8, 8, 8]
    a = torch.full((3,), 100.0)  # elsewhere: a graph does not see it
    replay()
    assert b.tolist() == [16, 16, 16]

    def read() -> None:
        b.fill_(float(b.sum()))

    with pytest.raises(RuntimeError, match="not permitted"):
        lane.record(read)
    assert b.tolist() == [16, 16, 16]
