"""Unit features, the loss on them, and classifiers whose rows are far apart."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor

from isofed.functional import orthonormal_classifier, sphere_mse, unit
from tests.functional.tools import (
    HARD,
    SHAPES,
    Array,
    array,
    arrays,
    assert_exact_in_half,
    assert_finite,
    assert_needs_no_values,
    assert_same_under_autocast,
    assert_smooth,
    features,
    hard,
    value_and_gradient,
)


def squared_error(z: Array, weight: Array, labels: Array) -> float:
    total = 0.0
    for i, row in enumerate(z):
        length = math.sqrt(math.fsum(float(x) ** 2 for x in row))
        for c, w in enumerate(weight):
            logit = math.fsum(float(a) * float(b) for a, b in zip(row, w, strict=True)) / length if length > 1e-6 else 0
            wanted = float(labels[i]) == c if labels.ndim == 1 else labels[i, c]
            total += (logit - wanted) ** 2
    return total / (len(z) * len(weight))


def labels_for(count: int, classes: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng([count, classes]).integers(0, classes, count))


def soft_for(count: int, classes: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng([count, classes]).dirichlet(np.ones(classes), count))


# Unit


def test_unit_rows() -> None:
    torch.testing.assert_close(unit(torch.tensor([[3.0, 4.0], [0.0, -2.0]])), torch.tensor([[0.6, 0.8], [0.0, -1.0]]))
    for shape in ((5,), (4, 3), (2, 3, 6)):
        z = torch.from_numpy(np.random.default_rng(0).normal(size=shape))
        for scale in (1e-4, 1.0, 1e4):
            found = unit(scale * z)
            assert found.shape == z.shape
            wanted = z.numpy() / np.sqrt(np.sum(z.numpy() ** 2, axis=-1, keepdims=True))
            np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12)
            np.testing.assert_allclose(unit((scale * z).float()).numpy(), wanted, rtol=1e-6)
    assert_smooth(unit, features(3, 4))


def test_a_row_without_a_direction_stays_zero() -> None:
    z = torch.tensor([[0.0, 0.0], [5e-7, 0.0], [2e-6, 0.0], [0.0, 1.0]])
    value, gradient = value_and_gradient(lambda x: unit(x)[:, 0] + unit(x)[:, 1], z)
    assert torch.equal(value, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert torch.equal(gradient[:2], torch.zeros(2, 2))
    torch.testing.assert_close(gradient[2:], torch.tensor([[0.0, 5e5], [1.0, 0.0]]))


@pytest.mark.parametrize("size", [1e-4, 300.0])
def test_unit_rows_in_float16(size: float) -> None:
    z = torch.tensor([[3.0, 4.0]]) * size / 5
    torch.testing.assert_close(unit(z.half()).float(), torch.tensor([[0.6, 0.8]]), rtol=2e-2, atol=0)


# The loss


@pytest.mark.parametrize("shape", [(1, 4), *SHAPES], ids=str)
@pytest.mark.parametrize("classes", [2, 5])
def test_entry_by_entry(shape: tuple[int, int], classes: int) -> None:
    z, weight = features(*shape), features(classes, shape[1], seed=1)
    for labels in (labels_for(shape[0], classes), soft_for(shape[0], classes)):
        found = sphere_mse(z, weight, labels)
        assert found.shape == () and found.item() == pytest.approx(squared_error(*arrays(z, weight, labels)), rel=1e-11)
        single = sphere_mse(z.float(), weight.float(), labels)
        assert single.dtype == torch.float32 and single.item() == pytest.approx(found.item(), rel=1e-5)


def test_by_hand() -> None:
    z, weight = torch.tensor([[2.0, 0.0], [0.0, 5.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.5], [0.0, 0.0]])
    assert sphere_mse(z, weight, torch.tensor([0, 1])).item() == pytest.approx(0.25 / 6)
    assert sphere_mse(z, weight, torch.tensor([1, 2])).item() == pytest.approx((1 + 1 + 0.25 + 1) / 6)
    half = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]])
    assert sphere_mse(z, weight, half).item() == pytest.approx((0.25 + 0.25 + 0.25) / 6)


def test_hard_and_soft_labels_agree() -> None:
    z, weight, labels = features(7, 6), features(4, 6, seed=1), labels_for(7, 4)
    soft = torch.eye(4, dtype=torch.float64)[labels]
    assert sphere_mse(z, weight, soft).item() == sphere_mse(z, weight, labels).item()
    assert sphere_mse(z, weight, soft.float()).item() == sphere_mse(z, weight, labels).item()


def test_lengths_are_not_seen_and_logits_are_at_most_one() -> None:
    weight = orthonormal_classifier(4, 9, torch.Generator().manual_seed(0)).double()
    z, labels = features(7, 9), labels_for(7, 4)
    by = torch.logspace(-3, 3, 7, dtype=torch.float64)[:, None]
    assert sphere_mse(by * z, weight, labels).item() == pytest.approx(sphere_mse(z, weight, labels).item(), rel=1e-12)
    for batch in (z, weight, weight.sum(0, keepdim=True)):
        logits = unit(batch) @ weight.T
        assert logits.abs().max() <= 1 + 1e-6 and (logits.square().sum(1) <= 1 + 1e-6).all()
    assert sphere_mse(3 * weight, weight, torch.arange(4)).item() < 1e-12  # features that are the rows: all is said


@pytest.mark.parametrize("shape", [(1, 3), (4, 3), (3, 12)], ids=str)
def test_gradients(shape: tuple[int, int]) -> None:
    z, weight = features(*shape), features(4, shape[1], seed=1)
    assert_smooth(sphere_mse, z, weight, labels_for(shape[0], 4))
    assert_smooth(sphere_mse, z, weight, soft_for(shape[0], 4))


@pytest.mark.parametrize("name", HARD)
def test_hard_batches(name: str) -> None:
    z = hard()[name]
    weight = features(3, z.shape[1], seed=1).float()
    for labels in (labels_for(len(z), 3), torch.zeros(len(z), dtype=torch.int64), soft_for(len(z), 3).float()):
        value = assert_finite(sphere_mse, z, weight, labels)
        assert value.item() == pytest.approx(squared_error(*arrays(z, weight, labels)), rel=1e-4)
    assert_finite(lambda w: sphere_mse(z, w, labels), weight)


def test_any_precision() -> None:
    for shape in ((1, 3), (6, 4), (5, 30)):
        z, weight = features(*shape), features(4, shape[1], seed=1)
        for labels in (labels_for(shape[0], 4), soft_for(shape[0], 4)):
            assert_exact_in_half(sphere_mse, squared_error, z, weight, labels)
            assert_same_under_autocast(sphere_mse, z, weight, labels)
            assert_needs_no_values(sphere_mse, z, weight, labels)


# The classifier


def seeded(classes: int, width: int, seed: int = 0) -> Tensor:
    weight = orthonormal_classifier(classes, width, torch.Generator().manual_seed(seed))
    assert weight.shape == (classes, width) and weight.dtype == torch.float32 and weight.is_contiguous()
    assert not weight.requires_grad
    for row in array(weight):
        assert math.sqrt(math.fsum(float(x) ** 2 for x in row)) == pytest.approx(1, abs=1e-6)
    return weight.double()


def cosines(weight: Tensor) -> list[float]:
    rows = array(weight)
    return [math.fsum(float(a) * float(b) for a, b in zip(x, y, strict=True)) for x, y in combinations(rows, 2)]


@pytest.mark.parametrize(("classes", "width"), [(1, 1), (1, 5), (2, 2), (3, 3), (3, 8), (10, 10), (10, 64), (100, 128)])
def test_rows_are_orthonormal(classes: int, width: int) -> None:
    weight = seeded(classes, width)
    torch.testing.assert_close(weight @ weight.T, torch.eye(classes, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 3, 9, 40])
def test_one_class_more_gives_a_simplex(width: int) -> None:
    assert cosines(seeded(width + 1, width)) == pytest.approx([-1 / width] * (width * (width + 1) // 2), abs=1e-6)


def test_a_simplex_does_not_depend_on_threads() -> None:
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            found.append(seeded(257, 256))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize(("classes", "width"), [(4, 2), (5, 3), (6, 3), (12, 10), (20, 10), (19, 10)])
def test_up_to_two_classes_a_dimension_none_is_near(classes: int, width: int) -> None:
    found = cosines(seeded(classes, width))
    assert max(found) == pytest.approx(0, abs=1e-6)
    assert sum(c < -0.999999 for c in found) == classes - width  # axes in both directions
    assert all(abs(c) < 1e-6 or c < -0.999999 for c in found)


@pytest.mark.parametrize("classes", [5, 6, 7, 8, 11, 16, 25])
@pytest.mark.parametrize("seed", [0, 1])
def test_on_a_circle_rows_are_equally_spaced(classes: int, seed: int) -> None:
    angle = math.acos(max(cosines(seeded(classes, 2, seed))))
    assert 0.97 * 2 * math.pi / classes < angle <= 2 * math.pi / classes + 1e-6


# The largest angle that so many points on a sphere can keep (Tammes), in degrees, and in four dimensions the 24-cell.
@pytest.mark.parametrize(
    ("classes", "width", "degrees"),
    [
        (7, 3, 77.8695),
        (8, 3, 74.8585),
        (9, 3, 70.5288),
        (10, 3, 66.1468),
        (12, 3, 63.4349),
        (24, 3, 43.6908),
        (24, 4, 60),
    ],
)
def test_beyond_that_rows_are_near_the_best_known(classes: int, width: int, degrees: float) -> None:
    found = math.degrees(math.acos(max(cosines(seeded(classes, width)))))
    assert 0.96 * degrees < found < degrees + 1e-3
    if (classes, width) == (12, 3):
        assert max(cosines(seeded(12, 3))) == pytest.approx(1 / math.sqrt(5), rel=0.03)


@pytest.mark.parametrize(("classes", "width"), [(30, 3), (40, 8), (100, 10), (70, 32)])
def test_searched_rows_are_further_apart_than_random_ones(classes: int, width: int) -> None:
    random = [
        max(cosines(unit(torch.randn(classes, width, generator=torch.Generator().manual_seed(s))))) for s in range(5)
    ]
    assert math.acos(max(cosines(seeded(classes, width)))) > 1.3 * math.acos(min(random))


@pytest.mark.parametrize(("classes", "width"), [(3, 8), (8, 8), (9, 8), (12, 8), (20, 8)])
def test_the_generator_decides(classes: int, width: int) -> None:
    one, same, other = seeded(classes, width), seeded(classes, width), seeded(classes, width, seed=1)
    assert torch.equal(one, same)
    assert (one - other).abs().max() > 0.1
    state = torch.get_rng_state()
    seeded(classes, width)
    assert torch.equal(torch.get_rng_state(), state)  # torch's own stream is not touched,
    with torch.random.fork_rng():
        torch.manual_seed(5)
        first, second = orthonormal_classifier(classes, width), orthonormal_classifier(classes, width)
        torch.manual_seed(5)
        assert torch.equal(first, orthonormal_classifier(classes, width))  # unless it is to be used
    assert (first - second).abs().max() > 0.1


@pytest.mark.parametrize(("classes", "width"), [(2, 3), (3, 3), (4, 3), (6, 3)])
def test_directions_are_random(classes: int, width: int) -> None:
    # Over many draws each entry is as often positive as negative, and every direction as long as the others.
    draws = torch.stack([seeded(classes, width, seed) for seed in range(300)])
    bound = 4 / math.sqrt(len(draws))
    assert draws.mean(0).abs().max() < bound
    assert (draws.square().mean(0) - 1 / width).abs().max() < bound


@pytest.mark.parametrize(("classes", "width"), [(0, 3), (3, 0), (-1, 2)])
def test_no_class_or_no_feature_is_refused(classes: int, width: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        orthonormal_classifier(classes, width)
