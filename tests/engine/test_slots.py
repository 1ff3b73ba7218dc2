"""Slots without a GPU: who trains whom, in which order, what is replayed, and what happens when something fails.

On a processor a lane does everything at once, and a recording is the work itself; all else is the code that a GPU runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from isofed import Method
from isofed.config import settings
from isofed.engine import slot as module
from isofed.engine.lane import OutOfMemory
from isofed.engine.replica import Job, Outcome, Replica, one_thread
from isofed.engine.serial import Executor, Serial
from isofed.engine.slots import Slots
from isofed.engine.world import World
from isofed.errors import RunError
from isofed.layout import Layout, Tensors
from isofed.methods import Step, Visit

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "data": "synthetic:samples=300,test=60,size=8",
    "clients": 6,
    "partition": "dirichlet:1",
    "batch_size": 16,
    "local_epochs": 3,
    "rounds": 50,
    "augment": "crop:1+flip",
}
# Whole batches and rests of several sizes, each more than once, as above: for methods with slow steps.
FEW: dict[str, Any] = {"data": "synthetic:samples=150,test=60,size=8", "local_epochs": 2}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread(CPU):
        yield


def world(slots: int | None = None, **more: Any) -> World:
    made = World.create(settings(SMALL | more))
    # The settings refuse slots on a CPU, where they gain nothing; here they are only to be watched.
    return World(made.settings.model_copy(update={"slots": slots}), made.dataset, made.parts, made.clients)


def two_rounds(executor: Executor, of: World) -> dict[tuple[int, int], Outcome]:
    """Every client visited twice, from the same weights, with its state of the first time."""
    method, network = of.settings.method, of.network()
    layout = Layout.of(network, method.share(network))
    server = method.server_state(of.context(layout, CPU))
    weights, fractions = layout.pack(network), of.fractions()
    states: dict[int, Tensors] = {}
    found = {}
    for number in (1, 2):
        jobs = [Job(number, c, 0.05, float(fractions[c])) for c in range(len(of.clients)) if len(of.clients[c])]
        for outcome in executor.train(jobs, weights, method.send(server), states.get):
            assert isinstance(outcome, Outcome)
            assert (number, outcome.client) not in found
            found[number, outcome.client] = outcome
        states = {c: outcome.state for (n, c), outcome in found.items() if n == number}
    return found


def assert_same(a: dict[tuple[int, int], Outcome], b: dict[tuple[int, int], Outcome]) -> None:
    assert a.keys() == b.keys()
    for key, one in a.items():
        two = b[key]
        assert (one.problem, repr(one.loss), one.steps) == (two.problem, repr(two.loss), two.steps)  # a NaN is one
        assert torch.equal(one.update, two.update) and torch.equal(one.statistics, two.statistics)
        for name in ("mean", "sum", "state"):
            mine, other = getattr(one, name), getattr(two, name)
            assert mine.keys() == other.keys() and all(torch.equal(v, other[k]) for k, v in mine.items())


@pytest.mark.parametrize(
    "method",
    ["fedavg", "scaffold", "fedbn+feddecorr", "moon", "gradaug:sizes=none", "gradaug:sizes=none+fedsam", "mixup"],
)
@pytest.mark.parametrize("slots", [1, 4])
def test_side_by_side_is_the_same_as_one_after_another(method: str, slots: int) -> None:
    of = world(slots, method=method, **FEW)
    executor = Slots(of, CPU)
    assert_same(two_rounds(executor, of), two_rounds(Serial(of, CPU), of))
    assert len(executor.slots) == slots
    assert all(slot.graphs is not None for slot in executor.slots)


def test_gates_and_planned_dropout_survive_replays() -> None:
    of = world(2, method="stochdepth+gradaug:sizes=none", model="resnet8", **FEW)
    assert_same(two_rounds(Slots(of, CPU), of), two_rounds(Serial(of, CPU), of))


def test_the_longest_visits_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    of = world(2)
    began: list[int] = []
    begin = module.Slot.begin

    def watched(slot: module.Slot, job: Job, *rest: Any) -> Visit:
        began.append(job.client)
        return begin(slot, job, *rest)

    executor = Slots(of, CPU)
    list(executor.train([Job(1, c, 0.05, 0.1) for c in range(6)], *start(of)))
    monkeypatch.setattr(module.Slot, "begin", watched)
    list(executor.train([Job(2, c, 0.05, 0.1) for c in range(6)], *start(of)))
    lengths = [len(of.clients[c]) // 16 for c in began]
    assert sorted(began) == list(range(6))
    # Up to the next few, of which one may be preferred for its graphs.
    assert all(a >= b for a, b in zip(lengths, lengths[2:], strict=False))


def start(of: World) -> tuple[torch.Tensor, Tensors, Callable[[int], None]]:
    network = of.network()
    return Layout.of(network, of.settings.method.share(network)).pack(network), {}, lambda client: None


def test_only_batch_sizes_that_recur_are_captured() -> None:
    often, seldom = Slots(world(1, rounds=50), CPU), Slots(world(1, rounds=1), CPU)
    rest = {len(c) % 16 for c in often.world.clients} - {0}
    assert often._recurring(1) == rest | {16}
    assert seldom._recurring(1) == {16}
    alone = Slots(world(1, batch_size=500, rounds=50), CPU)  # every client is smaller than a batch
    assert alone._recurring(1) == {len(c) for c in alone.world.clients if len(c)}


@dataclass(frozen=True)
class Draws(Method):
    """Draws from torch's generator in a step, which a replay could not repeat."""

    def loss(self, step: Step) -> torch.Tensor | None:
        return 1e-3 * torch.rand(()) * step.logits.sum()


