"""Before a run: the epsilon that a noise will amount to, and the noise that an epsilon asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from isofed.display import show_table, simple_table
from isofed.draws import drawn
from isofed.errors import UserError, unknown
from isofed.methods.gaussian import Gaussian
from isofed.privacy import Account, need_accountant

_FINE = 1.001  # a noise is found to a thousandth
_MOST = 1e6  # times the norm: what asks for more than this is a mistake
_USUAL = "0.5,1,2,4,8"
_KINDS = {"clients": int, "rounds": int, "participation": float, "delta": float, "at": str, "seed": int}
OPTIONS = (*_KINDS, "noise", "epsilon")


@dataclass(frozen=True)
class Plan:
    """What is known of a run before it: as many rounds of so many clients, of which some take part in each."""

    clients: int
    rounds: int
    participation: float = 1.0
    delta: float = 1e-5
    at: str = "server"
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.clients, self.rounds) < 1 or not 0 < self.participation <= 1 or not 0 < self.delta < 1:
            raise UserError("clients and rounds must be at least 1, participation in (0, 1] and delta in (0, 1)")
        if self.delta * self.clients >= 1:
            needed = f"it must be well below 1/{self.clients}"
            raise UserError(f"delta={self.delta:g} hides nobody among {self.clients} clients; {needed}")
        if self.at not in ("server", "client"):
            raise UserError(f"at must be server or client, not '{self.at}'")

    def epsilon(self, noise: float) -> float:
        """What ``gaussian:noise=...`` amounts to after all rounds."""
        method = Gaussian(noise=noise, delta=self.delta, at="client" if self.at == "client" else "server")
        sampled = drawn(self.clients, self.participation)
        return Account(method, 1.0, self.clients, sampled, self.seed, self.participation).epsilon(self.rounds)

    def noise(self, epsilon: float) -> float:
        """The least noise whose epsilon is at most this, rounded up in its third digit."""
        known = {1.0: self.epsilon(1.0)}

        def enough(noise: float) -> bool:
            known[noise] = known.get(noise) or self.epsilon(noise)
            return known[noise] <= epsilon

        low = high = 1.0
        while not enough(high):
            low, high = high, 4 * high
            if high > _MOST:
                raise UserError(f"no noise gives epsilon {epsilon:g} here: take fewer rounds, or more clients")
        while enough(low):
            low, high = low / 4, low
        while high / low > _FINE:
            # Epsilon is nearly a power of the noise, so a straight line through logarithms finds it in few steps.
            share = math.log(known[low] / epsilon) / math.log(known[low] / known[high])
            guess = low * (high / low) ** share
            for one in (guess / _FINE**0.4, guess * _FINE**0.4, math.sqrt(low * high)):
                if low < one < high:
                    low, high = (low, one) if enough(one) else (one, high)
        digit = 10.0 ** (math.floor(math.log10(high)) - 2)
        return float(f"{math.ceil(high / digit) * digit:.3g}")


def privacy(console: Console, words: Sequence[str]) -> None:
    """Print noise and epsilon of planned runs, from either of the two."""
    need_accountant("isofed privacy")
    given = dict(word.partition("=")[::2] for word in words)
    for key in given:
        if key not in OPTIONS:
            raise unknown("option of privacy", key, OPTIONS)
    if "noise" in given and "epsilon" in given:
        raise UserError("give noise= or epsilon=, and the other one is found")
    if missing := [key for key in ("clients", "rounds") if key not in given]:
        raise UserError(f"privacy needs {' and '.join(f'{key}=' for key in missing)}, such as clients=1000 rounds=200")
    chosen: dict[str, Any] = {key: _number(key, given[key], kind) for key, kind in _KINDS.items() if key in given}
    plan, wanted = Plan(**chosen), "epsilon" if "epsilon" in given else "noise"
    values = [float(_number(wanted, text, float)) for text in given.get(wanted, _USUAL).split(",")]
    if not all(0 < value < math.inf for value in values):
        raise UserError(f"{wanted} must be above 0")
    table = simple_table("noise", "epsilon")
    for value in values:
        noise = plan.noise(value) if wanted == "epsilon" else value
        table.add_row(f"{noise:g}", f"{plan.epsilon(noise):.3g}")
    sampled = drawn(plan.clients, plan.participation)
    console.print(
        f"{plan.rounds} rounds, each with {sampled} of {plan.clients} clients; delta {plan.delta:g}; noise at the "
        f"{plan.at}\nepsilon is that of a whole client; the less of it, the better hidden\n",
        highlight=False,
    )
    show_table(console, table)
    best = f"{noise:g}" + (",at=client" if plan.at == "client" else "")
    console.print(f"\nTo use it: isofed run method=clip_update:norm=1+gaussian:noise={best} ...", highlight=False)


def _number(key: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{key} must be a {'whole number' if kind is int else 'number'}, not '{text}'") from None
