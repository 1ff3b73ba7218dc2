"""The loss around a network: against weights that were really moved, and against the Hessian."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from isofed.diagnostics import hessian_top_eigenvalues, loss_landscape
from isofed.models import create
from tests.diagnostics.test_curvature import data, flat, small
from tests.functional.tools import features


def test_a_map_is_the_loss_of_weights_that_were_moved() -> None:
    network, (x, y) = small(), data()
    start, (one, two) = flat(network), features(2, 27)
    found = loss_landscape(network, (x, y), [one, two], points=5, reach=0.5, batch_size=7)
    assert torch.equal(flat(network), start)
    np.testing.assert_allclose(found.steps, [-0.5, -0.25, 0, 0.25, 0.5])
    for i, a in enumerate(found.steps.tolist()):
        for j, b in enumerate(found.steps.tolist()):
            nn.utils.vector_to_parameters(start + a * one + b * two, network.parameters())
            assert float(found.loss[i, j]) == pytest.approx(cross_entropy(network(x), y).item(), rel=1e-12)


def test_without_further_words_it_is_the_papers_grid() -> None:
    """FedAlign's: 41 steps from -1 to 1."""
    network, sample = small(), data()
    found = loss_landscape(network, sample, [features(1, 27)[0]])
    np.testing.assert_allclose(found.steps, np.linspace(-1, 1, 41), atol=1e-12)


def test_a_curve_along_an_eigenvector_bends_as_its_eigenvalue_says() -> None:
    network, sample = small(), data()
    top = hessian_top_eigenvalues(network, sample, 2, tolerance=1e-8)
    for value, direction in zip(top.values, top.vectors, strict=True):
        below, here, above = loss_landscape(network, sample, [direction], points=3, reach=1e-3).loss
        assert float(below - 2 * here + above) / 1e-6 == pytest.approx(float(value), rel=1e-3)


def test_running_statistics_and_frozen_parts_stay() -> None:
    network = create("cnn", classes=3, shape=(1, 8, 8))
    network.head.requires_grad_(False)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    sample = torch.from_numpy(np.random.default_rng(0).normal(size=(12, 1, 8, 8))).float(), torch.arange(12) % 3
    size = sum(p.numel() for p in network.parameters() if p.requires_grad)
    told: list[tuple[int, int]] = []
    found = loss_landscape(network, sample, [torch.ones(size)], points=3, progress=lambda *n: told.append(n))
    assert network.training and told == [(1, 3), (2, 3), (3, 3)]
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    with torch.no_grad():
        plain = cross_entropy(network.eval()(sample[0]).logits, sample[1])
    assert float(found.loss[1]) == pytest.approx(float(plain), rel=1e-6)
    for wrong in ([], [torch.ones(size)] * 3, [torch.ones(size - 1)]):
        with pytest.raises(ValueError, match="one or two directions"):
            loss_landscape(network, sample, wrong)
