"""Drift and label distributions, by hand and with numpy."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch

import isofed
from isofed.diagnostics import client_drift, label_distribution
from tests.functional.tools import array, features


@pytest.mark.parametrize("weights", [None, [1.0, 5.0, 2.0, 0.0]])
def test_drift_is_numpys(weights: list[float] | None) -> None:
    updates = list(features(4, 50))
    rows = [array(u) for u in updates]
    mean = np.average(rows, axis=0, weights=weights)
    cosine = [r @ mean / np.linalg.norm(r) / np.linalg.norm(mean) for r in rows]
    pairs = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in combinations(rows, 2)]
    found = client_drift([u.view(5, 10) for u in updates], weights)
    np.testing.assert_allclose(found.norms, [np.linalg.norm(r) for r in rows], rtol=1e-12)
    np.testing.assert_allclose(found.distances, [np.linalg.norm(r - mean) for r in rows], rtol=1e-12)
    np.testing.assert_allclose(found.angles, np.degrees(np.arccos(cosine)), rtol=1e-9)
    assert found.mean_norm == pytest.approx(np.linalg.norm(mean))
    assert found.cosine == pytest.approx(np.mean(pairs))
    squares = np.average([r @ r for r in rows], weights=weights)
    assert found.diversity == pytest.approx(squares / (mean @ mean))
    # The squared lengths are those of the mean and of the distances from it.
    spread = np.average(array(found.distances) ** 2, weights=weights)
    assert squares == pytest.approx(found.mean_norm**2 + spread)


def test_drift_at_its_extremes() -> None:
    same = client_drift([torch.tensor([3.0, 4.0])] * 3)
    assert same.distances.tolist() == [0.0] * 3 and same.diversity == pytest.approx(1) == same.cosine
    assert same.angles.max() < 1e-5 and same.mean_norm == pytest.approx(5)
    apart = client_drift(list(torch.eye(16)))
    np.testing.assert_allclose(apart.angles, math.degrees(math.acos(1 / 4)))
    assert apart.diversity == pytest.approx(16) and apart.cosine == pytest.approx(0)
    against = client_drift([torch.ones(2), -torch.ones(2)])
    assert against.mean_norm == 0 and against.diversity == math.inf and against.angles.tolist() == [90.0, 90.0]
    still = client_drift([torch.zeros(2), torch.ones(2)])
    assert still.angles[0] == 90 and still.angles[1] < 1e-5 and still.cosine == pytest.approx(0)
    assert math.isnan(client_drift([torch.ones(2)]).cosine)


@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_an_update_that_is_not_finite_gives_no_number_of_what_it_is_part_of(strange: float) -> None:
    found = client_drift([torch.ones(2), torch.tensor([1.0, strange]), torch.zeros(2)])
    assert found.norms[0] == pytest.approx(math.sqrt(2)) and found.norms[2] == 0
    assert not found.norms[1].isfinite() and not found.distances.isfinite().any() and found.angles.isnan().all()
    assert not math.isfinite(found.mean_norm) and math.isnan(found.cosine) and math.isnan(found.diversity)


def test_updates_that_do_not_fit_are_refused() -> None:
    for updates in ([], [torch.ones(2), torch.ones(3)]):
        with pytest.raises(ValueError, match="at least one update"):
            client_drift(updates)
    for weights in ([1.0], [1.0, -1.0], [0.0, 0.0], [1.0, math.nan]):
        with pytest.raises(ValueError, match="weight"):
            client_drift([torch.ones(2)] * 2, weights)


def test_label_distribution_by_hand() -> None:
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 2, 2])
    found = label_distribution(
        labels, [np.array([0, 1]), np.array([2, 4, 5, 6]), np.array([3, 7]), np.array([], int)], 4
    )
    assert found.counts.tolist() == [[2, 0, 0, 0], [0, 1, 3, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
    assert found.shares[1].tolist() == [0, 0.25, 0.75, 0]
    # All together: 1/4, 1/4, 1/2, 0.
    np.testing.assert_allclose(found.distances, [0.75, 0.25, 0.25, 0])
    entropy = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    np.testing.assert_allclose(found.effective_classes, [1, math.exp(entropy), 2, 0])


def test_smaller_alpha_gives_labels_further_apart() -> None:
    distances = []
    for split in ("iid", "dirichlet:1", "dirichlet:0.05"):
        world = isofed.Federation(data="digits", partition=split, clients=5).world
        found = label_distribution(world.dataset.train.labels, world.clients, 10)
        assert int(found.counts.sum()) == world.samples
        distances.append(float(found.distances.mean()))
    assert distances[0] < 0.15 < distances[1] < 0.5 < distances[2]
