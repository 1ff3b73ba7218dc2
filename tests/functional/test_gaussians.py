"""CCVR's Gaussians: those of the pooled samples, whoever has them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isofed.functional import ClassSums, Gaussians, class_gaussians, class_sums, gaussians_of, merge_gaussians
from tests.functional.tools import Array, array, features


def samples(count: int, width: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    z = features(count, width, seed)
    labels = torch.from_numpy(np.random.default_rng([seed, count]).integers(0, classes, count))
    return z + labels[:, None], labels


def of_pool(z: Tensor, labels: Tensor, classes: int) -> tuple[Array, Array, Array]:
    values = array(z)
    width = values.shape[1]
    counts, mean, covariance = np.zeros(classes), np.zeros((classes, width)), np.zeros((classes, width, width))
    for c in range(classes):
        own = values[labels.numpy() == c]
        counts[c] = len(own)
        if len(own) > 0:
            mean[c] = own.mean(0)
        if len(own) > 1:
            covariance[c] = np.cov(own.T, ddof=1)
    return counts, mean, covariance


def assert_equal(found: Gaussians, wanted: tuple[Array, Array, Array], tolerance: float = 1e-10) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float64
        np.testing.assert_allclose(one.numpy(), other, rtol=0, atol=tolerance)


def add(parts: list[ClassSums]) -> ClassSums:
    return ClassSums(*(torch.stack(each).sum(0) for each in zip(*parts, strict=True)))


def by_paper(parts: list[Gaussians]) -> tuple[Array, Array, Array]:
    """Eq. 3 and 4 as they are printed, for classes with at least two samples."""
    given_ = [[t.numpy() for t in p] for p in parts]
    classes, width = given_[0][1].shape
    counts, mean, covariance = np.zeros(classes), np.zeros((classes, width)), np.zeros((classes, width, width))
    for c in range(classes):
        total = sum(n[c] for n, _, _ in given_)
        counts[c] = total
        for n, m, _ in given_:
            mean[c] += n[c] * m[c] / total
        for n, m, s in given_:
            if n[c] > 0:
                covariance[c] += (n[c] - 1) / (total - 1) * s[c] + n[c] / (total - 1) * np.outer(m[c], m[c])
        covariance[c] -= total / (total - 1) * np.outer(mean[c], mean[c])
    return counts, mean, covariance


@pytest.mark.parametrize(("count", "width", "classes"), [(0, 3, 2), (1, 4, 3), (9, 2, 5), (6, 9, 2), (60, 4, 3)])
def test_sums_sample_by_sample(count: int, width: int, classes: int) -> None:
    z, labels = samples(count, width, classes)
    counts, first, second = np.zeros(classes), np.zeros((classes, width)), np.zeros((classes, width, width))
    for row, label in zip(array(z), labels.tolist(), strict=True):
        counts[label] += 1
        for i in range(width):
            first[label, i] += row[i]
            for j in range(width):
                second[label, i, j] += row[i] * row[j]
    found = class_sums(z, labels, classes)
    for one, other in zip(found, (counts, first, second), strict=True):
        assert one.dtype == torch.float64
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("count", "width", "classes"), [(0, 3, 2), (1, 4, 3), (9, 2, 5), (6, 9, 2), (60, 4, 3)])
@pytest.mark.parametrize("way", [class_gaussians, lambda *a: gaussians_of(class_sums(*a))], ids=["direct", "sums"])
def test_gaussians_of_samples(count: int, width: int, classes: int, way: Callable[..., Gaussians]) -> None:
    z, labels = samples(count, width, classes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(way(z, labels, classes), of_pool(z, labels, classes))


def test_by_hand() -> None:
    z = torch.tensor([[1.0, 0.0], [3.0, 4.0], [7.0, 7.0]])
    found = class_gaussians(z, torch.tensor([1, 1, 2]), 4)
    assert found.counts.tolist() == [0, 2, 1, 0]
    assert found.mean.tolist() == [[0, 0], [2, 2], [7, 7], [0, 0]]
    assert found.covariance.tolist() == [[[0, 0], [0, 0]], [[2, 4], [4, 8]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]]


PARTITIONS = st.integers(1, 7).flatmap(
    lambda clients: st.tuples(st.just(clients), st.lists(st.integers(0, clients - 1), min_size=1, max_size=30))
)


@given(PARTITIONS, st.integers(1, 5), st.integers(1, 5), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_any_partition_gives_the_pooled_gaussians(
    partition: tuple[int, list[int]], width: int, classes: int, seed: int
) -> None:
    clients, owner = partition
    z, labels = samples(len(owner), width, classes, seed)
    who = torch.tensor(owner)
    own = [(z[who == k], labels[who == k]) for k in range(clients)]
    wanted = of_pool(z, labels, classes)
    assert_equal(merge_gaussians(class_gaussians(*o, classes) for o in own), wanted)
    assert_equal(gaussians_of(add([class_sums(*o, classes) for o in own])), wanted)


@pytest.mark.parametrize("owner", [[0] * 12, list(range(12)), [0] + [3] * 11], ids=str)
def test_extreme_partitions(owner: list[int]) -> None:
    z, labels = samples(12, 3, 2)
    own = [(z[torch.tensor(owner) == k], labels[torch.tensor(owner) == k]) for k in range(13)]
    wanted = of_pool(z, labels, 2)
    parts = [class_gaussians(*o, 2) for o in own]
    assert_equal(merge_gaussians(parts), wanted)
    assert_equal(gaussians_of(add([class_sums(*o, 2) for o in own])), wanted)
    assert_equal(merge_gaussians(parts), by_paper(parts))


def test_merging_leaves_the_parts_alone_and_may_be_done_in_stages() -> None:
    z, labels = samples(40, 3, 2)
    parts = [class_gaussians(z[i::4], labels[i::4], 2) for i in range(4)]
    copies = [Gaussians(*(t.clone() for t in p)) for p in parts]
    staged = merge_gaussians([merge_gaussians(parts[:2]), merge_gaussians(parts[2:])])
    assert_equal(staged, of_pool(z, labels, 2))
    assert all(torch.equal(a, b) for p, q in zip(parts, copies, strict=True) for a, b in zip(p, q, strict=True))
    assert_equal(merge_gaussians(parts[:1]), of_pool(z[::4], labels[::4], 2))


def test_merging_loses_no_digits_far_from_the_origin() -> None:
    z, labels = samples(60, 4, 3)
    z = z + 1e6
    parts = [class_gaussians(z[i::5], labels[i::5], 3) for i in range(5)]
    assert_equal(Gaussians(*merge_gaussians(parts)), of_pool(z, labels, 3), tolerance=1e-8)
    # The printed formula subtracts numbers of 1e12 from each other.
    assert np.abs(by_paper(parts)[2] - of_pool(z, labels, 3)[2]).max() > 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_features_are_widened_first(dtype: torch.dtype) -> None:
    z, labels = samples(50, 4, 3)
    z = (z + 10).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        direct, sums = class_gaussians(z, labels, 3), class_sums(z, labels, 3)
        merged = merge_gaussians([class_gaussians(z[:20], labels[:20], 3), class_gaussians(z[20:], labels[20:], 3)])
    wanted = of_pool(z, labels, 3)
    for found in (direct, gaussians_of(sums), merged):
        assert_equal(found, wanted)


def test_there_must_be_something_to_merge() -> None:
    with pytest.raises(ValueError, match="nothing"):
        merge_gaussians([])
    nobody = class_gaussians(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), 2)
    merged = merge_gaussians([nobody, nobody])
    assert all(torch.equal(t, torch.zeros_like(t)) for t in merged)
    assert merged.covariance.shape == (2, 3, 3)
