"""FFC: least squares from sums, against least squares on all samples at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isofed.functional import calibration_sums, solve_calibration, unit
from tests.functional.tools import Array, array, features


def one_hot(labels: Array, classes: int) -> Array:
    return np.array([[float(label == c) for c in range(classes)] for label in labels]).reshape(-1, classes)


def samples(count: int, width: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    z = features(count, width, seed)
    labels = torch.from_numpy(np.random.default_rng([seed, count]).integers(0, classes, count))
    return z, labels


def least_squares(z: Tensor, labels: Tensor, classes: int) -> Array:
    solution = np.linalg.lstsq(array(z), one_hot(labels.numpy(), classes), rcond=None)[0]
    return np.asarray(solution.T, dtype=np.float64)


def add_up(z: Tensor, labels: Tensor, owner: list[int], clients: int, classes: int) -> tuple[Tensor, Tensor]:
    """What the server has: the sums of clients, of which some may have nothing."""
    who = torch.tensor(owner)
    V, U = torch.zeros(z.shape[1], z.shape[1]).double(), torch.zeros(z.shape[1], classes).double()
    for client in range(clients):
        v, u = calibration_sums(z[who == client], labels[who == client], classes)
        V, U = V + v, U + u
    return V, U


@pytest.mark.parametrize(("count", "width", "classes"), [(0, 3, 2), (1, 4, 3), (7, 2, 5), (5, 9, 2), (40, 6, 4)])
def test_sums_sample_by_sample(count: int, width: int, classes: int) -> None:
    z, labels = samples(count, width, classes)
    V, U = np.zeros((width, width)), np.zeros((width, classes))
    for row, label in zip(array(z), labels.tolist(), strict=True):
        for i in range(width):
            U[i, label] += row[i]
            for j in range(width):
                V[i, j] += row[i] * row[j]
    found = calibration_sums(z, labels, classes)
    assert found.V.dtype == found.U.dtype == torch.float64
    np.testing.assert_allclose(found.V.numpy(), V, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(found.U.numpy(), U, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sums_are_float64_from_the_first_product_on(dtype: torch.dtype) -> None:
    z, labels = samples(50, 5, 3)
    z = (z + 10).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found = calibration_sums(z, labels, 3)
    wanted = array(z).T @ array(z)
    np.testing.assert_allclose(found.V.numpy(), wanted, rtol=1e-13)


PARTITIONS = st.integers(2, 7).flatmap(
    lambda clients: st.tuples(st.just(clients), st.lists(st.integers(0, clients - 1), min_size=30, max_size=30))
)


@given(PARTITIONS, st.integers(1, 8), st.integers(2, 5), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_any_partition_gives_pooled_least_squares(
    partition: tuple[int, list[int]], width: int, classes: int, seed: int
) -> None:
    clients, owner = partition
    z, labels = samples(len(owner), width, classes, seed)
    z = unit(z)
    found = solve_calibration(*add_up(z, labels, owner, clients, classes), ridge=0)
    assert found.weight.shape == (classes, width) and found.weight.dtype == torch.float64
    np.testing.assert_allclose(found.weight.numpy(), least_squares(z, labels, classes), rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    "owner",
    [
        [0] * 20,  # all with one client, the others empty
        list(range(20)),  # one sample each
        [0] + [4] * 19,  # one sample, three empty clients, and the rest
    ],
    ids=["one client", "one sample each", "one sample and empty clients"],
)
def test_extreme_partitions(owner: list[int]) -> None:
    z, labels = samples(20, 6, 4)
    V, U = add_up(z, labels, owner, 20, 4)
    found = solve_calibration(V, U, ridge=0)
    np.testing.assert_allclose(found.weight.numpy(), least_squares(z, labels, 4), rtol=0, atol=1e-8)
    # And the outcome is what no other classifier can better.
    error = lambda w: float(((array(z) @ w.T - one_hot(labels.numpy(), 4)) ** 2).sum())  # noqa: E731
    for other in np.random.default_rng(0).normal(size=(20, 4, 6)):
        assert error(found.weight.numpy() + 1e-3 * other) > error(found.weight.numpy())


@pytest.mark.parametrize("kind", ["dead dimensions", "fewer samples than dimensions", "repeated dimensions", "zero"])
def test_without_a_ridge_singular_sums_give_the_pseudo_inverse(kind: str) -> None:
    z, labels = samples(5 if kind.startswith("fewer") else 40, 8, 3)
    if kind == "dead dimensions":
        z[:, [1, 5]] = 0
    if kind == "repeated dimensions":
        z[:, 4:] = 2 * z[:, :4]
    if kind == "zero":
        z = 0 * z
    V, U = calibration_sums(z, labels, 3)
    weight, condition = solve_calibration(V, U, ridge=0)
    wanted = (np.linalg.pinv(V.numpy(), rcond=1e-13, hermitian=True) @ U.numpy()).T
    np.testing.assert_allclose(weight.numpy(), wanted, rtol=0, atol=1e-8)
    np.testing.assert_allclose(weight.numpy(), (np.linalg.pinv(array(z)) @ one_hot(labels.numpy(), 3)).T, atol=1e-8)
    if kind == "zero":
        assert condition == float("inf") and torch.equal(weight, torch.zeros(3, 8).double())
    else:
        singular = np.linalg.svd(array(z), compute_uv=False)
        singular = singular[singular > 1e-6]
        assert len(singular) < 8 and condition == pytest.approx((singular[0] / singular[-1]) ** 2, rel=1e-6)
        assert np.abs(wanted).max() > 0.01
    if kind == "dead dimensions":
        assert weight[:, [1, 5]].abs().max() < 1e-14


@pytest.mark.parametrize("ridge", [None, 1e-6, 1e-3, 0.5, 10.0])
@pytest.mark.parametrize("singular", [False, True])
def test_the_ridge_is_relative_to_the_mean_eigenvalue(ridge: float | None, singular: bool) -> None:
    z, labels = samples(30, 6, 4)
    z = 20 * z
    if singular:
        z[:, 2] = 0
    V, U = calibration_sums(z, labels, 4)
    r = 1e-6 if ridge is None else ridge  # the default
    matrix = V.numpy() + r * np.trace(V.numpy()) / 6 * np.eye(6)
    found = solve_calibration(V, U) if ridge is None else solve_calibration(V, U, ridge=ridge)
    np.testing.assert_allclose(found.weight.numpy(), np.linalg.solve(matrix, U.numpy()).T, rtol=1e-8, atol=1e-10)
    assert found.condition == pytest.approx(np.linalg.cond(matrix), rel=1e-6)
    assert isinstance(found.condition, float)


@pytest.mark.parametrize("singular", [False, True])
def test_a_smaller_ridge_comes_nearer_to_none(singular: bool) -> None:
    z, labels = samples(30, 6, 4)
    if singular:
        z[:, 2] = 0
    V, U = calibration_sums(z, labels, 4)
    limit = solve_calibration(V, U, ridge=0).weight
    apart = [float((solve_calibration(V, U, ridge=10.0**-k).weight - limit).norm()) for k in (2, 4, 6, 8)]
    if singular:  # where in the end rounding, divided by the ridge, takes over
        apart = apart[:3]
    assert apart == sorted(apart, reverse=True)
    assert apart[0] > 1e-3 and apart[-1] < apart[0] * 1e-3


@pytest.mark.parametrize("ridge", [0.0, 1e-6])
def test_the_scale_of_the_features_goes_into_the_weights(ridge: float) -> None:
    z, labels = samples(30, 6, 4)
    one = solve_calibration(*calibration_sums(z, labels, 4), ridge=ridge)
    for scale in (1e-4, 1e4):
        other = solve_calibration(*calibration_sums(scale * z, labels, 4), ridge=ridge)
        torch.testing.assert_close(other.weight * scale, one.weight, rtol=1e-8, atol=1e-10)
        assert other.condition == pytest.approx(one.condition, rel=1e-6)


def test_it_predicts() -> None:
    # Classes in three directions; the answer is in the place where torch.nn.Linear has its weight.
    labels = torch.arange(60) % 3
    z = torch.eye(3, 5).double()[labels] + 0.05 * features(60, 5)
    linear = torch.nn.Linear(5, 3, bias=False).double()
    linear.load_state_dict({"weight": solve_calibration(*calibration_sums(z, labels, 3)).weight})
    assert torch.equal(linear(z).argmax(1), labels)


def test_sums_in_float32_are_taken_as_they_are() -> None:
    z, labels = samples(30, 6, 4)
    V, U = (s.float() for s in calibration_sums(z, labels, 4))
    found = solve_calibration(V, U, ridge=1e-3)
    matrix = array(V) + 1e-3 * np.trace(array(V)) / 6 * np.eye(6)
    np.testing.assert_allclose(found.weight.numpy(), np.linalg.solve(matrix, array(U)).T, rtol=1e-5)
    assert found.weight.dtype == torch.float64


def test_sums_need_not_be_symmetric_to_the_last_digit() -> None:
    z, labels = samples(30, 6, 4)
    V, U = calibration_sums(z, labels, 4)
    skew = features(6, 6).tril(-1)
    skew = skew - skew.T
    found, wanted = (solve_calibration(v, U, ridge=0.1) for v in (V + skew, V))
    torch.testing.assert_close(found.weight, wanted.weight, rtol=1e-9, atol=1e-12)
    assert found.condition == pytest.approx(wanted.condition)


def test_bad_values_are_refused() -> None:
    V, U = calibration_sums(*samples(9, 3, 2), 2)
    with pytest.raises(ValueError, match="ridge"):
        solve_calibration(V, U, ridge=-1e-9)
    with pytest.raises(RuntimeError):
        calibration_sums(torch.zeros(2, 3), torch.tensor([0, 2]), 2)
