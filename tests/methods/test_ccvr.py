"""The head refitted on virtual features, drawn from Gaussians that the clients' sums give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isofed.draws import generator
from isofed.functional import Gaussians
from isofed.layout import Tensors
from isofed.methods import Final
from isofed.methods.ccvr import CCVR
from tests.engine.plain import distance, small
from tests.methods.refits import Seen, answers, features, trained_by_torch


def pooled(z: np.ndarray, labels: np.ndarray, label: int) -> tuple[np.ndarray, np.ndarray]:
    own = z[labels == label]
    return own.mean(0), np.cov(own, rowvar=False, ddof=1)


@pytest.mark.parametrize(("partition", "clients"), [("quantity:1,min=8", 4), ("pathological:2", 5), ("iid", 1)])
@pytest.mark.parametrize("tukey", [1.0, 0.5])
def test_the_clients_sums_give_the_pooled_mean_and_covariance(partition: str, clients: int, tukey: float) -> None:
    run = small(method=f"ccvr:tukey={tukey}", partition=partition, clients=clients, rounds=1)
    weights = run.layout.views(run.state.weights)
    z, labels = features(run, weights)
    z = np.maximum(z, 0) ** tukey
    said = answers(run, run.state.weights)
    total = {k: sum((a[k] for a in said), torch.zeros(())).numpy() for k in said[0]}
    counts = total["ccvr.counts"]
    np.testing.assert_array_equal(counts, np.bincount(labels))
    for label in range(4):
        n, mean, covariance = counts[label], *pooled(z, labels, label)
        np.testing.assert_allclose(total["ccvr.first"][label] / n, mean, atol=1e-6)
        about = total["ccvr.second"][label] - n * np.outer(mean, mean)
        np.testing.assert_allclose(about / (n - 1), covariance, atol=2e-6)
        assert np.abs(covariance).max() > 1e-3


@dataclass(frozen=True)
class SpyingCCVR(CCVR):
    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        Seen.totals.append({k: v.clone() for k, v in total.items()})
        super().finish(exchange, total, final)

    def virtual(self, gaussians: Gaussians, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        Seen.gaussians.append(gaussians)
        return super().virtual(gaussians, rng)


def test_the_server_has_the_pooled_gaussians() -> None:
    run = small(method=SpyingCCVR(samples=5, epochs=1), model="cnn")
    result = run.fit()
    found = Seen.gaussians[-1]
    z, labels = features(run, result.weights)
    for label in range(4):
        mean, covariance = pooled(z, labels, label)
        np.testing.assert_allclose(found.mean[label], mean, atol=1e-6)
        np.testing.assert_allclose(found.covariance[label], covariance, atol=2e-6)
    np.testing.assert_array_equal(found.counts, np.bincount(labels))


def gaussians(*parts: tuple[float, list[float], list[list[float]]]) -> Gaussians:
    counts, means, covariances = zip(*parts, strict=True)
    return Gaussians(*(torch.tensor(t, dtype=torch.float64) for t in (counts, means, covariances)))


SPREAD = [[1.0, 0.6, -0.3], [0.6, 2.0, 0.1], [-0.3, 0.1, 0.5]]
TWO = gaussians((10.0, [1.0, -2.0, 0.5], SPREAD), (30.0, [20.0, 30.0, 40.0], np.multiply(SPREAD, 4).tolist()))


def test_virtual_features_have_the_mean_and_covariance() -> None:
    z, labels = CCVR(samples=200_000).virtual(TWO, np.random.default_rng(0))
    assert torch.equal(torch.bincount(labels), torch.tensor([200_000, 200_000]))
    for label in (0, 1):
        own = z[labels == label]
        size = 4.0 if label else 1.0
        # A mean of n draws is off by s / sqrt(n), 0.006 at most here, a covariance by about s^2 sqrt(2 / n).
        torch.testing.assert_close(own.mean(0), TWO.mean[label], rtol=0, atol=0.03)
        torch.testing.assert_close(own.T.cov(), TWO.covariance[label], rtol=0, atol=0.03 * size)


def test_the_draws_do_not_depend_on_the_signs_of_eigenvectors() -> None:
    # Noise times the one symmetric root of the covariance, whose factors a machine may choose as it likes.
    z, _ = CCVR(samples=50).virtual(TWO, np.random.default_rng(0))
    noise = np.random.default_rng(0).standard_normal((50, 3))
    root, *_ = np.linalg.lstsq(noise, (z[:50] - TWO.mean[0]).numpy())
    np.testing.assert_allclose(root, root.T, atol=1e-12)
    np.testing.assert_allclose(root @ root, SPREAD, atol=1e-12)
    assert np.linalg.eigvalsh(root).min() > 0


def test_relu_cuts_what_is_drawn_and_nothing_else() -> None:
    free, _ = CCVR(samples=500).virtual(TWO, np.random.default_rng(0))
    cut, _ = CCVR(samples=500, relu=True).virtual(TWO, np.random.default_rng(0))
    assert (free < 0).any()
    assert torch.equal(cut, free.clamp(min=0))


def test_tukey_fits_in_the_transformed_space_and_goes_back() -> None:
    far = gaussians((5.0, [20.0, 30.0, 40.0], SPREAD))
    z, _ = CCVR(samples=200_000, tukey=0.5).virtual(far, np.random.default_rng(0))
    torch.testing.assert_close(z.sqrt().mean(0), far.mean[0], rtol=0, atol=0.03)
    torch.testing.assert_close(z.sqrt().T.cov(), far.covariance[0], rtol=0, atol=0.03)
    near, _ = CCVR(samples=500, tukey=0.5).virtual(TWO, np.random.default_rng(0))
    free, _ = CCVR(samples=500).virtual(TWO, np.random.default_rng(0))
    torch.testing.assert_close(near, free.clamp(min=0).square())


def test_classes_that_nobody_has_are_skipped() -> None:
    some = gaussians((3.0, [1.0, 1, 1], SPREAD), (0.0, [0.0] * 3, [[0.0] * 3] * 3), (2.0, [-1.0, 0, 0], SPREAD))
    z, labels = CCVR(samples=7).virtual(some, np.random.default_rng(0))
    assert len(z) == 14 and labels.tolist() == [0] * 7 + [2] * 7


def test_covariances_without_full_rank() -> None:
    direction = np.array([1.0, 2.0, -2.0]) / 3
    line = np.outer(direction, direction)
    flat = line - 1e-12 * np.eye(3)  # as rounding leaves it
    given = gaussians((9.0, [1.0, 1, 1], flat.tolist()), (1.0, [4.0, 5, 6], np.zeros((3, 3)).tolist()))
    z, labels = CCVR(samples=2000).virtual(given, np.random.default_rng(0))
    assert torch.isfinite(z).all()
    away = (z[labels == 0] - 1).numpy()
    np.testing.assert_allclose(away @ (np.eye(3) - line), 0, atol=1e-5)
    assert (away @ direction).std() == pytest.approx(1, rel=0.1)
    assert torch.equal(z[labels == 1], torch.tensor([[4.0, 5, 6]]).double().expand(2000, 3))  # a single sample


@pytest.mark.parametrize(
    "method",
    [SpyingCCVR(samples=40, epochs=3, lr=0.3, batch_size=32), SpyingCCVR(20, 2, 0.1, 0.0, 16, True, 0.5)],
)
def test_the_head_is_trained_on_virtual_features(method: SpyingCCVR) -> None:
    run = small(method=[method], rounds=1)
    result, fresh = run.fit(), small(rounds=1).fit().weights
    rng = generator(0, "finish/ccvr")
    z, labels = method.virtual(Seen.gaussians[-1], rng)
    orders = [torch.from_numpy(rng.permutation(len(z))) for _ in range(method.epochs)]
    head = (fresh["head.weight"], fresh["head.bias"])
    wanted = trained_by_torch(head, z, labels, orders, method.lr, method.momentum, method.batch_size)
    assert distance({k: result.weights[k] for k in wanted}, wanted) < 2e-6
    assert distance({k: fresh[k] for k in wanted}, wanted) > 1e-3
    assert all(torch.equal(result.weights[k], fresh[k]) for k in fresh if not k.startswith("head."))


def test_ccvr_on_a_network_that_normalises() -> None:
    method = SpyingCCVR(samples=30, epochs=2, lr=0.3)
    run = small(method=["spherefed:calibrate=none", method], rounds=1)
    start = run.world.network().get_parameter("head.weight").detach().clone()
    result = run.fit()
    given = Seen.gaussians[-1]
    z, labels = features(run, result.weights)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    for label in range(4):  # fitted to the normalised features
        mean, covariance = pooled(z, labels, label)
        np.testing.assert_allclose(given.mean[label], mean, atol=1e-6)
        np.testing.assert_allclose(given.covariance[label], covariance, atol=1e-6)
    rng = generator(0, "finish/ccvr")
    drawn, of = method.virtual(given, rng)
    drawn = drawn / drawn.norm(dim=1, keepdim=True)
    orders = [torch.from_numpy(rng.permutation(len(drawn))) for _ in range(2)]
    wanted = trained_by_torch((start, None), drawn, of, orders, 0.3, 0.9, 64)
    assert distance({"head.weight": result.weights["head.weight"]}, wanted) < 2e-6
    assert distance({"head.weight": start}, wanted) > 0.1


def test_ccvr_where_nobody_has_a_class(tmp_path: Any) -> None:
    probe = small()
    labels = probe.world.parts["train"].labels.numpy()
    held = [
        np.flatnonzero(labels == 0).tolist() + np.flatnonzero(labels == 1).tolist(),
        np.flatnonzero(labels == 2).tolist(),
    ]
    (tmp_path / "split.json").write_text(str(held))
    method = SpyingCCVR(samples=20, epochs=5, lr=0.1)
    run = small(method=[method], partition=f"from_file:{tmp_path}/split.json", clients=2)
    result = run.fit()
    assert Seen.totals[-1]["ccvr.counts"].tolist() == [25, 25, 25, 0]
    assert all(torch.isfinite(v).all() for v in result.weights.values())
    assert result.class_accuracy[3] == 0 and result.accuracy > 0.5
