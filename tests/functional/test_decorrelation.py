"""FedDecorr, DeCov and DeCov in groups, entry by entry of the covariance."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from isofed.functional import decorrelation, decov, structured_decov
from tests.functional.tools import (
    HARD,
    SHAPES,
    Array,
    array,
    assert_exact_in_half,
    assert_finite,
    assert_needs_no_values,
    assert_same_under_autocast,
    assert_smooth,
    features,
    hard,
    numeric,
    value_and_gradient,
)

FORMS = ["code", "paper"]
# Around the width from which the smaller of the two products is used: 2 N for the code's form, N for the paper's.
BOTH_PATHS = [(4, 3), (4, 4), (4, 5), (4, 7), (4, 8), (4, 9), (5, 10), (5, 30)]


def columns(z: Array) -> list[list[float]]:
    """Each dimension about its mean."""
    found = []
    for j in range(z.shape[1]):
        column = [float(x) for x in z[:, j]]
        mean = math.fsum(column) / len(column)
        found.append([x - mean for x in column])
    return found


def dot(one: list[float], other: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def correlated(z: Array, form: str = "code") -> float:
    count, width = z.shape
    if count < 2 or (form == "code" and width < 2):
        return 0.0
    scaled = []
    for column in columns(z):
        deviation = math.sqrt(dot(column, column) / (count - 1) + 1e-8)
        scaled.append([x / deviation for x in column])
    if form == "paper":
        return math.fsum((dot(a, b) / count) ** 2 for a in scaled for b in scaled) / width**2
    total = math.fsum(dot(scaled[i], scaled[j]) ** 2 for i in range(width) for j in range(width) if i != j)
    return total / (width * (width - 1)) / count


def covariant(z: Array, group: int = 1) -> float:
    count, about_mean, total = len(z), columns(z), 0.0
    for i, one in enumerate(about_mean):
        for j, other in enumerate(about_mean):
            if i // group != j // group:
                total += (dot(one, other) / count) ** 2
    return total / 2


def mean_squared_correlation(z: Array) -> float:
    width = z.shape[1]
    return float((np.sum(np.corrcoef(z.T) ** 2) - width) / (width * (width - 1)))


# FedDecorr


@pytest.mark.parametrize("shape", SHAPES + BOTH_PATHS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_decorrelation_entry_by_entry(shape: tuple[int, int], form: Any) -> None:
    z = features(*shape)
    found = decorrelation(z, form=form)
    assert found.shape == () and found.item() == pytest.approx(correlated(array(z), form), rel=1e-11, abs=1e-15)
    single = decorrelation(z.float(), form).item()
    assert single == pytest.approx(correlated(array(z.float()), form), rel=1e-4, abs=1e-7)


def test_the_default_is_the_released_code() -> None:
    z = features(6, 5)
    assert decorrelation(z).item() == pytest.approx(correlated(array(z), "code"))


@pytest.mark.parametrize("shape", [(5, 3), (9, 9), (4, 12), (64, 20)], ids=str)
def test_both_forms_in_correlations(shape: tuple[int, int]) -> None:
    z = 50 * features(*shape)  # large, so that the 1e-8 under the root is nothing
    count, width = shape
    rho2 = mean_squared_correlation(array(z))
    code, paper = (decorrelation(z, form).item() for form in ("code", "paper"))
    assert code == pytest.approx((count - 1) ** 2 / count * rho2, rel=1e-9)
    assert paper == pytest.approx(((count - 1) / count) ** 2 * (1 / width + (width - 1) / width * rho2), rel=1e-9)
    # The eigenvalues of the correlations: what the paper sets out from.
    eigenvalues = np.linalg.eigvalsh(np.corrcoef(array(z).T))
    norm = paper * width**2 * (count / (count - 1)) ** 2
    assert norm - width == pytest.approx(np.sum((eigenvalues - 1) ** 2), rel=1e-8)


@pytest.mark.parametrize("shape", [(5, 3), (4, 12)], ids=str)
def test_the_forms_pull_with_a_ratio_of_the_batch(shape: tuple[int, int]) -> None:
    z = 50 * features(*shape)
    count, width = shape
    _, code = value_and_gradient(lambda x: decorrelation(x, "code"), z)
    _, paper = value_and_gradient(lambda x: decorrelation(x, "paper"), z)
    torch.testing.assert_close(code, paper * count * width / (width - 1), rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(7, 4), (5, 20)], ids=str)
def test_decorrelation_does_not_see_affine_maps(shape: tuple[int, int], form: Any) -> None:
    z = 50 * features(*shape)
    by = torch.linspace(-3, 5, shape[1], dtype=torch.float64) + 0.01
    moved = by * z + 100 * torch.arange(shape[1])
    assert decorrelation(moved, form).item() == pytest.approx(decorrelation(z, form).item(), rel=1e-6)
    mixed = z + z.roll(1, 1)  # which is no map of each dimension by itself
    assert decorrelation(mixed, form).item() != pytest.approx(decorrelation(z, form).item(), rel=1e-2)


def test_decorrelation_by_hand() -> None:
    z = torch.tensor([[1.0, 1.0, 2.0], [-1.0, 1.0, -2.0], [1.0, -1.0, 2.0], [-1.0, -1.0, -2.0]])
    # Of three correlations one is 1 and two are 0: a mean square of 1/3.
    assert decorrelation(z).item() == pytest.approx(9 / 4 / 3, rel=1e-6)
    assert decorrelation(z, "paper").item() == pytest.approx(9 / 16 * (1 / 3 + 2 / 3 / 3), rel=1e-6)
    assert decorrelation(torch.randn(2, 3) * 10).item() == pytest.approx(1 / 2, rel=1e-4)  # two points: a line
    assert decorrelation(z[:, :1]).item() == 0
    assert decorrelation(z[:, :1], "paper").item() == pytest.approx(9 / 16)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (6, 3), (5, 4), (3, 7), (2, 9)], ids=str)
def test_gradients_of_decorrelation(shape: tuple[int, int], form: Any) -> None:
    # With two samples correlations are +-1 whatever the features are: only small ones, beside 1e-8, have a gradient.
    z = features(*shape) * (1e-3 if shape[0] == 2 else 1)
    if shape[0] > 2:
        assert_smooth(partial(decorrelation, form=form), z)
    _, found = value_and_gradient(partial(decorrelation, form=form), z)
    wanted = numeric(lambda x: correlated(x, form), array(z), step=1e-7 if shape[0] == 2 else 1e-5)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert found.abs().max() > 1e-4


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("form", FORMS)
def test_decorrelation_of_hard_batches(name: str, form: Any) -> None:
    z = hard()[name]
    value = assert_finite(partial(decorrelation, form=form), z)
    assert value.item() == pytest.approx(correlated(array(z), form), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(6, 5), (4, 20)], ids=str)
def test_dead_dimensions_count_as_uncorrelated(shape: tuple[int, int], form: Any) -> None:
    z = features(*shape)
    count, width = shape
    dead = torch.cat([z, torch.zeros(count, width, dtype=torch.float64)], 1)
    value, gradient = value_and_gradient(partial(decorrelation, form=form), dead)
    entries = width * (width - 1) / (2 * width * (2 * width - 1)) if form == "code" else 1 / 4
    assert value.item() == pytest.approx(decorrelation(z, form).item() * entries, rel=1e-9)
    assert gradient[:, :width].abs().max() > 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_a_large_constant_is_no_signal(form: Any) -> None:
    z = torch.full((7, 5), 12345.678)
    assert decorrelation(z, form).item() == pytest.approx(0, abs=1e-3)


def test_the_loss_is_never_negative() -> None:
    values = []
    for seed in range(20):
        about = torch.linalg.qr(torch.cat([torch.ones(32, 1).double(), features(32, 4, seed)], 1)).Q[:, 1:]
        values.append(decorrelation(torch.cat([about, torch.zeros(32, 60)], 1).float()).item())
    assert min(values) >= 0


@pytest.mark.parametrize("form", FORMS)
def test_decorrelation_in_any_precision(form: Any) -> None:
    loss = partial(decorrelation, form=form)
    for shape in ((6, 4), (5, 30)):
        z = features(*shape)
        assert_exact_in_half(loss, partial(correlated, form=form), z)
        assert_same_under_autocast(loss, z)
        assert_needs_no_values(loss, z)
    assert_needs_no_values(loss, z[:1])


# DeCov


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decov_entry_by_entry(shape: tuple[int, int]) -> None:
    z = features(*shape)
    wanted = covariant(array(z))
    assert decov(z).shape == () and decov(z).item() == pytest.approx(wanted, rel=1e-11)
    s = np.atleast_2d(np.cov(array(z).T, bias=True))
    assert wanted == pytest.approx((np.sum(s**2) - np.sum(np.diag(s) ** 2)) / 2, rel=1e-9, abs=1e-15)
    assert decov(z.float()).item() == pytest.approx(covariant(array(z.float())), rel=1e-4)


@pytest.mark.parametrize("shape", [*SHAPES, (5, 17), (30, 16)], ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 8, 16, 1000])
def test_groups_entry_by_entry(shape: tuple[int, int], group: int) -> None:
    z = features(*shape)
    wanted = covariant(array(z), group)
    assert structured_decov(z, group=group).item() == pytest.approx(wanted, rel=1e-11)
    assert (wanted == 0) == (group >= shape[1])
    if group == 8:
        assert structured_decov(z).item() == pytest.approx(wanted, rel=1e-11)


def test_decov_by_hand() -> None:
    z = torch.tensor([[1.0, 2.0, 0.0], [-1.0, -2.0, 0.0], [0.0, 0.0, 3.0], [0.0, 0.0, -3.0]])
    assert decov(z).item() == 1.0  # one covariance of (2 + 2) / 4, on both sides of the diagonal
    assert decov(z + 7).item() == 1.0
    assert structured_decov(z, 2).item() == 0.0
    assert structured_decov(z[:, [0, 2, 1]], 2).item() == 1.0


def test_decov_vanishes_without_covariances_only() -> None:
    about = torch.linalg.qr(torch.cat([torch.ones(9, 1, dtype=torch.float64), features(9, 4)], 1)).Q[:, 1:]
    assert decov(5 * about).item() == pytest.approx(0, abs=1e-25)
    about[:, 0] += 0.1 * about[:, 1]
    assert decov(5 * about).item() == pytest.approx((0.1 * 25 / 9) ** 2)


@pytest.mark.parametrize("scale", [1e-2, 0.5, 3.0, -10.0])
def test_decov_grows_with_the_fourth_power(scale: float) -> None:
    z = features(6, 10)
    assert decov(scale * z).item() == pytest.approx(scale**4 * decov(z).item(), rel=1e-9)
    assert structured_decov(scale * z, 4).item() == pytest.approx(scale**4 * structured_decov(z, 4).item(), rel=1e-9)
    assert decov(z + 100 * scale).item() == pytest.approx(decov(z).item(), rel=1e-9)


@pytest.mark.parametrize("shape", [(2, 3), (5, 3), (3, 9)], ids=str)
def test_gradients_of_decov(shape: tuple[int, int]) -> None:
    z = features(*shape)
    for loss, group in ((decov, 1), (partial(structured_decov, group=2), 2)):
        assert_smooth(loss, z)
        _, found = value_and_gradient(loss, z)
        wanted = numeric(partial(covariant, group=group), array(z))
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("group", [1, 4])
def test_decov_of_hard_batches(name: str, group: int) -> None:
    z = hard()[name]
    loss = decov if group == 1 else partial(structured_decov, group=group)
    value = assert_finite(loss, z)
    assert value.item() == pytest.approx(covariant(array(z), group), rel=1e-4, abs=1e-20)


@pytest.mark.parametrize("group", [1, 3])
def test_decov_in_any_precision(group: int) -> None:
    loss = decov if group == 1 else partial(structured_decov, group=group)
    for shape in ((6, 4), (5, 30)):
        z = features(*shape)
        assert_exact_in_half(loss, partial(covariant, group=group), z)
        assert_same_under_autocast(loss, z)
        assert_needs_no_values(loss, z)
    assert_needs_no_values(loss, z[:1])
