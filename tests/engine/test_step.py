"""The local step against ``torch.optim.SGD``, gradient clipping and an ordinary loop over the same batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isofed.engine import sgd
from isofed.engine.replica import Job, Outcome, Replica
from isofed.federation import Federation
from isofed.methods import Method, Step
from isofed.models import has_batch_norm
from isofed.models.slim import Cut
from tests.engine.plain import TOLERANCE, Plain, distance, small

CPU = torch.device("cpu")


def federation(**settings: Any) -> Federation:
    usual: dict[str, Any] = {
        "data": "synthetic:samples=120,test=20,classes=4",
        "partition": "quantity:2,min=20",
        "clients": 3,
        "batch_size": 16,
        "local_epochs": 2,
        "executor": "serial",
        "lr": 0.1,
        "momentum": 0.0,
    }
    return Federation(**(usual | settings))


def visit(run: Federation, client: int = 0, round: int = 1, replica: Replica | None = None) -> Outcome:
    replica = replica or Replica(run.world, CPU)
    job = Job(round, client, run.settings.lr, 1 / len(run.world.clients), keep=True)
    return replica.visit(job, run.state.weights, run.settings.method.send(run.state.server), None)


OPTIMISERS = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"weight_decay": 0.05},
    "clip": {"clip": 0.3},
    "loose clip": {"clip": 1e6},
    "momentum decay": {"momentum": 0.9, "weight_decay": 0.01},
    "everything": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.02, "clip": 0.5},
}


@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_a_visit_is_plain_sgd(model: str, optimiser: str) -> None:
    run = federation(model=model, **OPTIMISERS[optimiser])
    plain = Plain(run)
    assert has_batch_norm(plain.network) == (model == "cnn")  # so that running statistics are checked too
    wanted, gradients = plain.local(plain.start(), 1, 0)
    outcome = visit(run)
    assert outcome.steps == len(gradients) >= 4
    assert outcome.model is not None
    found = run.layout.views(outcome.model)
    assert distance(found, wanted) < TOLERANCE
    # What is sent back is the difference from what was received, and for statistics the value itself.
    sent = run.layout.views(outcome.update, run.layout.shared_trained)
    start = Plain(run).start()
    for name in plain.trained():
        torch.testing.assert_close(sent[name].double(), wanted[name] - start[name], rtol=0, atol=2e-6)
    begin = run.layout.shared_trained.stop
    statistics = run.layout.views(outcome.statistics, slice(begin, run.layout.shared.stop))
    for name, value in statistics.items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=1e-5, atol=1e-6)
    assert bool(statistics) == (model == "cnn")


class Halved(torch.autograd.Function):
    """A loss whose gradient is halved, carelessly: what comes is not to be changed in place."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.mul_(0.5)


@dataclass(frozen=True)
class Careless(Method):
    careful: bool = False

    def loss(self, step: Step) -> Tensor | None:
        size = step.logits.square().mean()
        return 0.5 * size if self.careful else Halved.apply(size)


def test_a_loss_that_changes_what_it_is_given_to_go_back_with_changes_no_other() -> None:
    """Neither that of the same step nor those of steps to come."""
    careless, careful = (visit(federation(model="mlp", method=[Careless(c), "feduv"])) for c in (False, True))
    torch.testing.assert_close(careless.update, careful.update)


def test_the_clip_really_clips_and_the_decay_really_decays() -> None:
    # Otherwise the comparisons above would compare nothing.
    models = {}
    for name in ("plain", "clip", "loose clip", "decay", "momentum", "nesterov"):
        outcome = visit(federation(model="mlp", **OPTIMISERS[name]))
        models[name] = outcome.update
    assert not torch.allclose(models["plain"], models["clip"], rtol=1e-2, atol=1e-3)
    assert torch.allclose(models["plain"], models["loose clip"])
    assert not torch.allclose(models["plain"], models["decay"], rtol=1e-2, atol=1e-3)
    assert not torch.allclose(models["momentum"], models["nesterov"], rtol=1e-2, atol=1e-3)


def test_the_local_loss_is_the_mean_over_the_samples_of_the_visit() -> None:
    run = federation(model="mlp")
    plain = Plain(run)
    plain.network.train()
    outcome = visit(run)
    total = count = 0.0
    model = plain.start()
    for inputs, labels in plain.batches(1, 0):
        plain.network.load_state_dict(model)
        loss = torch.nn.functional.cross_entropy(plain.network(inputs).logits, labels)
        total, count = total + float(loss.detach()) * len(labels), count + len(labels)
        model, _ = plain.train(model, [(inputs, labels)])
    assert outcome.loss == pytest.approx(total / count, rel=1e-6)
    assert outcome.samples == count == 2 * len(run.world.clients[0])


def test_gaps_stay_zero() -> None:
    run = federation(model="cnn", momentum=0.9, weight_decay=0.1)
    outcome = visit(run)
    assert outcome.model is not None
    used = torch.zeros(run.layout.total, dtype=torch.bool)
    for entry in run.layout.entries:
        used[entry.offset : entry.offset + entry.size] = True
    assert not used.all()
    assert (outcome.model[~used] == 0).all()


def test_a_visit_does_not_depend_on_who_came_before() -> None:
    for settings in ({"model": "cnn", "momentum": 0.9}, {"model": "mlp", "method": "scaffold"}):
        run = federation(**settings)
        alone = visit(run, client=1)
        replica = Replica(run.world, CPU)
        for client in (2, 0):
            visit(run, client, replica=replica)
        after = visit(run, client=1, replica=replica)
        assert torch.equal(alone.update, after.update)
        assert torch.equal(alone.statistics, after.statistics)
        assert alone.loss == after.loss
        assert all(torch.equal(alone.state[k], after.state[k]) for k in alone.state)


