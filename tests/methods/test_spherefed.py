"""SphereFed: a head that stays what it is, a loss written out, the ablations of its paper, and the refit at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from isofed.draws import generator
from isofed.errors import UserError
from isofed.federation import Federation
from isofed.layout import Policy
from isofed.methods import parse
from isofed.models import load
from tests.engine.plain import TOLERANCE, Named, Plain, distance, mean, small
from tests.methods.refits import features, network_of

BODY = 64 * 64 + 64 + 64 * 64 + 64  # the mlp's parameters on 8x8 pictures, without its head
NO_MOVE = 1e-30  # a learning rate with which no float32 weight moves


def unit_features(run: Federation, weights: Named, part: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """What the final extractor makes of a part, scaled to length 1; the labels."""
    z, labels = features(run, weights, part)
    return z / np.linalg.norm(z, axis=1, keepdims=True), labels


# The head


def test_the_head_is_orthonormal_and_made_from_the_seed() -> None:
    run = small(method="spherefed")
    head = run.world.network().head
    assert isinstance(head, torch.nn.Linear) and head.bias is None
    assert not head.weight.requires_grad
    torch.testing.assert_close(head.weight @ head.weight.T, torch.eye(4), rtol=0, atol=1e-6)
    again, other = small(method="spherefed").world.network(), small(method="spherefed", seed=1).world.network()
    assert torch.equal(head.weight, again.get_parameter("head.weight"))
    assert not torch.allclose(head.weight, other.get_parameter("head.weight"), atol=0.01)


@pytest.mark.parametrize("head", ["orthonormal", "random"])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_head_is_never_trained_or_decayed(head: str, model: str) -> None:
    run = small(method=f"spherefed:head={head},calibrate=none", model=model, momentum=0.9, weight_decay=0.1, lr=1.0)
    before = {k: v.clone() for k, v in run.world.network().state_dict().items()}
    after = run.fit().weights
    assert after.keys() == before.keys()
    for name in before:
        kept = before[name].numpy().tobytes() == after[name].contiguous().numpy().tobytes()
        assert kept == name.startswith("head."), name


def test_a_random_head_is_the_networks_own() -> None:
    run = small(method="spherefed:head=random,calibrate=none", lr=NO_MOVE, rounds=1)
    assert distance(run.fit().weights, small(lr=NO_MOVE, rounds=1).fit().weights) == 0
    assert run.layout.count(Policy.FIXED) == 4 * 64 + 4


def test_the_head_travels_once() -> None:
    run = small(method="spherefed:calibrate=none", rounds=3)
    assert run.layout.count(Policy.SHARED) == BODY and run.layout.count(Policy.FIXED) == 4 * 64
    assert {e.name for e in run.layout.entries if e.policy is Policy.FIXED} == {"head.weight"}
    run.fit()
    assert [line["bytes_up"] for line in run.history] == [4 * 4 * BODY] * 3
    assert [line["bytes_down"] for line in run.history] == [4 * 4 * (BODY + 4 * 64), 4 * 4 * BODY, 4 * 4 * BODY]


def test_a_client_that_comes_later_gets_the_head_when_it_comes() -> None:
    run = small(method="spherefed:calibrate=none", rounds=4, participation=0.5)
    run.fit()
    extra = [line["bytes_down"] - 2 * 4 * BODY for line in run.history]
    assert sum(extra) == 4 * 4 * 64 * len(run.state.clients)
    assert extra[0] == 2 * 4 * 4 * 64 and len(run.state.clients) > 2


def test_logits_are_cosines() -> None:
    run = small(method="spherefed:calibrate=none")
    network = network_of(run, run.fit().weights)
    weight = network.get_parameter("head.weight")
    for size in (1.0, 1000.0):
        output = network(size * torch.randn(200, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
        assert float(output.logits.detach().abs().max()) <= 1 + 1e-6
        assert float(output.logits.detach().norm(dim=1).max()) <= 1 + 1e-6  # the rows are orthonormal
        cosines = F.cosine_similarity(output.features[:, None], weight[None], dim=2)
        torch.testing.assert_close(output.logits, cosines)


# Training, against the loss written out

Loss = Callable[[Tensor, Tensor], Tensor]  # of logits and wanted probabilities


def squared(logits: Tensor, wanted: Tensor) -> Tensor:
    samples, classes = logits.shape
    return (logits - wanted).square().sum() / (samples * classes)


def entropy(temperature: float) -> Loss:
    def loss(logits: Tensor, wanted: Tensor) -> Tensor:
        scaled = logits / temperature
        return -(wanted * (scaled - scaled.logsumexp(1, keepdim=True))).sum() / len(logits)

    return loss


def by_hand(run: Federation, loss: Loss, normalise: bool, trained: bool, gamma: float = 0.0) -> tuple[Named, float]:
    """All rounds in float64; the model, and the last round's mean loss over the clients."""
    plain, s = Plain(run), run.settings
    network, classes = plain.network, len(run.world.dataset.classes)
    network.head = torch.nn.Linear(network.width, classes, bias="head.bias" in run.world.network().state_dict())
    network.double().head.load_state_dict(run.world.network().head.state_dict())
    server, said = plain.start(), 0.0
    for round in range(1, s.rounds + 1):
        models, losses = [], []
        for client in range(len(plain.sizes)):
            network.load_state_dict(server)
            network.train()
            named = [p for n, p in network.named_parameters() if trained or not n.startswith("head.")]
            optimiser = torch.optim.SGD(named, lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay)
            batches = plain.batches(round, client)
            rng = generator(s.seed, "method/mixup", round, client)
            if gamma:
                shares = rng.beta(gamma, gamma, len(batches)).astype(np.float32).astype(np.float64)
                keys = rng.random((len(batches), s.batch_size), dtype=np.float32)
            total = 0.0
            for number, (inputs, labels) in enumerate(batches):
                wanted = F.one_hot(labels, classes).double()
                if gamma:
                    partner = torch.from_numpy(np.argsort(keys[number, : len(labels)], kind="stable"))
                    share = shares[number]
                    inputs = share * inputs + (1 - share) * inputs[partner]
                    wanted = share * wanted + (1 - share) * wanted[partner]
                z = network(inputs).features
                if normalise:
                    z = z / z.square().sum(1, keepdim=True).sqrt()
                value = loss(network.head(z), wanted)
                optimiser.zero_grad()
                value.backward()
                optimiser.step()
                total += float(value.detach()) * len(labels)
            models.append(plain.start())
            losses.append(total / sum(len(labels) for _, labels in batches))
        server = mean(models, [float(n) for n in plain.sizes])
        said = float(np.average(losses, weights=plain.sizes))
    return server, said


