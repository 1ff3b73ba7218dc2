"""FedAlign's transmitting matrix, place by place, and its spectral norm against a decomposition."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from isofed.functional import spectral_norm, stage_norm, transmitting_matrix
from isofed.functional.lipschitz import two_stage_norms
from tests.functional.tools import (
    Array,
    array,
    arrays,
    assert_exact_in_half,
    assert_finite,
    assert_needs_no_values,
    assert_same_under_autocast,
    assert_smooth,
    value_and_gradient,
)

# Shapes before and after a stage.
PAIRS = [
    ((2, 3, 4, 4), (2, 5, 4, 4)),
    ((2, 3, 8, 8), (2, 5, 4, 4)),
    ((2, 3, 4, 4), (2, 2, 8, 8)),
    ((1, 2, 5, 7), (1, 3, 3, 2)),  # places that do not divide
    ((2, 3, 6, 2), (2, 4, 3, 4)),  # each larger in another direction
    ((3, 4, 2, 2), (3, 5)),
    ((3, 4), (3, 5)),
    ((1, 1, 1, 1), (1, 1, 1, 1)),
]


def maps(shape: tuple[int, ...], seed: int = 0, signed: bool = False) -> Tensor:
    values = np.random.default_rng([seed, *shape]).normal(size=shape)
    return torch.from_numpy(values if signed else np.maximum(values, 0) + 0.01)


def pooled(m: Array, height: int, width: int) -> Array:
    """One channel, averaged over windows as adaptive pooling defines them."""
    found = np.zeros((height, width))
    for i in range(height):
        for j in range(width):
            top, bottom = i * m.shape[0] // height, math.ceil((i + 1) * m.shape[0] / height)
            left, right = j * m.shape[1] // width, math.ceil((j + 1) * m.shape[1] / width)
            window = [m[y, x] for y in range(top, bottom) for x in range(left, right)]
            found[i, j] = sum(window) / len(window)
    return found


def transmitted(a: Array, b: Array) -> Array:
    a, b = (m.reshape(*m.shape, 1, 1) if m.ndim == 2 else m for m in (a, b))
    height, width = min(a.shape[2], b.shape[2]), min(a.shape[3], b.shape[3])
    found = np.zeros((len(a), a.shape[1], b.shape[1]))
    for n, i, j in np.ndindex(*found.shape):
        one, other = pooled(a[n, i], height, width), pooled(b[n, j], height, width)
        found[n, i, j] = sum(one[p] * other[p] for p in np.ndindex(height, width)) / (height * width)
    return found


def iterated(t: Array, iterations: int = 10) -> Array:
    """The square root of how much the last product with t t' stretches."""
    found = []
    for matrix in t:
        gram = matrix @ matrix.T
        v = np.ones(len(gram))
        for _ in range(iterations):
            before = math.sqrt(sum(v**2))
            v = gram @ (v / before)
        found.append(math.sqrt(math.sqrt(sum(v**2))))
    return np.array(found)


def stretch(a: Tensor, b: Tensor, iterations: int = 10) -> Tensor:
    return spectral_norm(transmitting_matrix(a, b), iterations)


# The matrix


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=str)
def test_matrix_place_by_place(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    a, b = maps(before, signed=True), maps(after, 1, signed=True)
    found = transmitting_matrix(a, b)
    assert found.shape == (before[0], before[1], after[1])
    np.testing.assert_allclose(found.numpy(), transmitted(*arrays(a, b)), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(transmitting_matrix(b, a).numpy(), found.transpose(1, 2).numpy(), rtol=1e-12, atol=1e-14)
    single = transmitting_matrix(a.float(), b.float())
    np.testing.assert_allclose(single.numpy(), transmitted(*arrays(a.float(), b.float())), rtol=1e-5, atol=1e-6)


def test_matrix_by_hand() -> None:
    a = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    assert transmitting_matrix(a, a).item() == (1 + 4 + 9 + 16) / 4
    assert transmitting_matrix(a, torch.tensor([[[[10.0]], [[1.0]]]])).tolist() == [[[25.0, 2.5]]]
    assert transmitting_matrix(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])).tolist() == [[[3.0], [6.0]]]


# The norm


@pytest.mark.parametrize("iterations", [1, 2, 3, 10, 30])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 5), (3, 5, 2), (2, 8, 8)], ids=str)
def test_norm_iteration_by_iteration(iterations: int, shape: tuple[int, ...]) -> None:
    t = maps(shape, signed=True)
    found = spectral_norm(t, iterations)
    assert found.shape == shape[:1]
    np.testing.assert_allclose(found.numpy(), iterated(array(t), iterations), rtol=1e-9)
    assert (found <= torch.linalg.svdvals(t)[:, 0] * (1 + 1e-9)).all()
    if iterations == 10:
        np.testing.assert_allclose(spectral_norm(t).numpy(), found.numpy(), rtol=0)  # the default


