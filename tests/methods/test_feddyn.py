"""FedDyn, whole, against the paper's form: g_k, h and the dynamic regulariser, written out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from isofed.engine.replica import Replica
from isofed.federation import Federation
from isofed.methods import Method, Round, Run, Visit, parse
from tests.engine.plain import (
    TOLERANCE,
    Gradients,
    Named,
    Plain,
    distance,
    mean,
    participants,
    small,
    vector,
    zeros,
)


def by_hand(run: Federation, alpha: float) -> tuple[Named, Named, Named, dict[int, Named]]:
    """What is sent, what is judged, the paper's h and the clients' g_k; means by the run's weighting."""
    plain, s = Plain(run), run.settings
    sent, names = plain.start(), plain.trained()
    h, g = zeros(sent, names), {k: zeros(sent, names) for k in range(len(plain.sizes))}
    judged = sent
    shares = [n / sum(plain.sizes) for n in plain.sizes]
    if s.weighting == "uniform":
        shares = [1 / len(shares)] * len(shares)
    for round in range(1, s.rounds + 1):
        who = participants(run, round)
        models = []
        for k in who:
            start = sent

            def correct(weights: Named, gradients: Gradients, k: int = k, start: Named = start) -> None:
                for name, gradient in gradients.items():  # of -<g_k, w> + (alpha/2) ||w - w_t||^2
                    gradient += -g[k][name] + alpha * (weights[name] - start[name])

            model, _ = plain.local(sent, round, k, correct)
            models.append(model)
            g[k] = {n: g[k][n] - alpha * (model[n] - sent[n]) for n in names}
        for k, model in zip(who, models, strict=True):
            h = {n: h[n] - alpha * shares[k] * (model[n] - sent[n]) for n in names}
        judged = mean(models, [1.0 if s.weighting == "uniform" else float(plain.sizes[k]) for k in who])
        sent = judged | {n: judged[n] - h[n] / alpha for n in names}
    return sent, judged, h, g


