"""The rules of a captured step, checked without a GPU.

Under ``FakeTensorMode`` tensors have shapes and no values: whatever reads a value on the host, or gives a result
whose shape depends on values, raises there as a CUDA capture would. And nothing that a graph has seen may move.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from isofed.data.base import Part
from isofed.engine.replica import Job, Replica
from isofed.engine.step import LocalStep
from isofed.engine.world import World
from isofed.methods import Method, Step, Visit, names, parse
from isofed.models import Network
from tests.engine.plain import small

CPU = torch.device("cpu")
OWN_MODEL = {"stochdepth": "resnet8"}  # methods that ask for more than every network has
NO_STATISTICS = ("clip_update", "gaussian")  # refuse batch norm; they do nothing in a step
EVERY = [n for n in names() if n not in ("scaffold", "gradaug", "trimmed", *OWN_MODEL, *NO_STATISTICS)]
METHODS = [
    *EVERY,
    "trimmed:0.25",
    "gradaug:sizes=none",
    "moon:head=none",
    "spherefed:loss=ce",
    "mixup+fedlc+feddecorr+fedsam",
    "mixup+spherefed+fedalign",
    "moon+feddecorr+scaffold",
    "feduv:detach=true,form=paper",
    "fedalign:rescale=false,clip=none",
    "scaffold:option=1",
    "scaffold:option=2",
    "fedprox+scaffold+fedbn+fedavgm",
    "fednova+fedprox:mu=0.1+fedadam",
    "feddyn+fednova+fedbn",
]


@pytest.fixture(autouse=True)
def no_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """``Module.to`` swaps fake tensors in a way that fails now and then; here all is on the CPU already."""
    monkeypatch.setattr(Network, "to", lambda self, device: self)


def take_fake_steps(world: World, sizes: tuple[int, ...] = (16, 5)) -> LocalStep:
    """Take steps of a replica that is made of fake tensors only."""
    real = Replica(world, CPU)  # for the plan and the message, which are made outside a step
    server = world.settings.method.server_state(real.run)
    sent = world.settings.method.send(server)
    visit = real._arrive(Job(1, 0, 0.1, 0.25), real.initial, sent, None)
    assert max(sizes) <= world.settings.batch_size and visit.steps >= len(sizes)
    mode = FakeTensorMode()
    parts = {
        name: Part(mode.from_tensor(part.images), mode.from_tensor(part.labels)) for name, part in world.parts.items()
    }
    with mode:
        fake = Replica(dataclasses.replace(world, parts=parts), CPU)
        fake.local.network.train()
        fake.local.step.plan.update({k: mode.from_tensor(v) for k, v in real.local.step.plan.items()})
        fake.local.step.host = real.local.step.host
        fake.local.step.sent.update({k: mode.from_tensor(v) for k, v in real.local.step.sent.items()})
        for size in sizes:
            fake.local.take(size)
            assert type(fake.local.step.weights).__name__ == "FakeTensor"
    return fake.local


@pytest.mark.parametrize(
    ("method", "model"),
    [(method, model) for method in METHODS for model in ("mlp", "cnn") if model == "cnn" or "fedbn" not in method],
)
def test_every_method_keeps_the_rules(method: str, model: str) -> None:
    local = take_fake_steps(small(method=method, model=model).world)
    assert local.step.size == 5  # the last step taken


@pytest.mark.parametrize(
    "method", ["stochdepth", "stochdepth+mixup+fedsam", "gradaug:n=3", "gradaug+stochdepth+fedalign"]
)
def test_methods_for_larger_networks_keep_the_rules(method: str) -> None:
    local = take_fake_steps(small(method=method, model="resnet8" if "stoch" in method else "cnn").world)
    assert local.step.size == 5


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "clip": 1.0},
        {"augment": "crop:1+flip"},
        {"augment": "crop:1,pad=reflect"},
        {"precision": "bf16", "model": "cnn"},
        {"norm": "group:2", "model": "cnn"},
        {"model": "pfl-cnn", "data": "synthetic:samples=100,test=20,classes=4,channels=3,size=32"},  # with dropout
        {"model": "mobilenetv2", "data": "synthetic:samples=100,test=20,classes=4,channels=3"},
    ],
    ids=str,
)
def test_every_setting_keeps_the_rules(settings: dict[str, Any]) -> None:
    local = take_fake_steps(small(**settings).world)
    assert local.step.size == 5


class Reads(Method):
    """A method that looks at a value: the very thing that a captured step cannot do."""

    def gradient(self, step: Step) -> None:
        step.grad.mul_(0.5 if step.grad.norm().item() > 1 else 1.0)


class Branches(Method):
    def loss(self, step: Step) -> Tensor | None:
        return step.logits.mean() if step.logits.mean() > 0 else None


class Selects(Method):
    def loss(self, step: Step) -> Tensor | None:
        return 0 * step.logits[step.logits > 0].sum()


class Copies(Method):
    def batch(self, step: Step) -> None:
        step.inputs = torch.from_numpy(step.inputs.numpy() * 2)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (Reads, DataDependentOutputException),
        (Branches, DataDependentOutputException),
        (Selects, (DynamicOutputShapeException, DataDependentOutputException)),  # by the version of torch
        (Copies, RuntimeError),
    ],
)
def test_a_method_that_breaks_the_rules_is_caught(bad: type[Method], error: Any) -> None:
    run = small(method=bad())
    run.fit()  # an ordinary run does not mind,
    with pytest.raises(error):  # a capture would
        take_fake_steps(run.world)


def addresses(replica: Replica) -> dict[str, int]:
    """Where everything lies that a step reads or writes."""
    local, step = replica.local, replica.local.step
    single = {k: getattr(step, k) for k in ("weights", "grad", "start", "lr", "counter", "label_counts")}
    single |= {"momentum": local.momentum, "flat": local.flat, "loss": local.loss}
    several = {"state": step.state, "sent": step.sent, "plan": step.plan, "copies": local.copies}
    single |= {f"{kind}/{k}": v for kind, tensors in several.items() for k, v in tensors.items()}
    single |= {f"parameter/{n}": p for n, p in step.network.named_parameters()}
    single |= {f"buffer/{n}": b for n, b in step.network.named_buffers()}
    single |= {f"gradient/{i}": g for i, g in enumerate(local.gradients)}
    single |= {f"pictures/{k}": getattr(local.train, k) for k in ("images", "labels", "scale", "shift")}
    return {k: v.data_ptr() for k, v in single.items()}


@pytest.mark.parametrize("settings", [{}, {"augment": "crop:1+flip", "momentum": 0.9, "persistent_momentum": True}])
@pytest.mark.parametrize(
    "method", ["fedavg", "scaffold:option=1", "scaffold", "feddyn+fedbn", "fednova+fedprox+fedadam"]
)
def test_nothing_moves_from_visit_to_visit(method: str, settings: dict[str, Any]) -> None:
    if "persistent_momentum" in settings and ("scaffold" in method or "nova" in method):
        settings = {k: v for k, v in settings.items() if k != "persistent_momentum"}
    run = small(method=method, model="cnn", **settings)
    composition, replica = run.settings.method, Replica(run.world, CPU)
    by_size = sorted(range(4), key=lambda k: -len(run.world.clients[k]))
    assert len({len(c) for c in run.world.clients}) > 1
    server = run.state.server
    states: dict[int, dict[str, Tensor]] = {}
    before: dict[str, int] = {}
    for round in (1, 2):
        for client in by_size:  # the largest first, as the executors do
            sent = composition.send(server)
            job = Job(round, client, 0.1 / round, 0.25)
            outcome = replica.visit(job, run.state.weights, sent, states.get(client))
            assert outcome.problem is None
            states[client] = outcome.state
            replica.load(run.state.weights)
            replica.score("test", np.arange(5))
            if before:
                assert addresses(replica) == before
            before = addresses(replica)
    assert {k for k in before if k.startswith(("state/", "sent/", "plan/"))} >= {"plan/order"}


def test_a_visit_hands_out_copies_of_its_buffers() -> None:
    # Otherwise the next client would overwrite the last one's answer.
    run = small(method="scaffold+fedbn", model="cnn", momentum=0.9)
    replica = Replica(run.world, CPU)
    job = Job(1, 0, 0.1, 0.25, keep=True)
    outcome = replica.visit(job, run.state.weights, run.settings.method.send(run.state.server), None)
    own = set(addresses(replica).values())
    handed = [outcome.update, outcome.statistics, outcome.model, *outcome.state.values(), *outcome.sum.values()]
    assert all(t is not None and t.data_ptr() not in own for t in handed if t is not None and t.numel())


class Aliases(Method):
    """A user's method that hands out the very buffer it was given, which is easily done."""

    def end(self, visit: Visit) -> None:
        visit.update = visit.shared(visit.weights)
        visit.sum["all"] = visit.weights


def test_even_a_careless_method_hands_out_copies() -> None:
    run = small(method=Aliases())
    replica = Replica(run.world, CPU)
    first = replica.visit(Job(1, 0, 0.1, 0.25), run.state.weights, {}, None)
    kept, summed = first.update.clone(), first.sum["all"].clone()
    replica.visit(Job(1, 1, 0.1, 0.25), run.state.weights, {}, None)
    assert torch.equal(first.update, kept)
    assert torch.equal(first.sum["all"], summed)


def test_compositions_of_the_list_are_real() -> None:
    assert all(parse(m).parts for m in METHODS)
    assert len(EVERY) >= 10
