"""Calibration errors by hand, and sample by sample."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from isofed.diagnostics import calibration
from isofed.errors import NotFinite
from tests.functional.tools import array


def test_by_hand() -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.45, 0.55]], dtype=torch.float64)
    found = calibration(probabilities, torch.tensor([0, 1, 1, 1]), bins=2)
    # All confidences lie in (0.5, 1]: their mean is 0.7375, and three of four are right.
    assert found.error == pytest.approx(0.0125) == found.largest
    assert found.counts.tolist() == [0, 4] and found.accuracy[1] == 0.75 and math.isnan(found.accuracy[0])
    # 2 (0.1^2 + 0.8^2 + 0.3^2 + 0.45^2) / 4
    assert found.brier == pytest.approx((0.01 + 0.64 + 0.09 + 0.2025) / 2)
    finer = calibration(probabilities, torch.tensor([0, 1, 1, 1]), bins=10)
    assert finer.counts.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 0]  # 0.7 and 0.9 are the upper ends of their bins
    assert finer.error == pytest.approx((0.45 + 0.3 + 0.8 + 0.1) / 4) and finer.largest == pytest.approx(0.8)


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_bin_by_bin_with_numpy(bins: int) -> None:
    rng = np.random.default_rng(0)
    probabilities = torch.from_numpy(rng.normal(size=(500, 5)) * 2).softmax(1)
    labels = torch.from_numpy(rng.integers(0, 5, 500))
    confidence, right = array(probabilities).max(1), array(probabilities).argmax(1) == labels.numpy()
    error = 0.0
    for low, high in zip(np.arange(bins) / bins, np.arange(1, bins + 1) / bins, strict=True):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            error += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    found = calibration(probabilities, labels, bins)
    assert found.error == pytest.approx(error, rel=1e-12)
    assert (calibration(probabilities, labels).error == found.error) == (bins == 15)  # Guo's fifteen
    assert int(found.counts.sum()) == 500
    if bins == 1:
        assert found.error == pytest.approx(abs(confidence.mean() - right.mean()))
    brier = np.mean(np.sum((array(probabilities) - np.eye(5)[labels.numpy()]) ** 2, 1))
    assert found.brier == pytest.approx(brier)


def test_probabilities_that_are_true_are_calibrated_and_sharper_ones_are_not() -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=(20000, 3)))
    labels = torch.from_numpy((array(logits.softmax(1)).cumsum(1) < rng.random((20000, 1))).sum(1))
    honest, sure = calibration(logits.softmax(1), labels), calibration((3 * logits).softmax(1), labels)
    assert honest.error < 0.015 and sure.error > 0.2
    full = sure.counts > 100
    assert bool((sure.confidence > sure.accuracy)[full].all())


def test_what_is_no_probability_is_refused() -> None:
    labels = torch.zeros(3, dtype=torch.long)
    for wrong in (torch.randn(3, 4), torch.ones(3, 4), torch.zeros(0, 4)):
        with pytest.raises(ValueError):
            calibration(wrong, labels[: len(wrong) or 3])
    with pytest.raises(ValueError, match="bin"):
        calibration(torch.full((3, 2), 0.5), labels, bins=0)
    with pytest.raises(NotFinite, match="finite probabilities"):
        calibration(torch.full((3, 2), torch.nan), labels)