def test_norm_by_hand() -> None:
    t = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))[None]
    # From (1, 1): t t' is diag(9, 1).
    assert spectral_norm(t, 1).item() == pytest.approx((82 / 2) ** 0.25)
    assert spectral_norm(t, 2).item() == pytest.approx(((81**2 + 1) / 82) ** 0.25)
    assert spectral_norm(t, 50).item() == pytest.approx(3)
    assert spectral_norm(torch.full((1, 4, 9), -2.0)).item() == pytest.approx(12)
    assert spectral_norm(5 * t, 1).item() == pytest.approx(5 * (82 / 2) ** 0.25)


@pytest.mark.parametrize(("before", "after"), [*PAIRS, ((2, 32, 8, 8), (2, 64, 4, 4)), ((2, 64), (2, 16))], ids=str)
@pytest.mark.parametrize("alive", [1.0, 0.5, 0.1])
def test_ten_iterations_are_within_a_percent(before: tuple[int, ...], after: tuple[int, ...], alive: float) -> None:
    """On features that are not negative, of which some or most are zero."""
    a, b = maps(before, 3), maps(after, 4)
    a, b = (m * (torch.rand(m.shape, generator=torch.Generator().manual_seed(0)) < alive) for m in (a, b))
    t = transmitting_matrix(a, b)
    wanted = np.linalg.svd(transmitted(*arrays(a, b)), compute_uv=False)[:, 0]
    np.testing.assert_allclose(spectral_norm(t).numpy(), wanted, rtol=0.01, atol=1e-12)
    np.testing.assert_allclose(spectral_norm(t.float()).numpy(), wanted, rtol=0.01, atol=1e-7)


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 3, 2, 2), (2, 4, 2, 2)), ((1, 2, 4, 4), (1, 3, 2, 2)), ((1, 2, 3, 2), (1, 2, 2, 1)), ((2, 3), (2, 2))],
    ids=str,
)
@pytest.mark.parametrize("iterations", [1, 10])
def test_gradients(before: tuple[int, ...], after: tuple[int, ...], iterations: int) -> None:
    assert_smooth(partial(stretch, iterations=iterations), maps(before), maps(after, 1))
    assert_smooth(transmitting_matrix, maps(before, signed=True), maps(after, 1, signed=True))


def test_the_gradient_is_that_of_the_largest_singular_value() -> None:
    t = maps((3, 4, 6))
    _, found = value_and_gradient(partial(spectral_norm, iterations=40), t)
    for matrix, gradient in zip(*arrays(t, found), strict=True):
        u, _, v = np.linalg.svd(matrix)
        np.testing.assert_allclose(gradient, np.outer(u[:, 0], v[0]), rtol=1e-6, atol=1e-9)
    # After few iterations it is that of what these few compute: it goes through all of them.
    assert_smooth(partial(spectral_norm, iterations=3), maps((2, 3, 2), signed=True))


@pytest.mark.parametrize("t", [torch.zeros(2, 3, 4), torch.tensor([[[1.0], [-1.0]]])], ids=["zero", "ones to nothing"])
@pytest.mark.parametrize("iterations", [1, 10])
def test_ones_that_go_to_nothing(t: Tensor, iterations: int) -> None:
    value, gradient = value_and_gradient(partial(spectral_norm, iterations=iterations), t)
    assert torch.equal(value, torch.zeros(len(t))) and torch.equal(gradient, torch.zeros_like(t))
    # One such sample does not spoil the others.
    beside = torch.cat([t, torch.ones_like(t)])
    value, gradient = value_and_gradient(partial(spectral_norm, iterations=iterations), beside)
    assert value[len(t) :].tolist() == pytest.approx([math.sqrt(t.shape[1] * t.shape[2])] * len(t))
    assert gradient.isfinite().all() and gradient[len(t) :].abs().min() > 0.1


HARD = {
    "usual": (maps((4, 6, 4, 4)), maps((4, 8, 2, 2), 1)),
    "one sample": (maps((1, 6, 4, 4)), maps((1, 8, 2, 2), 1)),
    "constant": (torch.full((2, 6, 4, 4), 0.7), torch.full((2, 8, 2, 2), 1.3)),
    "zero": (torch.zeros(2, 6, 4, 4), torch.zeros(2, 8, 2, 2)),
    "zero after": (maps((2, 6, 4, 4)), torch.zeros(2, 8, 2, 2)),
    "dead channels": (maps((2, 6, 4, 4)) * torch.eye(6)[0][:, None, None], maps((2, 8, 2, 2), 1)),
    "large": (1e3 * maps((2, 6, 4, 4)), 1e3 * maps((2, 8, 2, 2), 1)),
    "huge": (1e4 * maps((2, 6, 4, 4)), 1e4 * maps((2, 8, 2, 2), 1)),
    "tiny": (1e-4 * maps((2, 6, 4, 4)), 1e-4 * maps((2, 8, 2, 2), 1)),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_batches(name: str) -> None:
    a, b = (m.float() for m in HARD[name])
    for one, other in ((a, b), (b, a)):
        value = assert_finite(stretch, one, other)
        wanted = np.linalg.svd(transmitted(*arrays(one, other)), compute_uv=False)[:, 0]
        np.testing.assert_allclose(value.numpy(), wanted, rtol=0.01, atol=1e-30)


@pytest.mark.parametrize("sizes", [(1e-15,) * 3, (1e15,) * 3, (-1e15,) * 3, (1e-15, -1.0, 1e15)], ids=str)
def test_matrices_of_any_size(sizes: tuple[float, ...]) -> None:
    t, by = maps((3, 6, 9)).float(), torch.tensor(sizes)
    value, gradient = value_and_gradient(spectral_norm, by[:, None, None] * t)
    wanted, same = value_and_gradient(spectral_norm, t)
    torch.testing.assert_close(value / by.abs(), wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient * by.sign()[:, None, None], same, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1e4, 1e-6])
