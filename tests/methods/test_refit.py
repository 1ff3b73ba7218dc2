"""What all refits of the head after the last round share: its training, its traffic, its draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isofed.errors import UserError
from isofed.federation import Federation
from isofed.layout import Tensors
from isofed.methods import Final, parse
from isofed.methods.ccvr import CCVR
from isofed.methods.oracle_head import OracleHead
from isofed.methods.refit import accuracy_by_class, head_of, shuffled, train_head
from tests.engine.plain import Named, distance, small
from tests.methods.refits import CLASSES, SAMPLES, WIDTH, answers, features, network_of, trained_by_torch

BODY, HEAD = 64 * 64 + 64 + 64 * 64 + 64, 4 * 64 + 4  # the mlp's parameters


# The training of a head


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


# All refits


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
    assert exchange["bytes_up"] == 8 * numbers and exchange["bytes_down"] == 4 * 4 * (BODY + HEAD)
    plain = small().fit()
    assert result.bytes_up == plain.bytes_up + exchange["bytes_up"]
    assert result.bytes_down == plain.bytes_down + exchange["bytes_down"]
    assert result.accuracy == exchange["accuracy"] and result.loss == exchange["loss"]


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


@pytest.mark.parametrize("method", ["oracle_head", "ccvr:epochs=3"])
def test_the_threads_of_the_server_do_not_decide_the_refit(method: str) -> None:
    before, heads = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            run = small(method=method, model="cnn", data="synthetic:samples=600,test=20,classes=10", rounds=1)
            heads.append(run.fit().weights["head.weight"])
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*heads)


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
