"""Uniformity and hyperspherical energy, pair by pair."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isofed.functional import hyperspherical_energy, uniformity
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


def squared_distances(z: Array) -> list[float]:
    found = []
    for i in range(len(z)):
        for j in range(i + 1, len(z)):
            found.append(math.fsum((float(a) - float(b)) ** 2 for a, b in zip(z[i], z[j], strict=True)))
    return found


def lower_median(squared: list[float]) -> float:
    """Of those that are not zero; of an even number the lower of the two in the middle."""
    left = sorted(s for s in squared if s > 0)
    while len(left) > 2:
        left = left[1:-1]
    return left[0] if left else 1.0


def pairwise(z: Array, form: str = "code", sigma: float | None = None) -> float:
    squared = squared_distances(z)
    if not squared:
        return 0.0
    s = lower_median(squared) if sigma is None else sigma
    return sum(math.exp(-d / (s if form == "code" else 2 * s)) for d in squared) / len(squared)


def energy(z: Array, eps: float = 1e-2, diagonal: bool = False) -> float:
    lengths = [math.sqrt(sum(float(a) ** 2 for a in row)) for row in z]
    rows = [[a / length if length > 1e-6 else 0.0 for a in row] for row, length in zip(z, lengths, strict=True)]
    total, pairs = 0.0, 0
    for i, one in enumerate(rows):
        for j, other in enumerate(rows):
            if i != j:
                cosine = sum(a * b for a, b in zip(one, other, strict=True))
                total, pairs = total + 1 / (1 - cosine + eps), pairs + 1
            elif diagonal:
                total, pairs = total + 1 / eps, pairs + 1
    return total / pairs if pairs else 0.0


def line(*places: float) -> Tensor:
    return torch.tensor(places, dtype=torch.float64)[:, None]


# Uniformity


@pytest.mark.parametrize(
    ("z", "distances", "median"),
    [
        (line(0, 2), [4], 4),
        (line(0, 1, 3), [1, 9, 4], 4),
        (line(0, 1, 3, 7), [1, 9, 49, 4, 36, 16], 9),  # six pairs: 9 and 16 are in the middle
        (line(0, 0, 1, 3), [0, 1, 9, 1, 9, 4], 4),  # the zero is no part of 1 1 4 9 9
        (line(0, 0, 0, 0, 1, 3), [0] * 6 + [1] * 4 + [9] * 4 + [4], 4),
        (line(5, 5, 5), [0, 0, 0], 1),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_uniformity_by_hand(z: Tensor, distances: list[float], median: float, form: Any) -> None:
    s = median if form == "code" else 2 * median
    wanted = sum(math.exp(-d / s) for d in distances) / len(distances)
    for detach in (False, True):
        assert uniformity(z, form, detach).item() == pytest.approx(wanted, rel=1e-14)
        assert uniformity(z.float() + 3, form, detach).item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_uniformity_over_pairs(shape: tuple[int, int], form: Any) -> None:
    z = features(*shape)
    for batch in (z, torch.cat([z, z[: (shape[0] + 1) // 2]])):  # the second with rows that come twice
        for sigma in (None, 0.75, 3.0):
            wanted = pairwise(array(batch), form, sigma)
            for detach in (False, True):
                found = uniformity(batch, form=form, detach=detach, sigma=sigma)
                assert found.shape == () and found.dtype == torch.float64
                assert found.item() == pytest.approx(wanted, rel=1e-12)
                single = batch.float()
                wanted_single = pairwise(array(single), form, sigma)
                assert uniformity(single, form, detach, sigma).item() == pytest.approx(wanted_single, rel=2e-6)


def test_sigma_is_the_number_that_was_given() -> None:
    z = features(5, 3)
    assert uniformity(z, sigma=0.7).item() == pytest.approx(pairwise(array(z), "code", 0.7), rel=1e-12)


@pytest.mark.parametrize(("form", "wanted"), [("code", math.exp(-1)), ("paper", math.exp(-0.5))])
def test_equal_distances_give_a_constant(form: Any, wanted: float) -> None:
    for width, scale in ((2, 1.0), (7, 0.1), (64, 30.0)):
        assert uniformity(scale * torch.eye(width), form).item() == pytest.approx(wanted, rel=1e-6)
    _, gradient = value_and_gradient(uniformity, torch.eye(6, dtype=torch.float64))
    assert gradient.abs().max() < 1e-15  # all pairs are the median: none may stand for the others


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("detach", [False, True])
def test_uniformity_does_not_see_scale_place_or_direction(form: Any, detach: bool) -> None:
    z = features(9, 5)
    turned = z @ torch.linalg.qr(features(5, 5, seed=1)).Q
    value = uniformity(z, form, detach).item()
    for other in (1e-3 * z, 0.5 * z, 1e3 * z, z + 100, turned, z.flip(0)):
        assert uniformity(other, form, detach).item() == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_only_a_detached_median_rewards_growth(form: Any) -> None:
    for shape in ((9, 5), (12, 40), (2, 3)):
        z = features(*shape)
        value, attached = value_and_gradient(lambda x: uniformity(x, form), z)
        same, detached = value_and_gradient(lambda x: uniformity(x, form, detach=True), z)
        assert torch.equal(value, same)
        assert abs(float((z * attached).sum())) < 1e-12  # of degree zero: no gradient along z
        centred = z - z.mean(0)
        assert float((centred * detached).sum()) < -0.05
    # At a fixed scale the value is no longer independent of that of z.
    assert uniformity(2 * z, sigma=3.0) < uniformity(z, sigma=3.0) - 0.01


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(4, 3), (5, 2), (3, 9), (7, 4)], ids=str)
def test_gradients_of_uniformity(shape: tuple[int, int], form: Any) -> None:
    z = features(*shape, seed=2)
    values = array(z)
    _, attached = value_and_gradient(lambda x: uniformity(x, form), z)
    np.testing.assert_allclose(attached, numeric(lambda x: pairwise(x, form), values), rtol=1e-6, atol=1e-9)
    fixed = lower_median(squared_distances(values))
    wanted = numeric(lambda x: pairwise(x, form, fixed), values)
    for loss in (partial(uniformity, form=form, detach=True), partial(uniformity, form=form, sigma=fixed)):
        _, detached = value_and_gradient(loss, z)
        np.testing.assert_allclose(detached, wanted, rtol=1e-6, atol=1e-9)
    assert (attached - detached).abs().max() > 1e-3
    assert_smooth(partial(uniformity, form=form), z)
    assert_smooth(partial(uniformity, form=form, sigma=1.5), z)


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("options", [{}, {"form": "paper"}, {"detach": True}, {"sigma": 2.0}], ids=str)
def test_uniformity_of_hard_batches(name: str, options: dict[str, Any]) -> None:
    z = hard()[name]
    value = assert_finite(partial(uniformity, **options), z)
    wanted = pairwise(array(z), options.get("form", "code"), options.get("sigma"))
    assert value.item() == pytest.approx(wanted, rel=1e-5, abs=1e-30)


@pytest.mark.parametrize("width", [3, 64, 512, 2048])
@pytest.mark.parametrize("offset", [0.0, 1.0, 300.0])
def test_what_rounding_leaves_of_equal_rows_is_no_distance(width: int, offset: float) -> None:
    z = (features(12, width).relu() + offset).float()
    z = torch.cat([z, z, z[:4], z[:4]])
    assert uniformity(z).item() == pytest.approx(pairwise(array(z)), rel=3e-5)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-2), (torch.float32, 3e-3), (torch.float64, 1e-6)])
def test_near_is_not_equal(dtype: torch.dtype, near: float) -> None:
    # Of 15 pairs 10 are near, and one of these is the median.
    centres = features(2, 4)[[0, 0, 0, 0, 0, 1]] * torch.tensor([[1], [1], [1], [1], [1], [3]])
    z = (centres + near * features(6, 4, seed=1)).to(dtype)
    assert lower_median(squared_distances(array(z))) < 100 * near**2
    rel = 1e-2 if dtype == torch.float32 else 1e-3
    assert uniformity(z).item() == pytest.approx(pairwise(array(z)), rel=rel)


@pytest.mark.parametrize("offset", [10.0, 1e3, 1e5])
def test_uniformity_far_from_the_origin(offset: float) -> None:
    z = (features(20, 16) + offset).float()
    assert uniformity(z).item() == pytest.approx(pairwise(array(z)), rel=1e-5)


def test_uniformity_with_one_sample_far_away() -> None:
    z = features(32, 16).float()
    z[0] = 1e6
    assert uniformity(z).item() == pytest.approx(pairwise(array(z)), rel=1e-2)


@pytest.mark.parametrize("options", [{}, {"form": "paper"}, {"detach": True}, {"sigma": 20.0}], ids=str)
def test_uniformity_in_any_precision(options: dict[str, Any]) -> None:
    loss = partial(uniformity, **options)
    for shape in ((6, 3), (6, 40)):
        z = features(*shape)
        wanted = partial(pairwise, form=options.get("form", "code"), sigma=options.get("sigma"))
        assert_exact_in_half(loss, wanted, z)
        assert_same_under_autocast(loss, z)
        assert_needs_no_values(loss, z)
    assert_needs_no_values(loss, z[:1])


# Hyperspherical energy


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("eps", [1e-3, 1e-2, 0.5])
@pytest.mark.parametrize("diagonal", [False, True])
def test_energy_over_pairs(shape: tuple[int, int], eps: float, diagonal: bool) -> None:
    z = features(*shape)
    found = hyperspherical_energy(z, eps=eps, diagonal=diagonal)
    assert found.shape == () and found.item() == pytest.approx(energy(array(z), eps, diagonal), rel=1e-9)
    if eps > 1e-3:
        wanted = energy(array(z.float()), eps, diagonal)
        assert hyperspherical_energy(z.float(), eps, diagonal).item() == pytest.approx(wanted, rel=1e-4)


def test_energy_by_hand() -> None:
    z = torch.tensor([[2.0, 0.0], [0.0, 0.1], [-3.0, 0.0]])  # cosines 0, -1, 0
    assert hyperspherical_energy(z, eps=0.5).item() == pytest.approx((2 / 1.5 + 1 / 2.5) / 3)
    assert hyperspherical_energy(z, eps=0.5, diagonal=True).item() == pytest.approx((6 + 4 / 1.5 + 2 / 2.5) / 9)
    assert hyperspherical_energy(z).item() == pytest.approx((2 / 1.01 + 1 / 2.01) / 3)  # eps is 0.01


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("eps", [1e-2, 0.1, 1.0])
def test_energy_of_orthonormal_features(count: int, eps: float) -> None:
    z = 3 * torch.eye(count, 8, dtype=torch.float64)
    apart = hyperspherical_energy(z, eps).item()
    assert apart == pytest.approx(1 / (1 + eps), rel=1e-12)
    literal = hyperspherical_energy(z, eps, diagonal=True).item()
    assert literal - apart == pytest.approx(1 / count / eps - 1 / count / (1 + eps), rel=1e-12)


def test_energy_does_not_see_lengths() -> None:
    z = features(7, 4)
    lengths = torch.logspace(-3, 3, 7, dtype=torch.float64)[:, None]
    assert hyperspherical_energy(lengths * z).item() == pytest.approx(hyperspherical_energy(z).item(), rel=1e-9)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("shape", [(2, 3), (5, 2), (3, 9)], ids=str)
def test_gradients_of_energy(shape: tuple[int, int], diagonal: bool) -> None:
    z = features(*shape)
    assert_smooth(partial(hyperspherical_energy, eps=0.1, diagonal=diagonal), z)
    # The diagonal is a constant: it only dilutes.
    _, apart = value_and_gradient(hyperspherical_energy, z)
    _, literal = value_and_gradient(partial(hyperspherical_energy, diagonal=True), z)
    torch.testing.assert_close(literal, apart * (len(z) - 1) / len(z), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("diagonal", [False, True])
def test_energy_of_hard_batches(name: str, diagonal: bool) -> None:
    z = hard()[name]
    value = assert_finite(partial(hyperspherical_energy, diagonal=diagonal), z)
    assert value.item() == pytest.approx(energy(array(z), diagonal=diagonal), rel=1e-4)


@pytest.mark.parametrize("diagonal", [False, True])
def test_energy_in_any_precision(diagonal: bool) -> None:
    loss = partial(hyperspherical_energy, diagonal=diagonal)
    for shape in ((6, 3), (6, 40)):
        z = features(*shape)
        assert_exact_in_half(loss, partial(energy, diagonal=diagonal), z)
        assert_same_under_autocast(loss, z)
        assert_needs_no_values(loss, z)
    assert_needs_no_values(loss, z[:1])
