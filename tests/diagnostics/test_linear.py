"""FedDecorr's Theorem 1: the speeds against a real step, and the collapse itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from isofed.diagnostics import linear_collapse, singular_speeds
from tests.functional.tools import features


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_speeds_are_those_of_a_small_gradient_step(depth: int) -> None:
    width, classes = 6, 4
    bases = [torch.linalg.qr(features(width, width, seed)).Q for seed in range(depth + 1)]
    scale = torch.diag(torch.linspace(1.2, 0.4, width, dtype=torch.float64))
    weights = [(bases[n + 1] @ scale @ bases[n].T).requires_grad_() for n in range(depth)]
    for one, two in itertools.pairwise(weights):
        torch.testing.assert_close(one @ one.T, two.T @ two)  # balanced
    head, x = features(classes, width, 9), features(40, width, 10)
    y = torch.arange(40) % 2  # two classes of four

    def product() -> torch.Tensor:
        return weights[0] if depth == 1 else torch.linalg.multi_dot(weights[::-1])

    logits = x @ product().T @ head.T
    before, step = torch.linalg.svdvals(product()).detach(), 1e-7
    gradients = torch.autograd.grad(cross_entropy(logits, y), weights)
    pull = (one_hot(y, classes) - logits.softmax(1)).T.detach() @ x / 40
    speeds = singular_speeds([w.detach() for w in weights], head, pull)
    with torch.no_grad():
        for w, g in zip(weights, gradients, strict=True):
            w -= step * g
        moved = (torch.linalg.svdvals(product()) - before) / step
    np.testing.assert_allclose(speeds, moved, rtol=1e-4, atol=1e-5)


def test_skewed_labels_collapse_the_gradient_and_then_the_weights() -> None:
    ranks = []
    for present in (10, 5, 2, 1):
        found = linear_collapse([1] * present + [0] * (10 - present))
        ranks.append((found.gradient.effective_rank, found.product.effective_rank))
        assert found.history.shape == (301, 32) and found.loss < 0.01
        torch.testing.assert_close(found.history[-1], found.product.values)
        # Every network starts from the same weights, which use all directions alike.
        torch.testing.assert_close(found.history[0], torch.linspace(0.21, 0.2, 32, dtype=torch.float64) ** 3)
        # As many values grow as G has large ones.
        large = int((found.gradient.values > 0.1 * found.gradient.values[0]).sum())
        assert large == min(present, 9) == int((found.product.values > 2 * found.history[0, 0]).sum())
    for more, fewer in itertools.pairwise(ranks):
        assert more[0] > 1.2 * fewer[0] and more[1] > 1.2 * fewer[1]


def test_shares_need_not_sum_to_one_and_impossible_ones_are_refused() -> None:
    one, two = linear_collapse([3, 1, 0], steps=5), linear_collapse([0.75, 0.25, 0], steps=5)
    assert torch.equal(one.product.values, two.product.values) and one.loss == two.loss
    for wrong in ([1.0], [0.0, 0.0], [1.0, -1.0], [1.0] * 33):
        with pytest.raises(ValueError, match="shares"):
            linear_collapse(wrong)
