"""FedExP: the server's step against numpy, on updates computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from isofed.federation import Federation
from isofed.methods import Round, parse
from tests.engine.plain import TOLERANCE, Named, Plain, distance, mean, participants, small
from tests.methods.written import same_bytes, visit

APART: dict[str, Any] = {"partition": "pathological:1", "lr": 0.3}  # a class each: clients that pull in all directions


def factor(updates: list[np.ndarray], weights: list[float], eps: float = 0.001) -> float:
    shares = np.array(weights) / np.sum(weights)
    total = sum(p * u for p, u in zip(shares, updates, strict=True))
    squared = sum(p * np.sum(u * u) for p, u in zip(shares, updates, strict=True))
    return max(1.0, float(squared / (2 * (np.sum(total * total) + eps))))


def by_hand(run: Federation, eps: float = 0.001) -> tuple[Named, list[float]]:
    """The final model and the factor of each round; statistics of batch norm are plainly averaged."""
    plain, factors = Plain(run), []
    server, names = plain.start(), plain.trained()
    for round in range(1, run.settings.rounds + 1):
        who = participants(run, round)
        weights = [1.0 if run.settings.weighting == "uniform" else float(plain.sizes[k]) for k in who]
        models = [plain.local(server, round, k)[0] for k in who]
        updates = [np.concatenate([(m[n] - server[n]).flatten().numpy() for n in names]) for m in models]
        factors.append(factor(updates, weights, eps))
        averaged = mean(models, weights)
        server = averaged | {n: server[n] + factors[-1] * (averaged[n] - server[n]) for n in names}
    return server, factors


@pytest.mark.parametrize(
    ("method", "settings", "eps"),
    [
        ("fedexp", {**APART, "rounds": 3}, 0.001),
        ("fedexp:eps=0", {**APART, "model": "cnn", "lr": 0.03}, 0.0),
        ("fedexp:eps=0.3", APART, 0.3),
        ("fedexp", {**APART, "partition": "quantity:1,min=8", "participation": 0.5}, 0.001),
        ("fedexp", {"partition": "dirichlet:0.05,min=5", "lr": 0.3, "weighting": "uniform"}, 0.001),
    ],
)
def test_fedexp(method: str, settings: dict[str, Any], eps: float) -> None:
    run = small(method=method, **settings)
    wanted, factors = by_hand(run, eps)
    found = run.fit().weights
    assert distance(found, wanted) < TOLERANCE
    assert min(factors) >= 1
    if "pathological" in settings["partition"]:
        assert max(factors) > 1.1  # there was something to lengthen
        assert distance(found, small(**settings).fit().weights) > 1e-3


def made(updates: np.ndarray, weights: np.ndarray) -> Round:
    shares = weights / weights.sum()
    return Round(
        number=1,
        update=torch.from_numpy(shares @ updates),
        weights=torch.zeros(updates.shape[1], dtype=torch.float64),
        mean={"fedexp.squared": torch.tensor([float(shares @ (updates**2).sum(1))], dtype=torch.float64)},
        sum={},
        server={},
        clients=len(updates),
        population=len(updates),
        fraction=1.0,
    )


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 10.0])
def test_the_factor_against_numpy(spread: float) -> None:
    rng = np.random.default_rng(int(10 * spread))
    method = parse("fedexp")
    seen = []
    for count in (1, 2, 7):
        updates = rng.normal(size=50) + spread * rng.normal(size=(count, 50))
        weights = rng.integers(1, 30, count).astype(np.float64)
        round = made(updates, weights)
        before = round.update.clone()
        method.aggregate(round)
        wanted = factor(list(updates), list(weights))
        torch.testing.assert_close(round.update, wanted * before, rtol=1e-12, atol=0)
        assert wanted >= 1
        seen.append(wanted)
    assert seen[0] == 1  # one client has nobody to disagree with
    assert (max(seen) > 1) == (spread >= 10)


def test_updates_that_cancel() -> None:
    one = np.array([[3.0, -4.0], [-3.0, 4.0]])
    for method, wanted in (("fedexp", 0.0), ("fedexp:eps=0", 0.0)):
        round = made(one, np.ones(2))
        parse(method).aggregate(round)
        assert float(round.update.abs().max()) == wanted  # finite, and nowhere to go
    nothing = made(np.zeros((2, 2)), np.ones(2))
    parse("fedexp:eps=0").aggregate(nothing)
    assert (nothing.update == 0).all()


def test_clients_that_agree_make_it_fedavg() -> None:
    settings: dict[str, Any] = {"clients": 1, "partition": "iid"}
    assert same_bytes(small(method="fedexp", **settings), small(**settings))
    same = np.tile(np.random.default_rng(0).normal(size=20), (5, 1))
    round = made(same, np.arange(1.0, 6.0))
    parse("fedexp").aggregate(round)
    torch.testing.assert_close(round.update, torch.from_numpy(same[0]), rtol=1e-12, atol=0)
    # The IID clients of a federation agree well enough, too.
    assert by_hand(small(method="fedexp", partition="iid", rounds=1))[1] == [1.0]


def test_a_client_sends_one_number_more() -> None:
    run, base = small(method="fedexp", **APART), small(**APART)
    outcome = visit(run, 1)
    assert outcome.mean["fedexp.squared"].shape == (1,)
    assert float(outcome.mean["fedexp.squared"]) == pytest.approx(float(outcome.update.double().square().sum()))
    assert run.fit().bytes_up == base.fit().bytes_up + 8 * 4 * 2  # a float64 each, four clients, two rounds


def test_a_large_eps_makes_it_fedavg() -> None:
    assert same_bytes(small(method="fedexp:eps=1e6", **APART), small(**APART))
    assert not same_bytes(small(method="fedexp", **APART), small(**APART))


def test_the_place_in_a_composition_does_not_matter() -> None:
    # FedNova divides updates by the number of steps; the length that counts is that of the way a client went.
    settings: dict[str, Any] = {"partition": "dirichlet:0.05,min=5", "lr": 0.3, "batch_size": 8}
    left, right = small(method="fedexp+fednova", **settings), small(method="fednova+fedexp", **settings)
    nova = small(method="fednova", **settings)
    assert len({visit(left, k).steps for k in range(4)}) > 1
    assert same_bytes(left, right)
    assert distance(left.fit().weights, nova.fit().weights) > 1e-3
