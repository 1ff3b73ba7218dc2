"""FedNova against its formulas, on clients of different sizes."""

from __future__ import annotations

from typing import Any

import pytest

from isofed.errors import UserError
from isofed.federation import Federation
from tests.engine.plain import TOLERANCE, Gradients, Named, Plain, distance, mean, participants, small


def norm_of_a(tau: int, rho: float, eta_mu: float) -> float:
    """||a||_1 as the paper has it: a closed form with momentum, a recursion with a proximal term."""
    if rho:
        assert not eta_mu
        return (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    a = 0.0
    for _ in range(tau):
        a = a * (1 - eta_mu) + 1
    return a


def by_hand(run: Federation, mu: float = 0.0, effective: str = "response", server_beta: float = 0.0) -> Named:
    plain = Plain(run)
    server, names = plain.start(), plain.trained()
    velocity = {n: 0 * server[n] for n in names}
    for round in range(1, run.settings.rounds + 1):
        who = participants(run, round)
        counts = [float(plain.sizes[c]) for c in who]
        shares = [n / sum(counts) for n in counts]
        models, progress, taus = [], [], []
        for client in who:
            start = server

            def pull(weights: Named, gradients: Gradients, start: Named = start) -> None:
                for name, gradient in gradients.items():
                    gradient += mu * (weights[name] - start[name])

            model, gradients = plain.local(server, round, client, pull if mu else None)
            models.append(model)
            taus.append(len(gradients))
            progress.append(norm_of_a(len(gradients), run.settings.momentum, run.settings.lr * mu))
        assert len(set(taus)) > 1  # or there would be nothing to normalise
        tau_eff = sum(p * t for p, t in zip(shares, progress if effective == "response" else taus, strict=True))
        new = mean(models, counts)  # right for the statistics; the trained weights follow
        for name in names:
            d = sum(
                p * (server[name] - m[name]) / a for p, m, a in zip(shares, models, progress, strict=True)
            )  # fmt: skip
            velocity[name] = server_beta * velocity[name] + tau_eff * d
            new[name] = server[name] - velocity[name]
        server = new
    return server


@pytest.mark.parametrize(
    ("method", "settings", "known"),
    [
        ("fednova", {}, {}),
        ("fednova", {"momentum": 0.9}, {}),
        ("fednova", {"model": "cnn", "momentum": 0.5}, {}),
        ("fednova:effective=steps", {"momentum": 0.9}, {"effective": "steps"}),
        ("fedprox:mu=0.4+fednova", {}, {"mu": 0.4}),
        ("fednova+fedprox:mu=0.4", {}, {"mu": 0.4}),
        ("fedprox:mu=0.4+fednova:effective=steps", {}, {"mu": 0.4, "effective": "steps"}),
        ("fednova+fedavgm:momentum=0.5", {}, {"server_beta": 0.5}),
        ("fednova", {"participation": 0.75, "momentum": 0.9}, {}),
    ],
)
def test_fednova(method: str, settings: dict[str, Any], known: dict[str, Any]) -> None:
    run = small(method=method, **settings)
    found = run.fit().weights
    assert distance(found, by_hand(run, **known)) < TOLERANCE
    assert distance(found, small(**settings).fit().weights) > 1e-3  # it is not just FedAvg


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "model": "cnn"}])
def test_equal_steps_make_it_fedavg(settings: dict[str, Any]) -> None:
    nova, avg = (small(method=m, local_steps=3, local_epochs=None, **settings) for m in ("fednova", "fedavg"))
    assert distance(nova.fit().weights, avg.fit().weights) < TOLERANCE


def test_a_client_without_a_step_counts_as_no_progress() -> None:
    # One client of a single sample cannot train batch norm: its update is zero and its a is zero.
    settings = {"model": "cnn", "last_batch": "drop", "batch_size": 16, "rounds": 1}
    run = small(method="fednova", **settings)
    plain = Plain(run)
    sizes = plain.sizes
    assert min(sizes) < 16 < max(sizes)
    found = run.fit().weights
    start = plain.start()
    models, progress = [], []
    for client in range(4):
        model, gradients = plain.local(start, 1, client)
        models.append(model)
        progress.append(len(gradients))
    assert 0 in progress
    shares = [n / sum(sizes) for n in sizes]
    tau = sum(p * a for p, a in zip(shares, progress, strict=True))
    wanted = mean(models, [float(n) for n in sizes])
    for name in plain.trained():
        d = sum(p * (start[name] - m[name]) / a for p, m, a in zip(shares, models, progress, strict=True) if a)
        wanted[name] = start[name] - tau * d
    assert distance(found, wanted) < TOLERANCE


def test_the_server_step_follows_the_normalisation_wherever_it_is_written() -> None:
    # Momentum is meant to be of the round's whole update. Of normalised updates, to be multiplied by the progress of
    # another round's clients, it would be something else, and nothing in "fedavgm+fednova" says so.
    runs = [small(method=m, participation=0.5, rounds=3) for m in ("fednova+fedavgm", "fedavgm+fednova")]
    first, second = (run.fit().weights for run in runs)
    assert distance(first, second) < TOLERANCE


def test_kept_momentum_is_refused() -> None:
    for method in ("fednova", "scaffold"):
        with pytest.raises(UserError, match=f"'{method}' measures progress from a momentum of zero"):
            small(method=method, persistent_momentum=True, momentum=0.9)
        small(method=method, persistent_momentum=True, momentum=0.0)
