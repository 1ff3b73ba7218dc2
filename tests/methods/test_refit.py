"""The head refitted after the last round: by least squares, on virtual features, and on everybody's real ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from isofed.draws import generator
from isofed.engine.replica import Job, Replica
from isofed.errors import UserError
from isofed.federation import Federation
from isofed.functional import Gaussians
from isofed.layout import Tensors
from isofed.methods import Final, parse
from isofed.methods.ccvr import CCVR
from isofed.methods.oracle_head import OracleHead
from isofed.methods.refit import accuracy_by_class, head_of, shuffled, train_head
from isofed.models import Network
from tests.engine.plain import Named, Plain, distance, small

NO_MOVE = 1e-30  # a learning rate with which no float32 weight moves
SAMPLES = 100  # of ``small``
WIDTH, CLASSES = 64, 4
BODY, HEAD = 64 * 64 + 64 + 64 * 64 + 64, 4 * 64 + 4  # the mlp's parameters


def network_of(run: Federation, weights: Named) -> Network:
    network = run.world.network()
    network.load_state_dict(weights)
    return network.eval()


@torch.no_grad()
def features(run: Federation, weights: Named, part: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """What the final extractor makes of a part's samples, in their order, and their labels."""
    inputs, labels = Plain(run, torch.float32).part(part)
    return network_of(run, weights)(inputs).features.double().numpy(), labels.numpy()


def answers(run: Federation, weights: Tensor) -> list[Tensors]:
    """What each client says in the run's one exchange."""
    replica, name = Replica(run.world, torch.device("cpu")), run.settings.method.exchanges[0][0]
    jobs = [Job(run.settings.rounds + 1, c, 0.1, 0.25) for c in range(len(run.world.clients))]
    return [replica.answer(name, job, weights, {}, None) for job in jobs]


# The training of a head


def trained_by_torch(
    head: tuple[Tensor, Tensor | None],
    z: Tensor,
    labels: Tensor,
    orders: list[Tensor],
    lr: float,
    momentum: float,
    size: int,
) -> Named:
    weight, bias = head
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).double()
    layer.load_state_dict({"weight": weight.double()} | ({} if bias is None else {"bias": bias.double()}))
    optimiser = torch.optim.SGD(layer.parameters(), lr=lr, momentum=momentum)
    for order in orders:
        for index in order.split(size):
            optimiser.zero_grad()
            cross_entropy(layer(z.double()[index]), labels[index]).backward()
            optimiser.step()
    return {f"head.{k}": v.detach() for k, v in layer.named_parameters()}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_head_is_trained_as_torch_would(with_bias: bool, momentum: float) -> None:
    rng = torch.Generator().manual_seed(0)
    z, labels = torch.randn(50, 6, generator=rng), torch.randint(3, (50,), generator=rng)
    weight, bias = torch.randn(3, 6, generator=rng), torch.randn(3, generator=rng) if with_bias else None
    orders = [torch.randperm(50, generator=rng) for _ in range(3)]
    wanted = trained_by_torch((weight, bias), z, labels, orders, 0.2, momentum, 16)  # 16, 16, 16 and 2
    addresses = weight.data_ptr()
    batches = (batch for order in orders for batch in order.split(16))
    train_head((weight, bias), z, labels, batches, lr=0.2, momentum=momentum)
    found = {"head.weight": weight} | ({} if bias is None else {"head.bias": bias})
    assert distance(found, wanted) < 2e-6
    assert weight.data_ptr() == addresses  # in place


def test_batches_of_a_new_order_each_epoch() -> None:
    batches = list(shuffled(10, 4, 3, np.random.default_rng(0)))
    assert [len(b) for b in batches] == [4, 4, 2] * 3
    epochs = [torch.cat(batches[i : i + 3]).tolist() for i in (0, 3, 6)]
    rng = np.random.default_rng(0)
    assert epochs == [rng.permutation(10).tolist() for _ in range(3)] and epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("count", "size", "epochs", "at_least", "made"),
    [
        (10, 4, 3, 9, 9),
        (10, 4, 3, 10, 12),
        (10, 4, 1, 7, 9),
        (8, 4, 2, 0, 4),
        (3, 64, 10, 2000, 2000),
        (10, 4, 9, 5, 27),
    ],
)
def test_as_many_epochs_as_it_takes(count: int, size: int, epochs: int, at_least: int, made: int) -> None:
    assert len(list(shuffled(count, size, epochs, np.random.default_rng(0), at_least=at_least))) == made


def test_head_of() -> None:
    weight, bias = torch.zeros(2, 3), torch.zeros(2)
    assert head_of({"head.weight": weight, "head.bias": bias}) == (weight, bias)
    assert head_of({"head.weight": weight, "other": bias}) == (weight, None)


def test_accuracy_by_class() -> None:
    z = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1], [0, 1]])
    labels = torch.tensor([0, 1, 1, 1, 3])
    weight = torch.tensor([[1.0, 0], [0, 1], [-1, -1], [-2, -2]])
    found = accuracy_by_class((weight, None), z, labels)
    np.testing.assert_allclose(found.numpy(), [1, 2 / 3, np.nan, 0])
    for_last = accuracy_by_class((weight, torch.tensor([0.0, 0, 0, 9])), z, labels)
    np.testing.assert_allclose(for_last.numpy(), [0, 0, np.nan, 1])


