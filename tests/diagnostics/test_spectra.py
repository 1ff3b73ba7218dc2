"""Spectra against numpy, and the identities that they obey."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from isofed.diagnostics import (
    classifier_spectrum,
    representation_spectrum,
    significant,
    singular_spread,
    spectrum_gap,
)
from isofed.errors import NotFinite
from isofed.functional import decorrelation
from tests.functional.tools import SHAPES, array, features


def effective_rank(values: NDArray[Any]) -> float:
    shares = [v / values.sum() for v in values if v > 0]
    return math.exp(-sum(p * math.log(p) for p in shares))


@pytest.mark.parametrize(("count", "width"), SHAPES)
def test_a_classifiers_singular_values_are_numpys(count: int, width: int) -> None:
    weight = features(count, width)
    wanted = np.linalg.svd(array(weight), compute_uv=False)
    found = classifier_spectrum(weight)
    np.testing.assert_allclose(found.values, wanted, rtol=1e-12)
    assert found.effective_rank == pytest.approx(effective_rank(wanted), rel=1e-12)
    assert found.values.dtype == torch.float64
    # Its length does not change the rank; single precision changes it by rounding.
    assert classifier_spectrum(7 * weight.float()).effective_rank == pytest.approx(found.effective_rank, rel=1e-5)


@pytest.mark.parametrize(("count", "width"), SHAPES)
def test_a_representations_spectrum_is_that_of_numpys_covariance(count: int, width: int) -> None:
    z = features(count, width) + 100
    wanted = np.linalg.svd(np.cov(array(z), rowvar=False, bias=True).reshape(width, width), compute_uv=False)
    found = representation_spectrum(z)
    assert len(found.values) == width
    np.testing.assert_allclose(found.values, wanted, rtol=1e-9, atol=1e-12 * wanted[0])
    assert found.effective_rank == pytest.approx(effective_rank(wanted), rel=1e-9)
    # Centring takes one direction from the samples.
    assert int((found.values > 0).sum()) == min(count - 1, width)


def test_degenerate_spectra_are_numbers() -> None:
    for z in (torch.zeros(5, 3), torch.full((5, 3), 0.7), torch.ones(1, 4)):
        found = representation_spectrum(z)
        assert found.effective_rank == 0.0 and not found.values.any() and singular_spread(z) == 0.0
    assert classifier_spectrum(torch.zeros(2, 3)).effective_rank == 0.0
    assert representation_spectrum(features(6, 4).half()).values.isfinite().all()
    with pytest.raises(ValueError, match="samples, width"):
        representation_spectrum(torch.zeros(3))
    with pytest.raises(ValueError, match="classes, width"):
        classifier_spectrum(torch.zeros(2, 3, 4))


def test_the_gap_is_the_mean_difference_of_logarithms() -> None:
    local, other, whole = (representation_spectrum(features(30, 6, seed)).values for seed in range(3))
    gaps = [np.mean(np.log(array(v)) - np.log(array(whole))) for v in (local, other)]
    assert spectrum_gap([local], whole) == pytest.approx(gaps[0], rel=1e-12)
    assert spectrum_gap([local, other], whole) == pytest.approx(np.mean(gaps), rel=1e-12)
    assert spectrum_gap([whole, whole], whole) == 0.0
    # Features e times as large have singular values e^2 times as large.
    scaled = representation_spectrum(math.e * features(30, 6, 2)).values
    assert spectrum_gap([scaled], whole) == pytest.approx(2.0)


def test_the_gap_floors_what_is_dead_and_refuses_what_does_not_fit() -> None:
    assert spectrum_gap([torch.tensor([1.0, 0.0])], torch.tensor([1.0, 1e-15])) == 0.0
    assert spectrum_gap([torch.tensor([1.0, 0.0])], torch.tensor([1.0, 1.0])) == pytest.approx(math.log(1e-12) / 2)
    for wrong in ([], [torch.ones(2)], torch.ones(3)):
        with pytest.raises(ValueError, match="as long as the global"):
            spectrum_gap(wrong, torch.ones(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "width"), SHAPES)
def test_the_spread_needs_no_eigenvalues(count: int, width: int) -> None:
    """The sum of the squared eigenvalues is the covariance's squared length, and their sum is its trace."""
    z = features(count, width)
    covariance = np.cov(array(z), rowvar=False, bias=True).reshape(width, width)
    wanted = np.sum(covariance**2) / width - (np.trace(covariance) / width) ** 2
    assert singular_spread(z) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_the_spread_of_standardised_features_is_what_feddecorr_makes_small() -> None:
    z = features(40, 6)
    standard = (z - z.mean(0)) / z.std(0, correction=0)
    correlations = np.corrcoef(array(z), rowvar=False)
    assert singular_spread(standard) == pytest.approx((np.sum(correlations**2) - 6) / 6, rel=1e-9)
    n, d = z.shape
    loss = float(decorrelation(z, "paper"))  # its standardisation has the divisor N - 1
    assert loss == pytest.approx((singular_spread(standard) + 1) / d * ((n - 1) / n) ** 2, rel=1e-6)


def test_significant_values_are_above_exp_of_the_threshold() -> None:
    values = torch.tensor([5.0, math.exp(-2) * 1.001, math.exp(-2) * 0.999, 0.0], dtype=torch.float64)
    assert significant(values) == 2
    assert significant(values, log_tau=1) == 1
    assert significant(values, log_tau=-3) == 3


@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_what_is_not_finite_has_no_spectrum(strange: float) -> None:
    z = features(6, 4)
    z[2, 1] = strange
    for measure in (classifier_spectrum, representation_spectrum, singular_spread):
        with pytest.raises(NotFinite, match="all finite numbers, and here some are NaN or infinite"):
            measure(z)


def test_singular_values_that_are_nan_are_not_counted_as_small_ones() -> None:
    with pytest.raises(NotFinite, match="no count of significant singular values where one of them is NaN"):
        significant(torch.tensor([1.0, math.nan]))
    assert significant(torch.tensor([1.0, math.inf])) == 2