@pytest.mark.parametrize(
    "settings",
    [
        {"rounds": 3},
        {"rounds": 3, "participation": 0.5},
        {"rounds": 3, "participation": 0.5, "weighting": "uniform"},
        {"model": "cnn", "participation": 0.75},
        {"momentum": 0.9, "clip": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("alpha", [0.2])
def test_feddyn(settings: dict[str, Any], alpha: float) -> None:
    run = small(method=f"feddyn:alpha={alpha}", **settings)
    result = run.fit()
    sent, judged, h, g = by_hand(run, alpha)
    assert distance(result.weights, judged) < TOLERANCE
    assert distance(run.layout.views(run.state.weights), sent) < TOLERANCE
    assert distance(vector(run, run.state.server["feddyn.h"] * -alpha), h) < TOLERANCE
    for k, state in run.state.clients.items():
        assert distance(vector(run, state["feddyn.hk"] * -alpha), g[k]) < TOLERANCE
    assert distance(sent, judged) > 1e-3  # the two really differ


def test_the_weights_that_are_sent_can_be_judged() -> None:
    mean_, sent = small(method="feddyn:alpha=0.2"), small(method="feddyn:alpha=0.2,evaluate=sent")
    result, other = mean_.fit(), sent.fit()
    assert (
        mean_.state.weights.numpy().tobytes() == sent.state.weights.numpy().tobytes()
    )  # training does not depend on it
    assert distance(other.weights, sent.layout.views(sent.state.weights)) == 0
    assert distance(result.weights, other.weights) > 1e-3


def test_before_any_client_has_answered_the_first_weights_are_judged() -> None:
    # As after a round that was skipped because too few sites answered.
    run = small(method="feddyn")
    assert run._judged(run.state) is run.state.weights
    run.fit()
    judged = run._judged(run.state)[run.layout.shared_trained]
    assert torch.equal(judged, run.state.server["feddyn.mean"].float())


def test_gradient_is_that_of_the_stated_loss() -> None:
    run = small(method="feddyn:alpha=0.3", model="cnn")
    replica = Replica(run.world, torch.device("cpu"))
    step = replica.local.step
    noise = torch.Generator().manual_seed(1)
    for tensor in (step.weights, step.start, step.grad, step.state["feddyn.hk"]):
        tensor.copy_(torch.randn(tensor.shape, generator=noise))
    step.state["feddyn.alpha"].fill_(0.3)
    before, weights = step.grad.clone(), step.weights.clone().requires_grad_()
    term = 0.3 * (weights * step.state["feddyn.hk"]).sum() + 0.3 / 2 * (weights - step.start).square().sum()
    (wanted,) = torch.autograd.grad(term, weights)
    run.settings.method.gradient(step)
    torch.testing.assert_close(step.grad, before + wanted)


def test_fixed_point() -> None:
    method = parse("feddyn:alpha=0.1")
    server = {k: v.clone() for k, v in small(method=method).state.server.items()}
    noise = torch.Generator().manual_seed(2)
    server["feddyn.h"].copy_(torch.randn(server["feddyn.h"].shape, generator=noise, dtype=torch.float64))
    h = server["feddyn.h"].clone()
    still = torch.zeros_like(h)
    round = Round(3, still, torch.zeros_like(h), {}, {}, server, 2, 4, 0.5)
    method.aggregate(round)
    assert torch.equal(server["feddyn.h"], h)
    assert torch.equal(round.update, h)  # the mean model did not move, so what is sent is it plus h


def test_without_alpha_the_first_round_is_judged_like_fedavgs() -> None:
    run, avg = small(method="feddyn:alpha=0", rounds=1, model="cnn"), small(rounds=1, model="cnn")
    found, wanted = run.fit().weights, avg.fit().weights
    assert all(torch.equal(found[k], wanted[k]) for k in wanted)
    nearly = small(method="feddyn:alpha=1e-7", rounds=1, model="cnn").fit().weights
    assert distance(nearly, wanted) < 1e-6


def test_server_h_is_the_populations_mean_of_the_clients_own() -> None:
    run = small(method="feddyn:alpha=0.1", participation=0.5, rounds=4)
    run.fit()
    shares = run.world.fractions()
    wanted = sum(shares[k] * s["feddyn.hk"].double() for k, s in run.state.clients.items())
    torch.testing.assert_close(run.state.server["feddyn.h"], wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_scaled_alpha_follows_the_clients_size(weighting: str) -> None:
    # alpha_k = alpha / (n_k / mean n): the size of the data, whatever the weighting of the means. The official code
    # scales so and averages uniformly.
    run = small(method="feddyn:alpha=0.2,scale_alpha=true", weighting=weighting, rounds=1)
    run.fit()
    sizes = Plain(run).sizes
    for k, state in run.state.clients.items():
        wanted = 0.2 / (sizes[k] / (sum(sizes) / len(sizes)))
        assert float(state["feddyn.alpha"]) == pytest.approx(wanted, rel=1e-6)


def test_scaled_alpha_is_the_pull_that_others_reckon_with() -> None:
    @dataclass(frozen=True)
    class Look(Method):
        def client_state(self, run: Run) -> dict[str, torch.Tensor]:
            return {"look.pull": torch.zeros(1)}

        def end(self, visit: Visit) -> None:
            visit.state["look.pull"].fill_(visit.pull)

    run = small(method=[Look(), "feddyn:alpha=0.2,scale_alpha=true", "fedprox:mu=0.1"], rounds=1)
    run.fit()
    for state in run.state.clients.values():
        assert float(state["look.pull"]) == pytest.approx(float(state["feddyn.alpha"]) + 0.1, rel=1e-6)


def test_scaled_alpha_counts_the_clients_samples_only(tmp_path: Path) -> None:
    # A split from a file need not use all samples: the mean size is that of the clients, 10 and 30 here.
    (tmp_path / "split.json").write_text(str([list(range(10)), list(range(10, 40))]))
    split = f"from_file:{tmp_path / 'split.json'}"
    run = small(method="feddyn:alpha=0.2,scale_alpha=true", partition=split, clients=None, rounds=1)
    run.fit()
    found = [float(run.state.clients[k]["feddyn.alpha"]) for k in (0, 1)]
    assert found == pytest.approx([0.2 / (10 / 20), 0.2 / (30 / 20)], rel=1e-6)


def test_communication_is_fedavgs() -> None:
    avg, dyn = small(rounds=1).fit(), small(rounds=1, method="feddyn").fit()
    assert (dyn.bytes_up, dyn.bytes_down) == (avg.bytes_up, avg.bytes_down)