# FFC


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("model", "ridge"), [("mlp", 1e-6), ("mlp", 1e-2), ("cnn", 1e-2), ("mlp", 0.0)])
def test_ffc_is_least_squares_on_the_pooled_samples(model: str, ridge: float, normalise: bool) -> None:
    data = "synthetic:samples=300,test=50,classes=4"
    run = small(method=f"fedavg+ffc:ridge={ridge},normalise={normalise}", model=model, data=data)
    result = run.fit()
    z, labels = features(run, result.weights)
    if normalise:
        z = z / np.linalg.norm(z, axis=1, keepdims=True)
    r = ridge * np.trace(z.T @ z) / WIDTH
    padded = np.concatenate([z, np.sqrt(r) * np.eye(WIDTH)])
    wanted, *_ = np.linalg.lstsq(padded, np.concatenate([np.eye(4)[labels], np.zeros((WIDTH, 4))]))
    found = result.weights["head.weight"].double().numpy().T
    np.testing.assert_allclose(z @ found, z @ wanted, atol=2e-5)
    assert not result.weights["head.bias"].any()
    if ridge == 1e-2:
        np.testing.assert_allclose(found, wanted, atol=2e-5)
        condition = np.linalg.cond(z.T @ z + r * np.eye(WIDTH))
        assert result.exchanges[0]["condition"] == pytest.approx(condition, rel=1e-4)
    plain = small(model=model, data=data).fit().weights
    assert all(torch.equal(result.weights[k], plain[k]) for k in plain if not k.startswith("head."))
    assert not torch.allclose(result.weights["head.weight"], plain["head.weight"], atol=1e-3)


def test_ffcs_predictions_do_not_depend_on_the_length_of_a_feature() -> None:
    run = small(method="ffc", data="synthetic:samples=100,test=80,classes=4")
    result = run.fit()
    z, labels = features(run, result.weights, "test")
    lengths = np.random.default_rng(0).uniform(0.01, 100, (len(z), 1))
    weight = result.weights["head.weight"].double().numpy()
    said = (z * lengths @ weight.T).argmax(1)
    assert result.accuracy == pytest.approx((said == labels).mean())
    inputs, _ = Plain(run, torch.float32).part("test")
    assert (network_of(run, result.weights)(inputs).logits.argmax(1).numpy() == said).all()


def test_ffc_does_not_depend_on_who_holds_what() -> None:
    splits = [("iid", 1), ("quantity:1,min=8", 4), ("pathological:1", 4)]
    found = [
        small(method="ffc:ridge=1e-3", partition=p, clients=c, rounds=1, local_epochs=1, lr=NO_MOVE).fit().weights
        for p, c in splits
    ]
    for weights in found[1:]:
        torch.testing.assert_close(weights["head.weight"], found[0]["head.weight"], rtol=0, atol=1e-5)
    assert float(found[0]["head.weight"].abs().max()) > 0.1


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        ("ffc", 4 * (WIDTH * WIDTH + WIDTH * CLASSES)),
        ("ccvr", 4 * CLASSES * (1 + WIDTH + WIDTH * WIDTH)),
        ("oracle_head", SAMPLES * (WIDTH + 1)),
    ],
)
def test_traffic_of_the_exchange(method: str, numbers: int) -> None:
    result = small(method=method).fit()
    exchange = result.exchanges[0]
    assert [e["exchange"] for e in result.exchanges] == [method]
    assert exchange["bytes_up"] == 4 * numbers and exchange["bytes_down"] == 4 * 4 * (BODY + HEAD)
    plain = small().fit()
    assert result.bytes_up == plain.bytes_up + exchange["bytes_up"]
    assert result.bytes_down == plain.bytes_down + exchange["bytes_down"]
    assert result.accuracy == exchange["accuracy"] and result.loss == exchange["loss"]


# CCVR


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


class Seen:
    """What went into the finish of a :class:`Spying` method."""

    totals: ClassVar[list[Tensors]] = []
    gaussians: ClassVar[list[Gaussians]] = []


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


def broken(run: Federation, weights: Named) -> tuple[Final, np.ndarray, np.ndarray]:
    """A model whose body is a run's and whose head knows nothing."""
    own = {k: v.clone() for k, v in weights.items()}
    own["head.weight"].copy_(torch.randn(own["head.weight"].shape, generator=torch.Generator().manual_seed(7)))
    own["head.bias"].zero_()
    z, labels = features(run, weights, "test")
    return Final(own, network_of(run, weights), 4, np.random.default_rng(0)), z, labels


def accuracy(final: Final, z: np.ndarray, labels: np.ndarray) -> float:
    said = z @ final.weights["head.weight"].double().numpy().T + final.weights["head.bias"].double().numpy()
    return float((said.argmax(1) == labels).mean())