def test_batches_are_normalised_pictures_in_channels_last_order() -> None:
    run = federation(model="cnn", data="synthetic:samples=60,test=10,classes=3,channels=3,size=6")
    plain = Plain(run)
    replica = Replica(run.world, CPU)
    inputs, labels = plain.part("train")
    replica.local.set_batch(*next(replica._plain_batches("train", run.world.clients[0], 8)))
    step = replica.local.step
    index = torch.from_numpy(run.world.clients[0][:8])
    torch.testing.assert_close(step.inputs.double(), inputs[index], rtol=1e-6, atol=1e-6)
    assert step.labels.tolist() == labels[index].tolist()
    assert step.inputs.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_bf16_trains_close_to_fp32_and_keeps_float32_weights(model: str) -> None:
    exact = visit(federation(model=model))
    rough = visit(federation(model=model, precision="bf16"))
    assert rough.update.dtype == torch.float32
    assert rough.problem is None
    assert not torch.equal(exact.update, rough.update)  # it really was another precision
    # bfloat16 has 8 bits: each activation is off by up to 0.4 %, and batch norm divides by small deviations.
    off = float((exact.update - rough.update).norm() / exact.update.norm())
    assert 1e-5 < off < 0.3


@pytest.mark.parametrize("client", [0, 1, 2])
def test_every_client_trains_on_its_own_samples(client: int) -> None:
    run = federation(model="mlp", local_epochs=1)
    outcome = visit(run, client)
    assert outcome.samples == len(run.world.clients[client])
    step_labels = run.world.parts["train"].labels[torch.from_numpy(run.world.clients[client])]
    replica = Replica(run.world, CPU)
    visit(run, client, replica=replica)
    counts = [int((step_labels == c).sum()) for c in range(4)]
    assert replica.local.step.label_counts.tolist() == counts


def test_persistent_momentum_goes_on_where_it_stopped() -> None:
    run = federation(model="mlp", momentum=0.9, persistent_momentum=True)
    replica = Replica(run.world, CPU)
    first = visit(run, 0, 1, replica)
    assert first.model is not None
    visit(run, 1, 1, replica)  # somebody else in between
    second = replica.visit(Job(2, 0, 0.1, 1 / 3, keep=True), first.model, {}, first.state)
    plain = Plain(run)
    both = plain.batches(1, 0) + plain.batches(2, 0)
    wanted, _ = plain.train(plain.start(), both)  # one optimiser over both visits
    assert second.model is not None
    assert distance(run.layout.views(second.model), wanted) < TOLERANCE


STILL = """
from torch import nn
from isofed.models import adapt

class Still(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)

def build(shape, classes):
    return adapt(nn.Sequential(nn.Conv2d(shape[0], 4, 3), Still(4), nn.Flatten()), nn.Linear(144, classes))
"""


def test_a_layer_that_stays_in_eval_mode_does(tmp_path: Path) -> None:
    # As many fine-tune: a batch norm that is not to learn from small batches refuses to be put into training mode.
    (tmp_path / "still.py").write_text(STILL)
    run = federation(model=f"{tmp_path / 'still.py'}:build", rounds=2, train_loss=False)
    first = {k: v.clone() for k, v in run.layout.views(run.state.weights).items()}
    last = run.fit().weights
    assert torch.equal(last["stages.1.running_mean"], first["stages.1.running_mean"])
    assert torch.equal(last["stages.1.running_var"], first["stages.1.running_var"])
    assert not torch.equal(last["stages.1.weight"], first["stages.1.weight"])


DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [True, False])
def test_gradients_of_both_precisions_are_put_or_added(
    first: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sgd, "_LARGE", 50)  # the second and fourth
    draws = torch.Generator().manual_seed(0)
    shapes = [(3,), (10, 8), (4, 2, 3, 3), (8, 4, 3, 3), (5, 2)]
    kinds = [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, None]
    before = [torch.randn(shape, generator=draws) for shape in shapes]
    found = [None if k is None else torch.randn(s, generator=draws).to(k) for s, k in zip(shapes, kinds, strict=True)]
    places = [place.to(device, copy=True) for place in before]
    sgd.collect(places, [None if g is None else g.to(device) for g in found], first)
    for place, old, gradient in zip(places, before, found, strict=True):
        new = torch.zeros_like(old) if gradient is None else gradient.float()
        assert torch.equal(place.cpu(), new if first else old + new)


@pytest.mark.parametrize("device", DEVICES)
def test_a_slimmed_layer_that_a_pass_goes_through_often_gets_all_its_gradients(device: str) -> None:
    local = Replica(small(model="cnn", device=device).world, torch.device(device)).local
    parameters = dict(local.network.named_parameters())
    norm, weight = parameters["stages.stage3.1.bias"], parameters["head.weight"]
    part = slice(48)
    cuts = [Cut(norm, (part,), norm.detach()[part].clone().requires_grad_()) for _ in range(5)]
    cuts += [Cut(weight, (slice(None), part), weight.detach()[:, part].clone().requires_grad_()) for _ in range(2)]
    local.step.grad.zero_()
    local._fresh = False
    loss = torch.zeros((), device=device)
    for cut in cuts:
        loss = loss + cut.part.sum()
    local.add_gradient(loss, cuts)
    found = local.run.layout.named(local.step.grad)
    assert (found["stages.stage3.1.bias"][:48] == 5).all() and (found["head.weight"][:, :48] == 2).all()
    assert float(local.step.grad.sum()) == 48 * 5 + len(weight) * 48 * 2
