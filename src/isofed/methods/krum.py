"""Krum: the update that lies closest to most of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from isofed.draws import drawn
from isofed.errors import RunError, UserError
from isofed.methods.base import Method
from isofed.methods.robust import GUARDS, column_blocks
from isofed.spec import describe, number

if TYPE_CHECKING:
    from isofed.config import Settings


def squared_distances(updates: Tensor) -> Tensor:
    """Of all pairs of rows, float64 [clients, clients].

    From the products of the rows as they are: shifting them by a mean would let one huge update blur the distances
    between all others.
    """
    products = torch.zeros(len(updates), len(updates), dtype=torch.float64, device=updates.device)
    for columns in column_blocks(updates):
        block = updates[:, columns].double()
        products += block @ block.T
    products = (products + products.T) / 2  # rounding must not decide which of two is nearer to the other
    squares = products.diagonal()
    return (squares[:, None] + squares[None, :] - 2 * products).clamp(min=0)


def krum_scores(updates: Tensor, f: int) -> Tensor:
    """For each client, the squared distances to its nearest ``clients - f - 2`` others added up."""
    apart = squared_distances(updates)
    apart.fill_diagonal_(torch.inf)
    return apart.sort(dim=1).values[:, : len(updates) - f - 2].sum(dim=1)


@dataclass(frozen=True)
class Krum(Method):
    """The update that lies closest to most of the others.

    A client's score is the sum of the squared distances to its n - f - 2 nearest others, n being the clients that
    answered; the update with the lowest score is taken as it is (``keep=1``), or the mean of the ``keep`` lowest
    (multi-Krum). ``f`` is how many clients may be malicious, and needs n >= 2 f + 2 + keep; ``f=none`` takes the
    largest f that n allows, and n must allow 0. Every client counts the same. Distances include shared running
    statistics, which come from the chosen clients too.
    """

    f: int | None = number(
        None,
        "clients of a round that may be malicious; none is as many as there can be, (n − keep − 2) / 2 rounded down",
        at_least=0,
    )
    keep: int = number(1, "updates that are averaged, those with the lowest scores", at_least=1)

    owns: ClassVar[frozenset[str]] = frozenset({"combine"})
    uniform: ClassVar[bool] = True
    guards: ClassVar[frozenset[str]] = GUARDS
    paper: ClassVar[str] = (
        "Blanchard et al. 2017, Machine learning with adversaries: Byzantine tolerant gradient descent"
    )

    def check(self, settings: Settings) -> None:
        if settings.clients is not None and (why := self._lacking(drawn(settings.clients, settings.participation))):
            raise UserError(why)

    def _lacking(self, count: int) -> str | None:
        need = 2 * (self.f or 0) + 2 + self.keep
        if count >= need:
            return None
        there = f"there {'are' if count > 1 else 'is'} {count}"
        return f"{describe(self, 'krum', full=True)} needs the updates of {need} clients in a round, and {there}"

    def combine(self, updates: Tensor, weights: Tensor) -> Tensor:
        count = len(updates)
        if why := self._lacking(count):
            raise RunError(why)
        f = (count - self.keep - 2) // 2 if self.f is None else self.f
        chosen = krum_scores(updates, f).sort(stable=True).indices[: self.keep].sort().values  # of equal ones the first
        return updates[chosen].double().mean(0)