@pytest.mark.parametrize(
    "method",
    [
        "ccvr:lr=0.05",
        "ccvr:tukey=0.5,lr=0.05",
        "ccvr:relu=true,lr=0.05",
        "oracle_head",
        "ffc:ridge=1e-2",
    ],
)
def test_a_broken_head_is_mended(method: str) -> None:
    run = small(method=method, data="synthetic:samples=200,test=100,classes=4")
    weights = run.fit().weights
    final, z, labels = broken(run, weights)
    before = accuracy(final, z, labels)
    total: Tensors = {}
    part = run.settings.method.parts[0][1]
    for said in answers(run, run.state.weights):
        total = {
            k: (torch.cat([total[k], v]) if part.raw_answers else total[k] + v) if total else v for k, v in said.items()
        }
    part.finish(part.exchanges[0], total, final)
    after = accuracy(final, z, labels)
    assert before < 0.5 and after > 0.8


def test_defaults_of_the_refits() -> None:
    assert CCVR() == CCVR(samples=500, epochs=10, lr=0.01, momentum=0.9, batch_size=64, relu=False, tukey=1.0)
    assert OracleHead() == OracleHead(epochs=10, lr=0.01, momentum=0.9, batch_size=64)


# The oracle


@dataclass(frozen=True)
class SpyingOracle(OracleHead):
    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        Seen.totals.append({k: v.clone() for k, v in total.items()})
        super().finish(exchange, total, final)


@pytest.mark.parametrize(("model", "fewest", "epochs"), [("mlp", 10, 3), ("cnn", 10, 3), ("mlp", 30, 5)])
def test_the_oracle_sees_every_sample_once_and_trains_on_it(
    monkeypatch: pytest.MonkeyPatch, model: str, fewest: int, epochs: int
) -> None:
    monkeypatch.setattr("isofed.methods.oracle_head.FEWEST", fewest)  # steps; an epoch has seven
    run = small(method=[SpyingOracle(epochs=3, lr=0.1, batch_size=16)], model=model, rounds=1)
    result = run.fit()
    total, (z, labels) = Seen.totals[-1], features(run, result.weights)
    order = np.concatenate(run.world.clients)
    assert sorted(order) == list(range(SAMPLES))
    np.testing.assert_allclose(total["oracle.features"], z[order], atol=1e-5)
    np.testing.assert_array_equal(total["oracle.labels"], labels[order])
    fresh = small(model=model, rounds=1).fit().weights
    rng = generator(0, "finish/oracle_head")
    orders = [torch.from_numpy(rng.permutation(SAMPLES)) for _ in range(epochs)]
    head = (fresh["head.weight"], fresh["head.bias"])
    wanted = trained_by_torch(head, torch.from_numpy(z[order]), torch.from_numpy(labels[order]), orders, 0.1, 0.9, 16)
    assert distance({k: result.weights[k] for k in wanted}, wanted) < 1e-5
    assert distance({k: fresh[k] for k in wanted}, wanted) > 1e-3
    assert all(torch.equal(result.weights[k], fresh[k]) for k in fresh if not k.startswith("head."))


def test_the_oracle_takes_two_thousand_steps_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def counted(head: Any, z: Tensor, labels: Tensor, batches: Iterable[Tensor], **options: float) -> None:
        assert options == {"lr": 0.01, "momentum": 0.9}
        taken.append(sum(1 for _ in batches))

    monkeypatch.setattr("isofed.methods.oracle_head.train_head", counted)
    small(method="oracle_head", rounds=1).fit()
    small(method="oracle_head:epochs=1500", rounds=1).fit()
    assert taken == [2000, 3000]  # of 100 samples, in batches of 64 and 36


@pytest.mark.parametrize("method", ["oracle_head", "ccvr:samples=30"])
def test_the_seed_decides_the_refit(method: str) -> None:
    one, two, other = (small(method=method, seed=s, rounds=1).fit() for s in (0, 0, 1))
    assert all(v.numpy().tobytes() == two.weights[k].numpy().tobytes() for k, v in one.weights.items())
    assert distance(one.weights, other.weights) > 1e-3
    run = small(method=method, rounds=1)
    part = run.settings.method.parts[0][1]
    said = answers(run, run.state.weights)
    total = {
        k: torch.cat([a[k] for a in said]) if part.raw_answers else sum((a[k] for a in said), said[0][k] * 0)
        for k in said[0]
    }
    heads = []
    for seed in (0, 0, 1):
        final, _, _ = broken(run, one.weights)
        final.rng = np.random.default_rng(seed)
        part.finish(part.exchanges[0], total, final)
        heads.append(final.weights["head.weight"])
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


@pytest.mark.parametrize("method", ["ffc+ccvr", "ccvr+oracle_head", "oracle_head+ffc"])
def test_one_refit_is_enough(method: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(method)
    assert str(caught.value).endswith("both decide the head after the last round; use one of them")


@pytest.mark.parametrize(
    "method",
    ["ccvr:samples=0", "ccvr:tukey=0", "ccvr:tukey=1.5", "ccvr:epochs=0", "oracle_head:momentum=1", "ffc:ridge=-1"],
)
def test_values_that_make_no_sense(method: str) -> None:
    with pytest.raises(UserError, match="must be"):
        parse(method)
