"""FedAvg, FedProx and central training, whole, against a federation written out plainly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isofed.engine.replica import Replica
from isofed.federation import Federation
from tests.engine.plain import TOLERANCE, Correction, Gradients, Named, Plain, distance, mean, participants, small


def pull(mu: float, start: Named) -> Correction:
    def correct(weights: Named, gradients: Gradients) -> None:
        for name, gradient in gradients.items():
            gradient += mu * (weights[name] - start[name])

    return correct


def by_hand(run: Federation, mu: float = 0.0) -> Named:
    plain = Plain(run)
    server = plain.start()
    for round in range(1, run.settings.rounds + 1):
        who = participants(run, round)
        models = [plain.local(server, round, c, pull(mu, server) if mu else None)[0] for c in who]
        counts = [1.0 if run.settings.weighting == "uniform" else float(plain.sizes[c]) for c in who]
        server = mean(models, counts)
    return server


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model": "cnn"},
        {"model": "cnn", "norm": "group:2", "momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "weight_decay": 0.01, "clip": 1.0},
        {"weighting": "uniform", "participation": 0.5, "rounds": 3},
        {"local_steps": 3, "local_epochs": None, "participation": 0.75},
        {"last_batch": "drop", "batch_size": 8},
        {"seed": 7, "partition": "dirichlet:0.5,min=8"},
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()) or "default",
)
def test_fedavg_is_the_mean_of_plainly_trained_clients(settings: dict[str, Any]) -> None:
    run = small(**settings)
    found = run.fit().weights
    wanted = by_hand(run)
    assert distance(found, wanted) < TOLERANCE
    assert distance(found, Plain(run).start()) > 1e-2  # it did learn something
    if not settings:
        assert len(set(Plain(run).sizes)) > 1  # so that weighting matters


def test_weights_matter() -> None:
    uniform, counted = small(weighting="uniform").fit().weights, small().fit().weights
    assert distance(uniform, counted) > 1e-3


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_fedprox_pulls_towards_the_received_weights(model: str) -> None:
    run = small(method="fedprox:mu=0.7", model=model, momentum=0.5)
    found = run.fit().weights
    assert distance(found, by_hand(run, mu=0.7)) < TOLERANCE
    assert distance(found, by_hand(run)) > 1e-3


def test_fedprox_gradient_is_that_of_its_loss() -> None:
    run = small(method="fedprox:mu=0.3", model="cnn")
    replica = Replica(run.world, torch.device("cpu"))
    step = replica.local.step
    noise = torch.Generator().manual_seed(1)
    step.weights.copy_(torch.randn(step.weights.shape, generator=noise))
    step.start.copy_(torch.randn(step.start.shape, generator=noise))
    step.grad.copy_(torch.randn(step.grad.shape, generator=noise))
    before = step.grad.clone()
    weights = step.weights.clone().requires_grad_()
    (0.3 / 2 * (weights - step.start).square().sum()).backward()
    assert weights.grad is not None
    run.settings.method.gradient(step)
    torch.testing.assert_close(step.grad, before + weights.grad)


def test_fedprox_reaches_batch_norms_scales_too() -> None:
    replica = Replica(small(method="fedprox:mu=1", model="cnn").world, torch.device("cpu"))
    step = replica.local.step
    step.start.zero_()
    step.weights.fill_(2.0)
    step.grad.zero_()
    replica.local.method.gradient(step)
    assert float(step.named(step.grad)["stages.stage1.1.weight"].min()) == 2.0


def test_fedprox_without_strength_is_fedavg_to_the_bit() -> None:
    for settings in ({"model": "cnn", "momentum": 0.9}, {"model": "mlp", "weight_decay": 0.1, "clip": 0.5}):
        plain, prox = small(**settings), small(method="fedprox:mu=0", **settings)
        plain.fit(), prox.fit()
        assert plain.state.weights.numpy().tobytes() == prox.state.weights.numpy().tobytes()


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_central_is_one_model_on_all_data(model: str) -> None:
    run = small(method="central", model=model, momentum=0.9, rounds=2, local_epochs=1)
    assert [len(c) for c in run.world.clients] == [100]
    result = run.fit()
    plain = Plain(run)
    weights = plain.start()
    for round in (1, 2):  # the optimiser starts afresh in each round, as at a client
        weights, _ = plain.local(weights, round, 0)
    assert distance(result.weights, weights) < TOLERANCE
    assert (result.bytes_up, result.bytes_down) == (0, 0)


def test_one_client_that_holds_everything_trains_like_central() -> None:
    # Not the same bits: the samples lie in another order before they are shuffled.
    result = small(clients=1, partition="iid", rounds=3).fit()
    assert result.history[0]["samples"] == 200
    assert small(method="central", rounds=3).fit().history[0]["samples"] == 200
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]