CASES: list[tuple[str, Loss, dict[str, Any]]] = [
    ("spherefed:calibrate=none", squared, {}),
    ("spherefed:calibrate=none,head=random", squared, {}),
    ("spherefed:calibrate=none,normalise=false,head=trained", squared, {"normalise": False, "trained": True}),
    ("spherefed:calibrate=none,normalise=false", squared, {"normalise": False}),
    ("spherefed:calibrate=none,loss=ce", entropy(0.1), {}),
    ("spherefed:calibrate=none,loss=ce,temperature=0.5,head=trained", entropy(0.5), {"trained": True}),
    ("spherefed:calibrate=none,loss=ce,normalise=false", entropy(1.0), {"normalise": False}),
    ("spherefed:calibrate=none,loss=ce,normalise=false,temperature=2", entropy(2.0), {"normalise": False}),
    ("mixup:gamma=0.7+spherefed:calibrate=none", squared, {"gamma": 0.7}),
    ("spherefed:calibrate=none,loss=ce+mixup:gamma=0.7", entropy(0.1), {"gamma": 0.7}),
]


@pytest.mark.parametrize(("method", "loss", "known"), CASES, ids=[c[0] for c in CASES])
def test_two_rounds_written_out(method: str, loss: Loss, known: dict[str, Any]) -> None:
    run = small(method=method, momentum=0.5, weight_decay=0.01)
    found = run.fit().weights
    wanted, said = by_hand(run, loss, known.get("normalise", True), known.get("trained", False), known.get("gamma", 0))
    assert distance(found, wanted) < TOLERANCE
    assert run.history[-1]["local_loss"] == pytest.approx(said, rel=1e-5)
    assert distance(wanted, run.world.network().state_dict()) > 1e-3


def test_two_rounds_written_out_with_batch_norm() -> None:
    run = small(method="spherefed:calibrate=none", model="cnn", weight_decay=0.01, lr=0.5)
    wanted, said = by_hand(run, squared, normalise=True, trained=False)
    assert distance(run.fit().weights, wanted) < 3 * TOLERANCE
    assert run.history[-1]["local_loss"] == pytest.approx(said, rel=1e-5)


