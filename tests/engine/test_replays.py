"""Recorded work that is replayed as a CUDA graph would be gives the bits of work that is done each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from isofed.engine import slot as module
from isofed.engine import step as steps
from isofed.engine.lane import Lane
from isofed.engine.replica import one_thread
from isofed.engine.serial import Serial
from isofed.engine.slots import Slots
from isofed.methods import Method, Step
from isofed.methods.base import Draws, Visit
from tests.engine.replaying import Replaying
from tests.engine.test_slots import CPU, assert_same, two_rounds, world


@pytest.fixture(autouse=True)
def replaying(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "Lane", Replaying)
    monkeypatch.setenv("ISOFED_FUSED", "0")  # what records sees PyTorch's operations alone, and gets these
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
    few: dict[str, Any] = {"clients": 4, "data": "synthetic:samples=160,test=60,size=8", "local_epochs": 2}
    of = world(2, method=method, **few, **more)
    executor = Slots(of, CPU)
    found = two_rounds(executor, of)
    assert all(slot.graphs is not None and slot.graphs._made for slot in executor.slots)
    monkeypatch.setattr(module, "Lane", Lane)
    assert_same(found, two_rounds(Serial(of, CPU), of))


@dataclass(frozen=True)
class Inside(Method):
    """The passes are a part of a piece, where a replay does not call them."""

    host: ClassVar[tuple[str, ...]] = ("inside.kind",)

    def plan(self, visit: Visit, rng: np.random.Generator) -> Draws:
        return {"inside.kind": np.arange(visit.steps) % 2}

    def around(self, step: Step, inner: Callable[[], None]) -> None:
        kind = int(step.known("inside.kind"))

        def work() -> None:
            inner()
            step.grad.mul_(1 + kind)

        step.piece(f"inside/{kind}", work)


def test_passes_that_are_replayed_as_part_of_a_piece_have_been_made(monkeypatch: pytest.MonkeyPatch) -> None:
    of = world(1, method=[Inside()], clients=2, data="synthetic:samples=80,test=20,size=4", model="mlp")
    executor = Slots(of, CPU)
    found = two_rounds(executor, of)
    made = [key for slot in executor.slots if slot.graphs is not None for key in slot.graphs._made]
    assert any("inside/" in str(key) for key in made)
    monkeypatch.setattr(module, "Lane", Lane)
    assert_same(found, two_rounds(Serial(of, CPU), of))


@dataclass(frozen=True)
class Assigning(Method):
    """Assigns what others change in place."""

    def begin(self, visit: Visit) -> None:
        visit.lr = visit.lr / (1 + visit.client)

    def batch(self, step: Step) -> None:
        step.lr = step.lr * 0.9

    def gradient(self, step: Step) -> None:
        step.grad = step.grad + 0.1 * (step.weights - step.start)


def test_what_a_method_assigns_is_where_replays_look_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    of = world(2, method=[Assigning()], clients=4, data="synthetic:samples=160,test=20,size=4", model="mlp")
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