def test_a_step_that_draws_by_itself_runs_eagerly_and_says_so() -> None:
    notes: list[str] = []
    of = world(4, method=[Draws()])
    executor = Slots(of, CPU, notes.append)
    assert_same(two_rounds(executor, of), two_rounds(Serial(of, CPU), of))
    assert len(executor.slots) == 1 and executor.slots[0].graphs is None
    assert len(notes) == 1 and "draws random numbers by itself" in notes[0] and "runs eagerly" in notes[0]


def test_a_network_with_torchs_dropout_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_dropout(of: World) -> Any:
        network = create(of)
        network.pool = nn.Sequential(network.pool, nn.Dropout(0.3))
        return network

    create = World.network
    monkeypatch.setattr(World, "network", with_dropout)
    notes: list[str] = []
    of = world(4)
    assert_same(two_rounds(Slots(of, CPU, notes.append), of), two_rounds(Serial(of, CPU), of))
    assert "nn.Dropout" in notes[0]


@dataclass(frozen=True)
class Hungry(Method):
    """Runs out of memory in the visits of a client, as long as more than some replicas exist."""

    most: int = 1
    alive: ClassVar[list[int]] = [0]

    def begin(self, visit: Visit) -> None:
        if visit.client == 2 and self.alive[0] > self.most:
            raise OutOfMemory("CUDA out of memory")


def test_out_of_memory_lowers_the_number_of_slots_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    of = world(4, method=[Hungry(2)])
    executor = Slots(of, CPU, notes.append)
    monkeypatch.setattr(Hungry, "alive", [0])
    lower = Slots._lower

    def count(self: Slots, slot: module.Slot, job: Job) -> None:
        lower(self, slot, job)
        Hungry.alive[0] = len(self.slots)

    monkeypatch.setattr(Slots, "_lower", count)
    add = Slots._add

    def counted(self: Slots, *rest: Any) -> bool:
        more = add(self, *rest)
        Hungry.alive[0] = len(self.slots)
        return more

    monkeypatch.setattr(Slots, "_add", counted)
    found = two_rounds(executor, of)
    assert len(executor.slots) == 2 and len(notes) == 2
    assert "going on with 3 slots" in notes[0] and "2 slots" in notes[1]
    Hungry.alive[0] = 0
    assert_same(found, two_rounds(Serial(of, CPU), of))


def test_no_memory_to_judge_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries have errors of their own for that."""
    of, notes, score = world(3), list[str](), Replica.score
    executor = Slots(of, CPU, notes.append)
    two_rounds(executor, of)

    def short(replica: Replica, *rest: Any) -> Any:
        if len(executor.slots) > 2:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")
        return score(replica, *rest)

    monkeypatch.setattr(Replica, "score", short)
    weights, index = start(of)[0], np.arange(60)
    found = executor.score("test", index, weights)
    assert len(executor.slots) == 2 and notes == ["the GPU ran out of memory: going on with 2 slots"]
    assert found.loss == Serial(of, CPU).score("test", index, weights).loss
    monkeypatch.setattr(Replica, "score", lambda *rest: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        executor.score("test", index, weights)


def test_no_memory_for_a_single_client_is_an_error() -> None:
    Hungry.alive[0] = 9
    of = world(1, method=[Hungry(0)])
    with pytest.raises(RunError, match="not enough free memory to train a single client"):
        two_rounds(Slots(of, CPU), of)


@dataclass(frozen=True)
class Raises(Method):
    def begin(self, visit: Visit) -> None:
        if visit.client == 1 and visit.round == 2:
            raise ValueError("no")


def test_a_visit_that_fails_is_an_event_and_the_others_go_on() -> None:
    of = world(3, method=[Raises()])
    found = two_rounds(Slots(of, CPU), of)
    assert str(found[2, 1].problem).startswith("failed with ValueError: no (test_slots.py, line ")
    assert [key for key, outcome in found.items() if outcome.problem] == [(2, 1)]


def test_a_longer_plan_makes_new_graphs() -> None:
    of = world(1)
    executor = Slots(of, CPU)
    shortest = min(range(6), key=lambda c: len(of.clients[c]))
    executor._probes = [shortest]  # as if it had been the longest when the slots were made
    assert_same(two_rounds(executor, of), two_rounds(Serial(of, CPU), of))


def test_leaving_early_frees_the_slots() -> None:
    of = world(3)
    executor = Slots(of, CPU)
    going = executor.train([Job(1, c, 0.05, 0.1) for c in range(6)], *start(of))
    next(going)
    going.close()  # type: ignore[attr-defined]
    assert all(slot.job is None for slot in executor.slots)
    assert_same(two_rounds(executor, of), two_rounds(Serial(of, CPU), of))


@dataclass(frozen=True)
class LateDraw(Method):
    """Draws by itself for one client's batches only, which is found out when the slots are long there."""

    def plan(self, visit: Visit, rng: Any) -> dict[str, Any]:
        return {}

    def loss(self, step: Step) -> torch.Tensor | None:
        return torch.rand(()) * 1e-3 * step.logits.sum() if step.size == 7 else None


