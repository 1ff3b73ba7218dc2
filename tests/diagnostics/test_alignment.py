"""Alignment by hand, and pair by pair."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from isofed.diagnostics import classifier_alignment
from tests.functional.tools import array, features


@pytest.mark.parametrize("clients", [2, 3, 10])
def test_the_means_are_those_over_all_pairs(clients: int) -> None:
    weights = [features(5, 7, seed) for seed in range(clients)]
    cosines, differences = [], []
    for one, two in combinations([array(w) for w in weights], 2):
        for a, b in zip(one, two, strict=True):
            cosines.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
            differences.append(abs(np.linalg.norm(a) - np.linalg.norm(b)))
    found = classifier_alignment(weights)
    assert found.cosine == pytest.approx(np.mean(cosines), rel=1e-9)
    assert found.norm_difference == pytest.approx(np.mean(differences), rel=1e-9)


def test_by_hand() -> None:
    one = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    two = torch.tensor([[4.0, 3.0], [0.0, 2.0]])  # cosines 24/25 and 0, lengths 5 and 5, 1 and 2
    found = classifier_alignment([one, two])
    assert found.cosine == pytest.approx(0.48) and found.norm_difference == pytest.approx(0.5)
    opposite = classifier_alignment([one, -one])
    assert opposite.cosine == pytest.approx(-1) and opposite.norm_difference == pytest.approx(0)


def test_equal_classifiers_are_aligned_and_rows_of_zeros_count_as_unrelated() -> None:
    weight = features(4, 6).float()
    found = classifier_alignment([weight] * 5)
    assert found.cosine == pytest.approx(1, abs=1e-12) and found.norm_difference == pytest.approx(0, abs=1e-12)
    dead = weight.clone()
    dead[0] = 0
    assert classifier_alignment([dead, weight]).cosine == pytest.approx(0.75)
    assert classifier_alignment([dead, dead]).cosine == pytest.approx(0.75)


def test_one_client_or_two_shapes_are_refused() -> None:
    for wrong in ([torch.ones(2, 2)], [torch.ones(2, 2), torch.ones(2, 3)], [torch.ones(2), torch.ones(2)]):
        with pytest.raises(ValueError, match="at least two clients"):
            classifier_alignment(wrong)