def test_a_trained_head_is_trained() -> None:
    run = small(method="spherefed:head=trained,calibrate=none")
    assert run.layout.count(Policy.FIXED) == 0 and run.layout.count(Policy.SHARED) == BODY + 4 * 64 + 4
    before = run.world.network().get_parameter("head.weight").detach().clone()
    assert not torch.allclose(run.fit().weights["head.weight"], before, atol=1e-4)


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_with_everything_off_it_is_fedavg_to_the_last_bit(model: str) -> None:
    off = small(method="spherefed:head=trained,normalise=false,loss=ce,calibrate=none", model=model, momentum=0.9)
    plain = small(model=model, momentum=0.9)
    one, two = off.fit(), plain.fit()
    assert off.state.weights.numpy().tobytes() == plain.state.weights.numpy().tobytes()
    skip = {"seconds", "evaluate_seconds"}
    for mine, its in zip(one.history, two.history, strict=True):
        assert {k: v for k, v in mine.items() if k not in skip} == {k: v for k, v in its.items() if k not in skip}
    assert one.exchanges == [] and (one.bytes_up, one.bytes_down) == (two.bytes_up, two.bytes_down)


@pytest.mark.parametrize("part", ["head=orthonormal", "normalise=true", "loss=mse"])
def test_each_of_its_parts_does_something(part: str) -> None:
    off = {"head": "trained", "normalise": "false", "loss": "ce", "calibrate": "none"}
    key, _, value = part.partition("=")
    text = ",".join(f"{k}={v}" for k, v in (off | {key: value}).items())
    found = small(method=f"spherefed:{text}").fit().weights
    plain = small().fit().weights
    body = [k for k in plain if not k.startswith("head.")]
    assert distance({k: found[k] for k in body}, {k: plain[k] for k in body}) > 1e-3


# The refit at the end


@pytest.mark.parametrize("ridge", [1e-6, 1e-2, 0.0])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_refit_is_least_squares_on_the_pooled_samples(model: str, ridge: float) -> None:
    data = "synthetic:samples=300,test=50,classes=4"
    run = small(method=f"spherefed:ridge={ridge}", model=model, data=data, local_epochs=1, lr=0.5)
    result = run.fit()
    z, labels = unit_features(run, result.weights)
    V = z.T @ z
    r = ridge * np.trace(V) / 64
    padded = np.concatenate([z, np.sqrt(r) * np.eye(64)])
    wanted, *_ = np.linalg.lstsq(padded, np.concatenate([np.eye(4)[labels], np.zeros((64, 4))]))
    found = result.weights["head.weight"].double().numpy().T
    np.testing.assert_allclose(z @ found, z @ wanted, atol=2e-5)
    if ridge == 1e-2:  # otherwise directions that hardly occur are not determined by float32 features
        np.testing.assert_allclose(found, wanted, atol=2e-5)
        condition = np.linalg.cond(V + r * np.eye(64))
        assert result.exchanges[0]["condition"] == pytest.approx(condition, rel=1e-4)
    assert np.abs(z @ found - np.eye(4)[labels]).mean() < np.abs(z @ run_head(run).T - np.eye(4)[labels]).mean()


def run_head(run: Federation) -> np.ndarray:
    return run.world.network().get_parameter("head.weight").detach().double().numpy()


def test_the_refitted_model_is_what_is_judged_and_kept() -> None:
    run = small(method="spherefed", data="synthetic:samples=100,test=60,classes=4")
    result = run.fit()
    z, labels = unit_features(run, result.weights, "test")
    right = (z @ result.weights["head.weight"].double().numpy().T).argmax(1) == labels
    assert result.accuracy == result.exchanges[0]["accuracy"] == pytest.approx(right.mean())
    assert result.accuracy != run.history[-1]["accuracy"]
    assert result.weights.keys() == run.world.network().state_dict().keys()
    body = [k for k in result.weights if k != "head.weight"]
    last = run.layout.views(run.state.weights)
    assert all(torch.equal(result.weights[k], last[k]) for k in body)  # only the head is refitted
    assert torch.equal(last["head.weight"], run.world.network().get_parameter("head.weight"))


