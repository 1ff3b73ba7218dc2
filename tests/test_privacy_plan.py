"""Noise and epsilon before a run."""

from __future__ import annotations

import math

import pytest
from rich.console import Console

from isofed.errors import UserError
from isofed.privacy_plan import Plan, privacy
from tests.cli_tools import complaint, isofed, succeeds

pytest.importorskip("dp_accounting", reason="the accountant is an extra")


def gaussian_delta(epsilon: float, mu: float) -> float:
    """The exact curve of the Gaussian mechanism (Balle and Wang 2018), with the error function."""

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("noise", "rounds"), [(2.0, 1), (5.0, 30), (40.0, 200)])
def test_epsilon_lies_on_the_curve_of_the_gaussian_mechanism(noise: float, rounds: int) -> None:
    # One client moves the sum by at most twice the norm, in each of the rounds.
    found = Plan(clients=50, rounds=rounds, delta=1e-4).epsilon(noise)
    assert gaussian_delta(found, 2 * math.sqrt(rounds) / noise) == pytest.approx(1e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("plan", "epsilon"),
    [
        (Plan(50, 30), 0.7),
        (Plan(50, 30), 60.0),
        (Plan(500, 40, participation=0.1), 6.0),
        (Plan(200, 20, 0.1, at="client"), 0.7),
    ],
)
def test_the_noise_for_an_epsilon_is_the_least_that_does(plan: Plan, epsilon: float) -> None:
    noise = plan.noise(epsilon)
    assert plan.epsilon(noise) <= epsilon < plan.epsilon(0.99 * noise)


def test_more_clients_hide_a_client_better() -> None:
    few, many = Plan(100, 50, participation=0.5), Plan(1000, 50, participation=0.05)
    assert many.epsilon(2.0) < few.epsilon(2.0)


def test_what_no_noise_can_hide() -> None:
    with pytest.raises(UserError, match="no noise gives epsilon 1e-09"):
        Plan(10, 100).noise(1e-9)
    with pytest.raises(UserError, match="at least 1"):
        Plan(0, 10)


def test_the_command() -> None:
    out = succeeds("privacy", "clients=200", "rounds=30", "epsilon=6")
    noise, epsilon = (float(word) for word in out.splitlines()[4].split())
    assert Plan(200, 30).noise(6.0) == noise and epsilon <= 6.0
    assert f"gaussian:noise={noise:g}" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["clients=10"], "privacy needs rounds="),
        (["clients=10", "rounds=many"], "rounds must be a whole number, not 'many'"),
        (["clients=10", "rounds=5", "noise=1", "epsilon=1"], "give noise= or epsilon="),
        (["clients=10", "rounds=5", "noise=-1"], "noise must be above 0"),
        (["clients=10", "rounds=5", "nose=1"], "did you mean 'noise'?"),
        (["clients=10", "rounds=5", "delta=0.2"], "hides nobody among 10 clients"),
    ],
)
def test_mistakes(words: list[str], said: str) -> None:
    assert said in complaint(isofed("privacy", *words), 2)


def test_the_command_needs_an_accountant_that_is_no_older_than_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("dp_accounting.get_epsilon_gaussian")
    with pytest.raises(UserError, match="^isofed privacy needs dp-accounting"):
        privacy(Console(), ["clients=100", "rounds=10"])
    monkeypatch.setattr("isofed.privacy.find_spec", lambda name: None)
    with pytest.raises(UserError, match="^isofed privacy needs an accountant"):
        privacy(Console(), ["clients=100", "rounds=10"])
