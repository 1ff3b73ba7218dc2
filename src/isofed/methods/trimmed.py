"""The mean of the clients' updates without the largest and the smallest, number by number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from isofed.draws import drawn
from isofed.errors import RunError, UserError
from isofed.methods.base import Method
from isofed.methods.robust import GUARDS, by_columns
from isofed.spec import number
from isofed.words import many

if TYPE_CHECKING:
    from isofed.config import Settings


@dataclass(frozen=True)
class Trimmed(Method):
    """The mean without the largest and smallest values, number by number.

    For each number of the update, ``part`` of the clients' values are left out at either end, rounded down, and the
    rest are averaged. Every client counts the same, whatever ``weighting`` says: a number of samples is the client's
    own claim. Shared running statistics are combined likewise. A ``part`` of so few clients that it leaves out nobody
    is refused.
    """

    part: float = number(
        0.2,
        "share of the clients' values that is left out at either end, rounded down to whole clients",
        at_least=0,
        below=0.5,
    )

    owns: ClassVar[frozenset[str]] = frozenset({"combine"})
    uniform: ClassVar[bool] = True
    guards: ClassVar[frozenset[str]] = GUARDS
    paper: ClassVar[str] = "Yin et al. 2018, Byzantine-robust distributed learning: towards optimal statistical rates"

    def check(self, settings: Settings) -> None:
        if settings.clients is None or not self.part:
            return
        if why := self._lacking(drawn(settings.clients, settings.participation)):
            raise UserError(why)

    def _lacking(self, count: int) -> str | None:
        if self._cut(count) or not self.part:
            return None
        instead = f"trimmed:{math.ceil(100 / count) / 100:g}" if count > 2 else "3 clients or more in a round"
        of = f"of {many(count, 'client')} in a round"
        return f"trimmed:{self.part:g} leaves out nobody {of}, which is the plain mean; use {instead}"

    def _cut(self, count: int) -> int:
        """How many of so many values are left out at either end."""
        return int(self.part * count + 1e-9)  # 0.29 of 100 clients are 29, not 28

    def combine(self, updates: Tensor, weights: Tensor) -> Tensor:
        if why := self._lacking(len(updates)):  # some of those that were asked did not answer
            raise RunError(why)
        cut = self._cut(len(updates))
        return by_columns(updates, lambda block: block.sort(dim=0).values[cut : len(updates) - cut].double().mean(0))