def test_features_of_any_size(size: float) -> None:
    a, b = (size * m.float() for m in (maps((2, 128, 2, 2)), maps((2, 256, 2, 2), 1)))
    value = assert_finite(stretch, a, b)
    wanted = torch.linalg.svdvals(transmitting_matrix(a.double(), b.double()))[:, 0]
    torch.testing.assert_close(value.double(), wanted, rtol=0.01, atol=0)


@pytest.mark.parametrize("iterations", [0, -1])
def test_no_iteration_is_refused(iterations: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        spectral_norm(torch.ones(1, 2, 2), iterations)


def test_any_precision() -> None:
    for before, after in (((2, 3, 4, 4), (2, 5, 2, 2)), ((2, 3, 2, 2), (2, 5)), ((3, 4), (3, 5))):
        a, b = maps(before), maps(after, 1)
        mean = lambda x, y: stretch(x, y).mean()  # noqa: E731
        assert_exact_in_half(mean, lambda x, y: float(iterated(transmitted(x, y)).mean()), a, b)
        assert transmitting_matrix(a.half(), b.half()).dtype == torch.float32
        assert spectral_norm(transmitting_matrix(a, b).half()).dtype == torch.float32
        for loss in (stretch, transmitting_matrix):
            assert_same_under_autocast(loss, a, b)
            assert_needs_no_values(loss, a, b)
        assert_same_under_autocast(spectral_norm, transmitting_matrix(a, b))


@pytest.mark.parametrize(("before", "after"), PAIRS)
@pytest.mark.parametrize("iterations", [1, 2, 7, 10])
def test_the_norm_of_a_stage_needs_no_matrix(before: tuple[int, ...], after: tuple[int, ...], iterations: int) -> None:
    a, b = maps(before), maps(after, 1)
    np.testing.assert_allclose(
        stage_norm(a, b, iterations), iterated(transmitted(*arrays(a, b)), iterations), rtol=1e-10
    )
    assert_smooth(partial(stage_norm, iterations=iterations), a, b)


def test_maps_in_half_precision_are_averaged_in_float32() -> None:
    a, b = (maps((2, 6, 8, 8)).float() + 3).bfloat16(), maps((2, 3, 2, 2)).bfloat16()
    found = stage_norm(a, b)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, iterated(transmitted(*arrays(a.double(), b.double()))), rtol=1e-5)


def test_the_norm_of_a_stage_in_the_hard_cases() -> None:
    nothing, a, b = torch.zeros(2, 3, 4, 4), maps((2, 3, 4, 4)).float(), maps((2, 5, 4, 4), 1).float()
    assert (assert_finite(stage_norm, nothing, b) == 0).all() and (assert_finite(stage_norm, a, 0 * b) == 0).all()
    for size in (1e-6, 1e4):
        torch.testing.assert_close(stage_norm(size * a, size * b), size**2 * stage_norm(a, b), rtol=1e-4, atol=0)
    assert_same_under_autocast(stage_norm, a, b)
    assert_needs_no_values(stage_norm, a, b)
    broken = b.clone()
    broken[1, 2, 0, 0] = math.nan
    assert stage_norm(a, broken).isnan().tolist() == [False, True]
    with pytest.raises(ValueError, match="at least one"):
        stage_norm(a, b, 0)


def test_two_norms_are_those_of_each() -> None:
    a, b, c, d = (torch.rand(3, n, 4, 4, dtype=torch.float64, requires_grad=n > 5) for n in (5, 6, 4, 7))
    found = two_stage_norms((a, b), (c, d), 7)
    for norm, pair in zip(found, ((a, b), (c, d)), strict=True):
        alone = stage_norm(*pair, 7)
        assert torch.equal(norm, alone)
        assert torch.equal(*(torch.autograd.grad(n.sum(), pair[1], retain_graph=True)[0] for n in (norm, alone)))
    with pytest.raises(ValueError, match="at least one iteration"):
        two_stage_norms((a, b), (c, d), 0)
