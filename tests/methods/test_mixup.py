"""Mixup, whole, against pictures mixed one by one and the loss lambda CE(y_a) + (1 - lambda) CE(y_b) in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from isofed.engine.replica import Job, Replica
from isofed.federation import Federation
from isofed.models import Output
from tests.engine.plain import Correction, Gradients, Named, distance, small
from tests.methods.written import CPU, Written, agree, same_bytes

WIDE = "mixup:gamma=1"  # shares all over [0, 1]; the default has most of them near 0 or 1
Draws = tuple[np.ndarray, np.ndarray]


def draws(run: Federation, round: int, client: int) -> Draws:
    """The shares [steps] and the partners [steps, batch] that the plan of a visit has; unused places are -1."""
    replica = Replica(run.world, CPU)
    visit = replica._arrive(Job(round, client, 0.1, 0.25), run.state.weights, {}, None)
    step = replica.local.step
    share, keys = step.plan["mixup.share"].numpy(), step.plan["mixup.keys"].numpy()
    assert share.shape == (visit.steps,) and keys.shape == (visit.steps, run.settings.batch_size)
    partners = np.full(keys.shape, -1)
    for row, size in enumerate(visit.sizes):
        partners[row, :size] = sorted(range(size), key=lambda i, row=row: keys[row, i])  # type: ignore[misc]
    return share, partners


class Mixed(Written):
    """Every batch is mixed with itself in another order."""

    kind = "ce"

    def __init__(self, run: Federation) -> None:
        super().__init__(run, self.of_pairs)
        self.run, self.own = run, [0]
        self.steps: Iterator[tuple[float, list[int]]] = iter(())
        self.share, self.partner = 0.0, [0]

    def backward(self, inputs: Tensor, labels: Tensor) -> float:
        self.share, self.partner = next(self.steps)
        pairs = zip(inputs, inputs[self.partner], strict=True)
        return super().backward(torch.stack([self.share * a + (1 - self.share) * b for a, b in pairs]), labels)

    def of_pairs(self, output: Output, inputs: Tensor, labels: Tensor) -> Tensor:
        other = [int(labels[i]) for i in self.partner]
        terms = []
        for i, (a, b) in enumerate(zip(labels.tolist(), other, strict=True)):
            terms.append(self.share * self.loss(output, i, a) + (1 - self.share) * self.loss(output, i, b))
        return torch.stack(terms).mean()

    def loss(self, output: Output, i: int, label: int) -> Tensor:
        logits = output.logits[i]
        if self.kind == "fedlc":
            there = [c for c, n in enumerate(self.own) if n]
            shifted = {c: logits[c] - 0.1 / self.own[c] ** 0.25 for c in there}
            return torch.stack(list(shifted.values())).logsumexp(0) - shifted[label]
        return logits.logsumexp(0) - logits[label]

    def local(
        self, start: Named, round: int, client: int, correct: Correction | None = None, lr: float | None = None
    ) -> tuple[Named, list[Gradients]]:
        self.own = self.counts(client)
        share, partners = draws(self.run, round, client)
        self.steps = iter([(float(s), p[p >= 0].tolist()) for s, p in zip(share, partners, strict=True)])
        return super().local(start, round, client, correct, lr)


class MixedCalibrated(Mixed):
    kind = "fedlc"


class MixedSphere(Mixed):
    """SphereFed: the squared error between the cosines with fixed rows and the mixed one-hot labels."""

    def __init__(self, run: Federation) -> None:
        super().__init__(run)
        rows = run.layout.views(run.state.weights)["head.weight"].double().clone()
        self.network.head = nn.Linear(64, len(rows), bias=False, dtype=torch.float64).requires_grad_(False)
        with torch.no_grad():
            self.network.head.weight.copy_(rows)

    def of_pairs(self, output: Output, inputs: Tensor, labels: Tensor) -> Tensor:
        terms = []
        for i, (a, j) in enumerate(zip(labels.tolist(), self.partner, strict=True)):
            z = output.features[i]
            cosines = self.network.head.weight @ (z / z.pow(2).sum().sqrt())  # type: ignore[operator]
            wanted = torch.zeros(len(cosines)).double()
            wanted[a] += self.share
            wanted[int(labels[j])] += 1 - self.share
            terms.append((cosines - wanted).pow(2).mean())
        return torch.stack(terms).mean()


@pytest.mark.parametrize(
    ("method", "settings", "kind"),
    [
        ("mixup", {"rounds": 3, "participation": 0.5}, Mixed),
        (WIDE, {"momentum": 0.9, "weight_decay": 0.01}, Mixed),
        (WIDE, {"model": "cnn", "rounds": 1}, Mixed),
        (WIDE, {"batch_size": 7, "local_epochs": 1}, Mixed),  # odd batches, and one of one sample
        (f"{WIDE}+fedlc", {"partition": "pathological:2"}, MixedCalibrated),
        (f"fedlc+{WIDE}", {"partition": "dirichlet:0.3,min=5", "rounds": 1}, MixedCalibrated),
        (f"{WIDE}+spherefed:calibrate=none", {"lr": 1.0, "model": "cnn", "rounds": 1}, MixedSphere),
        (f"{WIDE}+spherefed:calibrate=none", {"lr": 1.0}, MixedSphere),
    ],
)
def test_mixup(method: str, settings: dict[str, Any], kind: type[Mixed]) -> None:
    run = small(method=method, **settings)
    agree(run, kind(run))
    without = small(method=method.replace(WIDE, "mixup").replace("mixup", "mixup:gamma=0"), **settings)
    assert distance(run.fit().weights, without.fit().weights) > 1e-4


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_gamma_of_zero_is_fedavg_and_the_default_is_not(model: str) -> None:
    base = small(model=model)
    assert same_bytes(small(method="mixup:gamma=0", model=model), base)
    default = small(method="mixup", model=model)
    assert distance(default.fit().weights, base.fit().weights) > 1e-4
    assert same_bytes(small(method="mixup:gamma=0.1", model=model), default)


def test_what_a_step_sees() -> None:
    run = small(method=WIDE, batch_size=16)
    replica = Replica(run.world, CPU)
    visit = replica._arrive(Job(1, 0, 0.1, 0.25), run.state.weights, {}, None)
    local, step = replica.local, replica.local.step
    share, partners = draws(run, 1, 0)
    assert visit.sizes == (16, 16, 6, 16, 16, 6)  # the last of an epoch is smaller
    for number, size in enumerate(visit.sizes):
        local._prepare(size)
        local._fetch(size)
        inputs, labels = step.inputs.clone(), step.labels.clone()
        assert step.soft is None
        local.method.batch(step)
        m, partner = float(share[number]), partners[number, :size].tolist()
        assert sorted(partner) == list(range(size))
        assert torch.equal(step.labels, labels)
        assert step.soft is not None and step.soft.shape == (size, 4)
        for i, j in enumerate(partner):
            torch.testing.assert_close(step.inputs[i], m * inputs[i] + (1 - m) * inputs[j], rtol=1e-5, atol=1e-6)
            wanted = torch.zeros(4)
            wanted[labels[i]] += m
            wanted[labels[j]] += 1 - m
            torch.testing.assert_close(step.soft[i], wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(step.soft.sum(1), torch.ones(size))
        step.counter.add_(1)


def test_the_plan_comes_from_the_seed_and_the_place_alone() -> None:
    first, again, other_seed = small(method=WIDE), small(method=WIDE), small(method=WIDE, seed=1)
    share, partners = draws(first, 1, 0)
    same_share, same_partners = draws(again, 1, 0)
    assert (share == same_share).all() and (partners == same_partners).all()
    # Neither other parts of the method nor the model change them.
    with_others = draws(small(method=f"fedprox+{WIDE}+fedlc", model="cnn"), 1, 0)
    assert (with_others[0] == share).all() and (with_others[1] == partners).all()
    steps = len(share)
    for elsewhere in (draws(first, 2, 0), draws(first, 1, 1), draws(other_seed, 1, 0)):
        count = min(steps, len(elsewhere[0]))
        assert not (elsewhere[0][:count] == share[:count]).any()
        assert not (elsewhere[1][:count] == partners[:count]).all()
    assert len(set(share.tolist())) == steps  # a share of its own for each batch


@pytest.mark.parametrize("gamma", [0.1, 1.0, 4.0])
def test_shares_are_drawn_from_the_beta_distribution(gamma: float) -> None:
    run = small(method=f"mixup:gamma={gamma}", local_epochs=700, partition="iid", batch_size=25)
    share, partners = draws(run, 1, 0)
    count = len(share)
    assert count == 700 and share.min() >= 0 and share.max() <= 1
    # Mean 1/2 and variance 1 / (4 (2 gamma + 1)): within four standard errors.
    deviation = 1 / (4 * (2 * gamma + 1)) ** 0.5
    assert abs(share.mean() - 0.5) < 4 * deviation / count**0.5
    squares = (share - 0.5) ** 2
    assert abs(squares.mean() - deviation**2) < 4 * squares.std() / count**0.5
    # Partners are permutations in which every place comes up equally often.
    assert (np.sort(partners, 1) == np.arange(25)).all()
    often = np.bincount(partners[:, 0], minlength=25)
    assert often.min() > 5 and often.max() < 60  # 28 on average


def test_labels_that_another_part_has_made_soft_are_mixed_further() -> None:
    run = small(method=WIDE)
    replica = Replica(run.world, CPU)
    replica._arrive(Job(1, 0, 0.1, 0.25), run.state.weights, {}, None)
    local, step = replica.local, replica.local.step
    local._prepare(16)
    local._fetch(16)
    given = torch.rand(16, 4, generator=torch.Generator().manual_seed(0)).softmax(1)
    step.soft = given.clone()
    local.method.batch(step)
    share, partners = draws(run, 1, 0)
    m = float(share[0])
    torch.testing.assert_close(step.soft, m * given + (1 - m) * given[partners[0].tolist()], rtol=1e-5, atol=1e-6)