def test_what_the_refit_costs() -> None:
    run = small(method="spherefed")
    exchange = run.fit().exchanges[0]
    assert exchange["exchange"] == "ffc"
    assert exchange["bytes_up"] == 8 * 4 * (64 * 64 + 64 * 4)
    assert exchange["bytes_down"] == 4 * 4 * BODY
    assert 1 < exchange["condition"] < 65 / 1e-6  # the ridge bounds it: the largest eigenvalue is at most 64 means


def test_the_refit_does_not_depend_on_who_holds_what() -> None:
    splits = [("iid", 1), ("iid", 5), ("quantity:1,min=8", 4), ("pathological:2", 4)]
    found = []
    for partition, clients in splits:
        settings: dict[str, Any] = {"rounds": 1, "local_epochs": 1, "lr": NO_MOVE}
        run = small(method="spherefed:ridge=1e-3", partition=partition, clients=clients, **settings)
        found.append(run.fit())
    for result in found[1:]:
        body = [k for k in result.weights if k != "head.weight"]
        assert all(torch.equal(result.weights[k], found[0].weights[k]) for k in body)  # the same extractor
        head, first = result.weights["head.weight"], found[0].weights["head.weight"]
        # A sample's feature may differ in its last bit with the size of its batch; the ridge bounds what comes of it.
        torch.testing.assert_close(head, first, rtol=0, atol=1e-5)
        assert result.exchanges[0]["condition"] == pytest.approx(found[0].exchanges[0]["condition"], rel=1e-4)
        assert result.accuracy == found[0].accuracy


@pytest.mark.parametrize("method", ["spherefed", "spherefed:head=random", "moon+spherefed"])
def test_a_stored_model_gives_the_same_logits(tmp_path: Any, method: str) -> None:
    run = small(method=method, rounds=1, out=tmp_path / "run")
    result = run.fit()
    inputs, _ = Plain(run, torch.float32).part("test")
    found = load(tmp_path / "run").eval()(inputs).logits
    torch.testing.assert_close(found, network_of(run, result.weights)(inputs).logits)


# With others


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("spherefed+ccvr", "both decide the head after the last round; use one of them, or spherefed:calibrate=none"),
        ("oracle_head+spherefed", "after the last round; use one of them, or spherefed:calibrate=none"),
        ("spherefed+ffc", "after the last round; use one of them, or spherefed:calibrate=none"),
        ("spherefed+freeze", "'spherefed' and 'freeze' both decide the classifier head; use one of them"),
        ("spherefed:calibrate=none+fedbabu", "both decide the classifier head"),
        ("fedlc+spherefed", "both decide the base loss"),
    ],
)
def test_who_it_does_not_go_with(method: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(method)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_without_its_own_refit_another_can_follow() -> None:
    run = small(method="spherefed:calibrate=none+ccvr", lr=0.5)
    result = run.fit()
    assert [e["exchange"] for e in result.exchanges] == ["ccvr"]
    assert not torch.equal(result.weights["head.weight"], run.world.network().get_parameter("head.weight"))


@pytest.mark.parametrize("head", ["orthonormal", "random"])
def test_the_head_is_put_on_moons_features_in_either_order(head: str) -> None:
    one, two = (small(method=m).world.network() for m in (f"moon+spherefed:head={head}", f"spherefed:head={head}+moon"))
    assert one.state_dict().keys() == two.state_dict().keys()
    assert all(torch.equal(v, two.state_dict()[k]) for k, v in one.state_dict().items())
    assert one.width == two.width == 256 and one.normalise and two.normalise
    weight = one.get_parameter("head.weight")
    assert weight.shape == (4, 256) and not weight.requires_grad and not two.get_parameter("head.weight").requires_grad
    if head == "orthonormal":
        torch.testing.assert_close(weight @ weight.T, torch.eye(4), rtol=0, atol=1e-6)
        assert "head.bias" not in one.state_dict()
        output = one(torch.randn(3, 1, 8, 8))
        torch.testing.assert_close(output.logits, F.normalize(output.features) @ weight.T)


def test_it_trains_with_moon() -> None:
    one, two = small(method="moon+spherefed", lr=0.5), small(method="spherefed+moon", lr=0.5)
    assert distance(one.fit().weights, two.fit().weights) == 0
    assert one.state.weights.numpy().tobytes() == two.state.weights.numpy().tobytes()
    assert one.layout.count(Policy.SHARED) == BODY + (64 * 64 + 64) + (64 * 256 + 256)
