"""FedSAM, whole, against two ordinary passes per step in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from isofed.federation import Federation
from isofed.models import has_batch_norm
from tests.engine.plain import Correction, Gradients, Named, distance, small
from tests.methods.test_decorrelated import decorrelation, with_term
from tests.methods.written import Objective, Written, after_steps, agree, cross, same_bytes, visit


class Sharp(Written):
    """Each step's gradient is the one at w + rho g / ||g||, and everything else as it was at w."""

    def __init__(self, run: Federation, rho: float = 0.05, mu: float = 0.0, objective: Objective = cross) -> None:
        super().__init__(run, objective)
        self.rho, self.mu = rho, mu

    def backward(self, inputs: Tensor, labels: Tensor) -> float:
        net = self.network
        loss = super().backward(inputs, labels)
        after_one_pass = {n: b.clone() for n, b in net.named_buffers()}
        parameters = list(net.parameters())
        length = sum(float(p.grad.pow(2).sum()) for p in parameters if p.grad is not None) ** 0.5
        before = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p in parameters:
                if p.grad is not None:
                    p.add_(self.rho * p.grad / length)
                    p.grad = None
        super().backward(inputs, labels)
        with torch.no_grad():
            for p, value in zip(parameters, before, strict=True):
                p.copy_(value)
            for name, buffer in net.named_buffers():
                buffer.copy_(after_one_pass[name])
        return loss

    def local(
        self, start: Named, round: int, client: int, correct: Correction | None = None, lr: float | None = None
    ) -> tuple[Named, list[Gradients]]:
        def pull(weights: Named, gradients: Gradients) -> None:
            for name, gradient in gradients.items():
                gradient += self.mu * (weights[name] - start[name])

        return super().local(start, round, client, pull if self.mu else correct, lr)


@pytest.mark.parametrize(
    ("method", "settings", "known"),
    [
        ("fedsam", {"rounds": 3, "participation": 0.5}, {}),
        ("fedsam", {"model": "cnn", "local_epochs": 1, "seed": 1}, {}),
        ("fedsam:rho=0.5", {"model": "cnn", "momentum": 0.9, "weight_decay": 0.01, "rounds": 1}, {"rho": 0.5}),
        ("fedsam:rho=0.2", {"clip": 0.5, "momentum": 0.5}, {"rho": 0.2}),
        ("fedsam+fedprox:mu=2", {}, {"mu": 2}),
        ("fedprox:mu=2+fedsam:rho=0.3", {"model": "cnn", "rounds": 1, "seed": 1}, {"mu": 2, "rho": 0.3}),
    ],
)
def test_fedsam(method: str, settings: dict[str, Any], known: dict[str, Any]) -> None:
    run = small(method=method, **settings)
    agree(run, Sharp(run, **known))


def test_fedsam_with_feddecorr() -> None:
    # Both passes have the term: the ascent goes up the whole local objective.
    for method in ("fedsam+feddecorr", "feddecorr+fedsam"):
        run = small(method=method, model="cnn", rounds=1)
        agree(run, Sharp(run, objective=with_term(decorrelation, 0.1)))


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_radius_of_zero_is_fedavg_and_the_default_is_not(model: str) -> None:
    base = small(model=model, momentum=0.9)
    assert same_bytes(small(method="fedsam:rho=0", model=model, momentum=0.9), base)
    assert distance(small(method="fedsam", model=model, momentum=0.9).fit().weights, base.fit().weights) > 1e-4


@pytest.mark.parametrize("rho", [0.05, 2.0])
def test_running_statistics_are_those_of_one_pass_at_the_weights(rho: float) -> None:
    sharp, plain = after_steps(small(method=f"fedsam:rho={rho}", model="cnn")), after_steps(small(model="cnn"))
    assert has_batch_norm(sharp.local.network)
    found, wanted, initial = (
        {n: b.clone() for n, b in r.local.network.named_buffers()}
        for r in (sharp, plain, after_steps(small(model="cnn"), count=0))
    )
    assert len(found) == 6
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name
        assert not torch.equal(value, initial[name]), name
    for layer in (m for m in sharp.local.network.modules() if isinstance(m, torch.nn.BatchNorm2d)):
        assert layer.momentum == 0.1  # as it was


def test_the_recorded_loss_is_the_one_at_the_weights() -> None:
    # One step at client 2, which has eleven samples.
    settings: dict[str, Any] = {"model": "cnn", "local_epochs": 1}
    sharp, plain = visit(small(method="fedsam:rho=1", **settings), 2), visit(small(**settings), 2)
    assert sharp.steps == 1
    assert sharp.loss == plain.loss
    assert not torch.equal(sharp.update, plain.update)


def test_the_gradient_is_that_at_the_higher_place() -> None:
    run = small(method="fedsam:rho=0.7")
    replica = after_steps(run)
    plain = Written(run, cross)
    inputs, labels = plain.batches(1, 0)[0]
    names = plain.trained()
    loss = cross(plain.network(inputs), inputs, labels)
    at = dict(zip(names, torch.autograd.grad(loss, list(plain.network.parameters())), strict=True))
    length = float(torch.cat([g.flatten() for g in at.values()]).norm())
    start = plain.start()
    higher = {n: start[n] + 0.7 * at[n] / length for n in names}
    assert float(torch.cat([(higher[n] - start[n]).flatten() for n in names]).norm()) == pytest.approx(0.7)
    plain.network.load_state_dict(higher)
    loss_there = cross(plain.network(inputs), inputs, labels)
    there = dict(zip(names, torch.autograd.grad(loss_there, list(plain.network.parameters())), strict=True))
    assert float(loss_there.detach()) > float(loss.detach()) + 0.1
    found = replica.local.step.named(replica.local.step.grad)
    assert distance(found, there) < 1e-6
    assert distance(found, at) > 1e-2
    # And the weights have made one step from where they were, not from there.
    weights = replica.local.step.named(replica.local.step.weights)
    assert distance(weights, {n: start[n] - 0.1 * there[n] for n in names}) < 1e-6


def test_the_proximal_pull_is_that_of_the_weights_themselves() -> None:
    # In the first step the weights are the received ones, so there is no pull, however strong; at the higher place
    # there would be one of mu rho.
    for method in ("fedsam:rho=0.5+fedprox:mu=100", "fedprox:mu=100+fedsam:rho=0.5"):
        both, alone = after_steps(small(method=method)), after_steps(small(method="fedsam:rho=0.5"))
        assert torch.equal(both.local.step.grad, alone.local.step.grad)


def test_without_a_gradient_nothing_moves() -> None:
    # A network that is sure of the right answer has a gradient of exactly zero: no direction to go up, and no NaN.
    run = small(method="fedsam", data="synthetic:samples=40,test=8,classes=2", partition="pathological:1", clients=2)
    named = run.layout.views(run.state.weights)
    named["head.weight"].zero_()
    own = int(run.world.parts["train"].labels[int(run.world.clients[0][0])])
    named["head.bias"].copy_(torch.where(torch.arange(2) == own, 200.0, -200.0))
    outcome = visit(run, 0)
    assert outcome.loss == 0
    assert (outcome.update == 0).all()
