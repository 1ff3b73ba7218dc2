"""A weight given to a loss is the loss times the weight, and so is its gradient."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from isofed import functional as F
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
