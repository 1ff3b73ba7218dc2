"""The mean of the clients' updates without the largest and the smallest, number by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from isofed.methods.base import Method
from isofed.methods.robust import GUARDS, by_columns
from isofed.spec import number


@dataclass(frozen=True)
class Trimmed(Method):
    """The mean without the largest and smallest values, number by number.

    For each number of the update, ``part`` of the clients' values are left out at either end, rounded down, and the
    rest are averaged. Every client counts the same, whatever ``weighting`` says: a number of samples is the client's
    own claim. Shared running statistics are combined likewise.
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

    def combine(self, updates: Tensor, weights: Tensor) -> Tensor:
        cut = int(self.part * len(updates) + 1e-9)  # 0.29 of 100 clients are 29, not 28
        return by_columns(updates, lambda block: block.sort(dim=0).values[cut : len(updates) - cut].double().mean(0))
