"""What the noise on updates amounts to: the (epsilon, delta) of a run, by the accountant of ``dp-accounting``.

The unit is a whole client. Two federations are neighbours if the data of one client are replaced by any others, so
one client moves a clipped sum by at most twice the clipping norm. The number of clients, who they are and which of
them answer is not hidden.

- Noise at the server, some clients a round: a fixed number of clients is drawn without replacement, and its amplifying
  effect is counted by Rényi accounting for just that (Wang, Balle and Kasiviswanathan 2019). It holds against whoever
  sees the models and does not know whom a round has drawn.
- Noise at the server, all clients in each round: the exact curve of the Gaussian mechanism (Balle and Wang 2018).
- Noise at the client: what the server sees of one client, which knows when it drew it. The same curve, for as many
  releases as the most often drawn client has visits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from isofed import extras
from isofed.draws import draw_clients, drawn
from isofed.errors import UserError
from isofed.methods.gaussian import Gaussian

if TYPE_CHECKING:
    from isofed.config import Settings

NEIGHBOURS = "the data of one client are replaced by any others"


def need_accountant(who: str) -> None:
    """Refuse to go on without an accountant that can do what is asked of it here."""
    if find_spec("dp_accounting") is None:
        raise UserError(f"{who} needs an accountant of privacy: {extras.command('privacy')}")
    if not hasattr(import_module("dp_accounting"), "get_epsilon_gaussian"):
        raise UserError(
            f"{who} needs dp-accounting 0.6, and the one that is installed is older: {extras.command('privacy')}"
        )


@dataclass
class Account:
    """Noise on the updates of a run, and what it hides."""

    method: Gaussian
    norm: float
    clients: int
    sampled: int
    seed: int
    participation: float
    _counted: int = 0  # rounds in ``_visits``
    _visits: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # of each client

    @classmethod
    def of(cls, settings: Settings, clients: int) -> Account | None:
        """That of a run, if its method adds noise; refuses what cannot be accounted for."""
        method = settings.method.owners.get("noise")
        if not isinstance(method, Gaussian):
            return None
        need_accountant("gaussian")
        if method.delta * clients >= 1:
            raise UserError(
                f"delta={method.delta:g} of method 'gaussian' hides nobody among {clients} clients; "
                f"it must be well below 1/{clients}"
            )
        share = settings.participation
        return cls(method, settings.method.bound, clients, drawn(clients, share), settings.seed, share)

    def epsilon(self, rounds: int) -> float:
        """After so many rounds."""
        # The standard deviation of the noise, over how far a neighbour can move what it is added to.
        multiplier = self.method.noise / 2
        if self.method.at == "client":
            return exact_epsilon(multiplier, self.visits(rounds), self.method.delta)
        found = exact_epsilon(multiplier, rounds, self.method.delta)
        if self.sampled < self.clients:  # which cannot make it worse, only the bound on it
            found = min(found, sampled_epsilon(multiplier, self.clients, self.sampled, rounds, self.method.delta))
        return found

    def visits(self, rounds: int) -> int:
        """How often the client that is drawn most often takes part."""
        if self.sampled == self.clients:
            return rounds
        if rounds < self._counted or not self._counted:
            self._counted, self._visits = 0, np.zeros(self.clients, np.int64)
        for number in range(self._counted + 1, rounds + 1):
            self._visits[draw_clients(self.seed, number, self.clients, self.participation)] += 1
        self._counted = rounds
        return int(self._visits.max())

    def statement(self, rounds: int) -> dict[str, Any]:
        """For the record: the numbers, and all that they rest on."""
        at_client = self.method.at == "client"
        if at_client:
            sampling = "none assumed: the server knows whom it draws"
        elif self.sampled == self.clients:
            sampling = "none: all clients take part in each round"
        else:
            sampling = (
                f"each round draws {self.sampled} of {self.clients} clients without replacement, "
                "and whoever sees the models does not know whom"
            )
        exact = at_client or self.sampled == self.clients
        curve = "exact curve of the Gaussian mechanism"
        seeded = "the run's seed: repeatable, and no protection against whoever knows the seed"
        return {
            "epsilon": self.epsilon(rounds),
            "delta": self.method.delta,
            "unit": "a whole client",
            "neighbours": NEIGHBOURS,
            "protects against": "the server and whoever sees the models" if at_client else "whoever sees the models",
            "noise": self.method.noise,
            "norm": self.norm,
            "releases": self.visits(rounds) if at_client else rounds,
            "sampling": sampling,
            "accountant": f"dp-accounting {version('dp-accounting')}, "
            + (
                curve if exact else f"Rényi with sampling without replacement, or {curve} without it where that is less"
            ),
            "draws": seeded if self.method.draws == "seed" else "the operating system",
        }


def exact_epsilon(multiplier: float, releases: int, delta: float) -> float:
    """Of normal noise, ``multiplier`` times the sensitivity, released so often: together these are one release."""
    found: float = import_module("dp_accounting").get_epsilon_gaussian(multiplier / math.sqrt(releases), delta)
    return found


def sampled_epsilon(multiplier: float, clients: int, sampled: int, rounds: int, delta: float) -> float:
    """Of the same noise on so many clients of all, drawn anew for each release without replacement."""
    orders, one = _renyi(multiplier, clients, sampled)
    found, _ = import_module("dp_accounting.rdp").compute_epsilon(orders, rounds * one, delta)
    return float(found)


@lru_cache(maxsize=8)
def _renyi(multiplier: float, clients: int, sampled: int) -> tuple[np.ndarray, np.ndarray]:
    """Orders, and the Rényi divergence of one release at each: that of several is their sum."""
    dp = import_module("dp_accounting")
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    accountant.compose(dp.SampledWithoutReplacementDpEvent(clients, sampled, dp.GaussianDpEvent(multiplier)))
    return accountant.orders, accountant.rdp