def test_a_capture_that_fails_late_loses_no_client() -> None:
    notes: list[str] = []
    made = world(3, method=[LateDraw()])
    sizes = [33, 32, 23, 16, 48, 17]
    cuts = [range(sum(sizes[:n]), sum(sizes[: n + 1])) for n in range(6)]
    of = World(made.settings, made.dataset, made.parts, [torch.tensor(list(cut)).numpy() for cut in cuts])
    assert_same(two_rounds(Slots(of, CPU, notes.append), of), two_rounds(Serial(of, CPU), of))
    assert len(notes) == 1 and "runs eagerly" in notes[0]


@dataclass(frozen=True)
class Assigns(Method):
    """Keeps what it likes by assigning it, as everybody would, aliases and other types included."""

    def client_state(self, run: Any) -> Tensors:
        return {"assigns.model": torch.zeros(run.layout.total), "assigns.seen": torch.zeros(2)}

    def loss(self, step: Step) -> torch.Tensor | None:
        return step.logits.sum() * 1e-3 * step.state["assigns.seen"].float().sum()

    def end(self, visit: Visit) -> None:
        visit.state["assigns.model"] = visit.model
        if visit.client % 2:
            visit.state["assigns.seen"] = torch.ones(2, dtype=torch.bool)


def test_a_method_may_assign_its_state() -> None:
    of = world(2, method=[Assigns()])
    slots, serial = two_rounds(Slots(of, CPU), of), two_rounds(Serial(of, CPU), of)
    assert_same(slots, serial)
    fresh = world(1)
    for client, outcome in ((c, o) for (n, c), o in two_rounds(Serial(fresh, CPU), fresh).items() if n == 1):
        # In a first visit its term counts for nothing: whoever was there before must not be seen.
        assert torch.equal(outcome.update, serial[1, client].update)


@dataclass(frozen=True)
class Before(Method):
    """Puts a gradient there before the passes."""

    def around(self, step: Step, inner: Callable[[], None]) -> None:
        step.grad.add_(step.weights, alpha=0.1)
        inner()


def test_a_gradient_from_before_the_passes_stays() -> None:
    decayed, plain = world(2, method=[Before()]), world(1, weight_decay=0.1)
    found = two_rounds(Slots(decayed, CPU), decayed)
    assert_same(found, two_rounds(Serial(decayed, CPU), decayed))
    for key, outcome in two_rounds(Serial(plain, CPU), plain).items():
        assert (outcome.update - found[key].update).norm() < 1e-5 * outcome.update.norm()


@dataclass(frozen=True)
class Still(Method):
    """Batch norm in evaluation while training, decided in ``begin``."""

    def begin(self, visit: Visit) -> None:
        assert visit.network.training
        for layer in visit.network.modules():
            if isinstance(layer, nn.BatchNorm2d) and visit.client % 2:
                layer.eval()


def test_the_mode_of_layers_does_not_depend_on_who_was_there_before() -> None:
    of = world(3, method=[Still()])
    executor = Slots(of, CPU)
    list(executor.train([Job(1, c, 0.05, 0.1) for c in range(6)], *start(of)))
    executor.score("test", torch.arange(60).numpy(), start(of)[0])
    assert_same(two_rounds(executor, of), two_rounds(Serial(of, CPU), of))


def test_the_first_client_may_have_nothing_to_try_or_fail() -> None:
    made = world(2, local_epochs=None, local_steps=3, method=[Raises()])
    clients = [torch.arange(0).numpy(), torch.arange(1).numpy(), torch.arange(40).numpy(), torch.arange(40, 90).numpy()]
    of = World(made.settings, made.dataset, made.parts, clients)
    executor = Slots(of, CPU)
    assert_same(two_rounds(executor, of), two_rounds(Serial(of, CPU), of))
    assert len(executor.slots) == 2


def test_a_captured_step_cannot_look_at_the_hosts_counter() -> None:
    step = Step()
    with pytest.raises(RuntimeError, match=r"step\.counter and step\.draw"):
        _ = step.position
    with pytest.raises(AttributeError, match="no 'colour'"):
        _ = step.colour
