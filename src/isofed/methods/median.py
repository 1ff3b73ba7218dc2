"""The median of the clients' updates, number by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from isofed.methods.base import Method
from isofed.methods.robust import GUARDS, by_columns


@dataclass(frozen=True)
class Median(Method):
    """The median of the clients' updates, number by number.

    With an even number of clients it is the mean of the two in the middle. Every client counts the same, whatever
    ``weighting`` says: a number of samples is the client's own claim. Shared running statistics are combined likewise.
    """

    owns: ClassVar[frozenset[str]] = frozenset({"combine"})
    uniform: ClassVar[bool] = True
    guards: ClassVar[frozenset[str]] = GUARDS
    paper: ClassVar[str] = "Yin et al. 2018, Byzantine-robust distributed learning: towards optimal statistical rates"

    def combine(self, updates: Tensor, weights: Tensor) -> Tensor:
        low, high = (len(updates) - 1) // 2, len(updates) // 2

        def middle(block: Tensor) -> Tensor:
            ordered = block.sort(dim=0).values
            return (ordered[low].double() + ordered[high].double()) / 2

        return by_columns(updates, middle)
