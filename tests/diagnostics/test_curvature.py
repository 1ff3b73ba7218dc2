"""Hessian quantities against the whole Hessian of networks small enough to build it, in float64."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from isofed.diagnostics import hessian_diagonal, hessian_match, hessian_top_eigenvalues, hessian_trace
from isofed.models import create
from tests.functional.tools import array, features

Matrix = NDArray[np.float64]


def data(count: int = 30, width: int = 4, classes: int = 3) -> tuple[Tensor, Tensor]:
    return features(count, width), torch.arange(count) % classes


def small() -> nn.Module:
    """27 parameters, all of which bend the loss."""
    network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    rng = np.random.default_rng(0)
    for p in network.parameters():
        p.data = torch.from_numpy(rng.normal(size=p.shape))
    return network


def flat(network: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(network.parameters()).detach()


def numeric_hessian(network: nn.Module, sample: tuple[Tensor, Tensor]) -> Matrix:
    """Central differences of the gradient: one backward pass, never two."""
    start, step = flat(network), 1e-5

    def gradient(at: Tensor) -> Matrix:
        nn.utils.vector_to_parameters(at, network.parameters())
        loss = cross_entropy(network(sample[0]), sample[1])
        return array(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))]))

    axes = step * torch.eye(len(start), dtype=start.dtype)
    rows = [(gradient(start + axis) - gradient(start - axis)) / (2 * step) for axis in axes]
    nn.utils.vector_to_parameters(start, network.parameters())
    return (np.array(rows) + np.array(rows).T) / 2


def block_traces(network: nn.Module, hessian: Matrix) -> list[float]:
    edges = np.cumsum([0, *(p.numel() for p in network.parameters())])
    return [float(np.trace(hessian[a:b, a:b])) for a, b in pairwise(edges)]


@pytest.mark.parametrize("batch_size", [7, 1000])
def test_eigenvalues_are_those_of_the_whole_hessian(batch_size: int) -> None:
    network, sample = small(), data()
    values, vectors = np.linalg.eigh(numeric_hessian(network, sample))
    found = hessian_top_eigenvalues(network, sample, 3, tolerance=1e-8, batch_size=batch_size)
    np.testing.assert_allclose(found.values, values[::-1][:3], rtol=1e-6)
    overlaps = np.abs(np.sum(array(found.vectors) * vectors[:, ::-1][:, :3].T, 1))
    np.testing.assert_allclose(overlaps, 1, rtol=1e-5)
    assert found.converged and bool((found.errors <= 1e-8 * found.values[0]).all()) and found.products <= 27


@pytest.mark.parametrize("tolerance", [0.3, 0.03])
def test_the_error_of_an_eigenvalue_bounds_how_far_off_it_is(tolerance: float) -> None:
    network, sample = small(), data()
    hessian = numeric_hessian(network, sample)
    for seed in range(10):
        found = hessian_top_eigenvalues(network, sample, tolerance=tolerance, seed=seed)
        nearest = np.abs(np.linalg.eigvalsh(hessian) - float(found.values[0])).min()
        left = hessian @ array(found.vectors[0]) - float(found.values[0]) * array(found.vectors[0])
        assert nearest <= float(found.errors[0]) + 1e-8
        assert np.linalg.norm(left) == pytest.approx(float(found.errors[0]), rel=1e-4, abs=1e-8)
        assert found.products < 27


def test_all_eigenvalues_where_many_are_equal() -> None:
    """Of a loss |w|^2 / 2 + a bit along the first axis: a start vector meets two eigenvalues only."""
    network = nn.Linear(5, 1, bias=False).double()

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return network.weight.square().sum() / 2 + network.weight[0, 0] ** 2 + 0 * logits.sum()

    found = hessian_top_eigenvalues(network, data(6, 5), 5, loss=loss)
    np.testing.assert_allclose(found.values, [3, 1, 1, 1, 1], rtol=1e-6)
    np.testing.assert_allclose(found.vectors @ found.vectors.T, np.eye(5), atol=1e-6)


def test_softmax_regression_has_the_hessian_of_the_textbook() -> None:
    """The mean over samples of (diag p - p p') kron x x', without any automatic derivative."""
    network, (x, y) = nn.Linear(4, 3, bias=False).double(), data()
    p, rows = array(network(x).softmax(1)), array(x)
    terms = [np.kron(np.diag(q) - np.outer(q, q), np.outer(r, r)) for q, r in zip(p, rows, strict=True)]
    hessian = np.mean(terms, 0)
    top = hessian_top_eigenvalues(network, (x, y), 2, tolerance=1e-9)
    np.testing.assert_allclose(top.values, np.linalg.eigvalsh(hessian)[::-1][:2], rtol=1e-9)
    diagonal = hessian_diagonal(network, (x, y), probes=12)
    np.testing.assert_allclose(diagonal.values, np.diag(hessian), rtol=1e-9)
    assert diagonal.traces.tolist() == [pytest.approx(np.trace(hessian))]


@pytest.mark.parametrize("deflate", [0, 3])
@pytest.mark.parametrize("seed", range(3))
def test_the_trace_is_within_a_few_of_its_errors(seed: int, deflate: int) -> None:
    network, sample = small(), data()
    hessian = numeric_hessian(network, sample)
    found = hessian_trace(network, sample, tolerance=0.06, probes=5000, deflate=deflate, seed=seed)
    assert found.converged and found.error <= 0.06 * abs(found.value)
    assert abs(found.value - np.trace(hessian)) < 4 * found.error
    assert found.names == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert float(found.traces.sum()) == pytest.approx(found.value)
    np.testing.assert_allclose(found.traces, block_traces(network, hessian), atol=0.25 * np.trace(hessian))
    assert found.probes % 8 == 0 and found.probes < 5000


@pytest.mark.parametrize("deflate", [0, 1])
def test_the_error_of_a_trace_is_its_spread_over_seeds(deflate: int) -> None:
    network, sample = small(), data()
    found = [hessian_trace(network, sample, tolerance=0, probes=8, deflate=deflate, seed=seed) for seed in range(150)]
    assert {f.probes for f in found} == {8} and not any(f.converged for f in found)
    values, errors = np.array([f.value for f in found]), np.array([f.error for f in found])
    assert values.std() == pytest.approx(np.sqrt(np.mean(errors**2)), rel=0.2)
    trace = np.trace(numeric_hessian(network, sample))
    assert abs(values.mean() - trace) < 4 * values.std() / math.sqrt(150)


@pytest.mark.parametrize("deflate", [0, 3])
def test_the_diagonal_by_probes_has_the_error_that_it_says(deflate: int) -> None:
    network, sample = small(), data()
    exact = np.diag(numeric_hessian(network, sample))
    for seed in range(3):
        found = hessian_diagonal(network, sample, tolerance=0.02, probes=26, deflate=deflate, seed=seed)
        assert found.probes == 32 and not found.converged  # whole groups of eight
        off = np.linalg.norm(array(found.values) - exact) / np.linalg.norm(exact)
        assert off == pytest.approx(found.error, rel=0.6)
        fewer = hessian_diagonal(network, sample, tolerance=1.2 * found.error, probes=26, deflate=deflate, seed=seed)
        assert fewer.converged and fewer.error <= 1.2 * found.error and fewer.probes <= 32


def test_deflation_takes_noise_out_and_all_of_it_in_the_end() -> None:
    network, sample = small(), data()
    errors = [hessian_trace(network, sample, tolerance=0, probes=80, deflate=n).error for n in (0, 3, 6)]
    assert errors[0] > 1.5 * errors[1] > 2 * errors[2]
    whole = hessian_trace(network, sample, tolerance=1e-6, deflate=27)
    assert whole.probes == 8 and whole.value == pytest.approx(np.trace(numeric_hessian(network, sample)), rel=1e-6)


def test_enough_probes_give_the_diagonal_exactly() -> None:
    network, sample = small(), data()
    hessian = numeric_hessian(network, sample)
    found = hessian_diagonal(network, sample, probes=27)
    np.testing.assert_allclose(found.values, np.diag(hessian), rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(found.traces, block_traces(network, hessian), rtol=1e-5)
    assert found.error == 0 and found.probes == 27 and found.converged


def test_a_network_is_left_as_it_was_and_frozen_parts_do_not_count() -> None:
    network = create("cnn", classes=3, shape=(1, 8, 8))
    network.head.requires_grad_(False)
    network.stages["stage1"].eval()
    before, modes = {k: v.clone() for k, v in network.state_dict().items()}, [m.training for m in network.modules()]
    sample = torch.from_numpy(np.random.default_rng(0).normal(size=(12, 1, 8, 8))).float(), torch.arange(12) % 3
    one = hessian_trace(network, sample, probes=8, tolerance=0)
    with torch.no_grad():
        two = hessian_trace(network, sample, probes=8, tolerance=0)
    assert one.value == two.value and torch.equal(one.traces, two.traces)  # the same call, the same bits
    assert not any(name.startswith("head") for name in one.names)
    top = hessian_top_eigenvalues(network, sample, 1)
    assert top.vectors.shape[1] == sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert [m.training for m in network.modules()] == modes
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters())
    for p in network.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that is trained"):
        hessian_trace(network, sample)


def test_the_batches_of_a_network_with_batch_norm_change_nothing() -> None:
    network = create("cnn", classes=3, shape=(1, 8, 8)).double()
    sample = torch.from_numpy(np.random.default_rng(0).normal(size=(12, 1, 8, 8))), torch.arange(12) % 3
    found = [hessian_top_eigenvalues(network, sample, batch_size=size, tolerance=1e-6) for size in (5, 12)]
    torch.testing.assert_close(found[0].values, found[1].values, rtol=1e-5, atol=0)


def test_a_linear_loss_has_no_curvature() -> None:
    network, sample = nn.Linear(4, 3).double(), data()
    found = hessian_trace(network, sample, loss=lambda logits, labels: logits.mean())
    assert (found.value, found.error, found.probes, found.converged) == (0, 0, 8, True)
    top = hessian_top_eigenvalues(network, sample, 2, loss=lambda logits, labels: logits.mean())
    assert top.values.tolist() == [0, 0]


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    network, sample = small(), data()
    hessian_trace(network, sample, tolerance=0, probes=20, deflate=0, progress=lambda *n: told.append(n))
    assert told == [(8, 24), (16, 24), (24, 24)]
    told.clear()
    hessian_trace(network, sample, tolerance=0, probes=20, deflate=3, progress=lambda *n: told.append(n))
    first = len(told) - 3  # products with which the top eigenvectors were found, at most four for each
    assert first <= 12 and told[:first] == [(n, 36) for n in range(1, first + 1)]
    assert told[first:] == [(first + n, first + 24) for n in (8, 16, 24)]
    told.clear()
    found = hessian_top_eigenvalues(network, sample, progress=lambda *n: told.append(n))
    assert told == [(n + 1, 27) for n in range(found.products)]
    told.clear()
    hessian_diagonal(network, sample, probes=27, progress=lambda *n: told.append(n))
    assert told[-1] == (27, 27)


def test_smaller_batches_where_memory_does_not_suffice() -> None:
    network, (inputs, labels) = small(), data()
    seen: list[int] = []

    def loss(logits: Tensor, wanted: Tensor) -> Tensor:
        seen.append(len(wanted))
        if len(wanted) > len(labels) // 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.nn.functional.cross_entropy(logits, wanted)

    found = hessian_trace(network, (inputs, labels), deflate=0, loss=loss, batch_size=1000)
    assert seen[:2] == [len(labels), len(labels) // 2] and max(seen[2:]) == len(labels) // 4
    assert found.value == pytest.approx(hessian_trace(network, (inputs, labels), deflate=0).value, rel=1e-6)

    def never(logits: Tensor, wanted: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        hessian_trace(network, (inputs, labels), loss=never)


@pytest.mark.parametrize("itself", [True, False])
def test_the_match_is_the_mean_over_pairs(itself: bool) -> None:
    rows = [array(row) for row in features(5, 9)]
    pairs = [(a, b) for (i, a), (j, b) in product(enumerate(rows), repeat=2) if itself or i != j]
    norms = [(np.linalg.norm(a) - np.linalg.norm(b)) ** 2 for a, b in pairs]
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs]
    found = hessian_match(list(features(5, 9)), itself)
    assert found.norm == pytest.approx(np.mean(norms)) and found.direction == pytest.approx(np.mean(cosines))


def test_the_match_on_known_diagonals() -> None:
    one, two = torch.tensor([3.0, 4.0]), torch.tensor([4.0, -3.0])
    assert tuple(hessian_match([one, two], itself=False)) == pytest.approx((0, 0), abs=1e-12)
    assert tuple(hessian_match([one, two])) == pytest.approx((0, 0.5))
    assert tuple(hessian_match([one] * 4)) == pytest.approx((0, 1))
    assert tuple(hessian_match([one, 3 * one])) == pytest.approx((50, 1))
    # FedAlign's conversion between the two ways of counting, for K = 16 clients.
    drawn = list(features(16, 30))
    own, pairs = hessian_match(drawn), hessian_match(drawn, itself=False)
    assert pairs.norm == pytest.approx(own.norm * 16 / 15)
    assert pairs.direction == pytest.approx((16 * own.direction - 1) / 15)
    for wrong in ([one], [one, torch.ones(3)], [torch.ones(2, 2)] * 2):
        with pytest.raises(ValueError, match="at least two clients"):
            hessian_match(wrong)


@pytest.mark.parametrize("itself", [True, False])
@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_a_diagonal_that_is_not_finite_matches_nothing(strange: float, itself: bool) -> None:
    found = hessian_match([torch.ones(2), torch.tensor([1.0, strange]), torch.zeros(2)], itself)
    assert math.isnan(found.norm) and math.isnan(found.direction)


def test_what_cannot_be_computed_is_refused() -> None:
    network, (x, y) = small(), data()
    for count in (0, 28):
        with pytest.raises(ValueError, match="1 to 27"):
            hessian_top_eigenvalues(network, (x, y), count)
    with pytest.raises(ValueError, match="not finite"):
        hessian_top_eigenvalues(network, (x * math.nan, y))
    for sample in ((x, y[:-1]), (x[:0], y[:0])):
        with pytest.raises(ValueError, match="as many labels"):
            hessian_trace(network, sample)
