"""A weight given to a loss is the loss times the weight, and so is its gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from isofed import functional as F
from isofed.functional import sums
from isofed.functional.distance import distance_like
from isofed.functional.kernels import is_one, one
from isofed.functional.sums import add_sum
from tests.functional.test_distance import DEVICES
from tests.functional.tools import Loss, features

LOSSES: dict[str, Loss] = {
    "uniformity": F.uniformity,
    "uniformity, paper": partial(F.uniformity, form="paper", detach=True),
    "energy": F.hyperspherical_energy,
    "energy, diagonal": partial(F.hyperspherical_energy, diagonal=True),
    "deviation": F.classifier_variance,
    "variance, squared": partial(F.classifier_variance, statistic="var", hinge="squared"),
    "deviation, none": partial(F.classifier_variance, hinge="none"),
    "decorrelation": F.decorrelation,
    "decorrelation, paper": partial(F.decorrelation, form="paper"),
}


@pytest.mark.parametrize("weight", [2.5, 0, -1])
@pytest.mark.parametrize("shape", [(6, 4), (4, 9), (1, 5)])
@pytest.mark.parametrize("name", LOSSES)
def test_a_weight_multiplies_the_value_and_the_gradient(name: str, shape: tuple[int, int], weight: float) -> None:
    loss, z = LOSSES[name], features(*shape).requires_grad_()
    plain, weighted = loss(z), loss(z, weight=weight)
    torch.testing.assert_close(weighted, weight * plain, rtol=1e-14, atol=0)
    found, wanted = (torch.autograd.grad(value, z)[0] for value in (weighted, weight * plain))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [6, 1])
@pytest.mark.parametrize("device", DEVICES)
def test_the_variance_goes_onto_another_loss(device: str, count: int, dtype: torch.dtype) -> None:
    z, other = features(count, 4).float().to(device).requires_grad_(), torch.tensor(3.0, dtype=dtype, device=device)
    other.requires_grad_()
    alone, both = F.classifier_variance(z, weight=2.0), F.classifier_variance(z, weight=2.0, onto=other.square())
    assert both.dtype == dtype
    torch.testing.assert_close(both, alone + other.square(), rtol=1e-6, atol=0)
    wanted = torch.autograd.grad(7 * alone, z)[0]
    found, through = torch.autograd.grad(7 * both, (z, other))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)
    assert float(through) == 42.0
    # What is not trained has no gradient, also where that of the other loss is to be differentiated.
    both = F.classifier_variance(z.detach(), onto=other.square())
    (through,) = torch.autograd.grad(both, other, create_graph=True)
    assert float(torch.autograd.grad(through, other)[0]) == 2.0


@pytest.mark.parametrize("device", DEVICES)
def test_a_backward_pass_that_begins_with_the_known_one_gives_the_same(device: str) -> None:
    start = one(torch.device(device))
    for loss in (F.classifier_variance, lambda z: distance_like(z[:, 0].contiguous(), 0 * z[:, 1], z.sum())):
        z = features(6, 4).float().to(device).requires_grad_()
        usual = torch.autograd.grad(loss(z) + loss(z), z)[0]
        assert torch.equal(torch.autograd.grad(loss(z) + loss(z), z, start)[0], usual)
        assert torch.equal(torch.autograd.grad([loss(z), loss(z)], z, [start, start])[0], usual)
        doubled = torch.autograd.grad(2 * loss(z), z, start)[0]
        torch.testing.assert_close(doubled, usual)
    assert float(start) == 1.0


def test_the_known_one_is_recognised_behind_sums_and_nothing_else_is() -> None:
    start, seen = one(torch.device("cpu")), []

    class Looking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            seen.append(is_one(g))
            return g

    x = torch.tensor(2.0, requires_grad=True)
    for total in (Looking.apply(x), Looking.apply(x) + x * x, x + (x + Looking.apply(x)), 2 * Looking.apply(x)):
        torch.autograd.grad(total, x, start)
    torch.autograd.grad(Looking.apply(x), x)  # a one of its own
    assert seen == [True, True, True, False, False]
    assert is_one(start) and not is_one(start.clone()) and not is_one(torch.ones(()))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_total_of_sums(device: str, count: int) -> None:
    total = torch.tensor(0.5, device=device)
    add_sum(total, [torch.tensor(1.0 + n, device=device) for n in range(count)], 3)
    assert float(total) == 0.5 + 3 * sum(1.0 + n for n in range(count))
    add_sum(total, [torch.tensor(1.0, device=device), torch.tensor(2.0, dtype=torch.float64, device=device)], 0.5)
    assert float(total) == 2.0 + 3 * sum(1.0 + n for n in range(count))


def test_a_term_that_is_not_on_the_gpu_is_added_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    total, *terms = (torch.tensor(n) for n in (1.0, 2.0, 3.0))
    monkeypatch.setattr(sums, "here", lambda z: z is not terms[-1])
    add_sum(total, terms, 10)
    assert float(total) == 51.0
