"""Sums whose result does not depend on the order of the terms.

Clients finish in any order, and floating-point addition is not associative. Here each contribution is first split
into a multiple of 2^-20 and a rest, at most 2^-21, rounded to a multiple of 2^-58. float64 adds multiples of a fixed
power of two without any rounding as long as the sums stay below 2^53 of them, so every order gives the same bits; the
rounding to 2^-58 is far below that of the float32 weights themselves. What could leave the range is refused
(:func:`fits`), never summed wrongly.

Sums of the same scale can be summed again (:meth:`ExactSum.merge`), so clients may be added up where they were trained.
A part that arrives is a multiple of the same two powers, and its rest is at most 2^-21, so for the range of the fine
sum it is one more term: at most 2^15 of them, and what was left of those before, are below 2^-5, or 2^53 units of
2^-58. The coarse sum differs from the whole sum, which no division into parts changes, by the fine one only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LIMIT = 2.0**31  # of a single value: the coarse sum, of weights that add up to at most 1, stays below 2^32
CARRY = 2**15  # terms after which the fine sum, at most 2^-21 each, is brought back to one such term
# Numbers that a processor adds at once: what is made on the way stays in its cache, and its memory in the process.
_BLOCK = 2**16
_COARSE = 1.5 * 2.0**32  # adding and subtracting it rounds to a multiple of 2^-20
_FINE = 1.5 * 2.0**-6  # the same for 2^-58


class Parts(NamedTuple):
    """An exact sum as it travels."""

    scale: float
    coarse: Tensor  # multiples of 2^-20
    fine: Tensor  # multiples of 2^-58, at most 2^-21
    weight: float


class ExactSum:
    """A weighted sum of tensors, and their weighted mean; the division comes last, because clients fail.

    ``expected`` bounds the sum of the weights (all clients that were asked). Weights are scaled by the power of two
    above it, which costs no precision and keeps the sums in range.
    """

    def __init__(self, expected: float) -> None:
        self._scale = 2.0 ** -math.ceil(math.log2(expected))
        self._coarse: Tensor | None = None
        self._fine: Tensor | None = None
        self._terms = 0
        self.weight = 0.0

    def add(self, value: Tensor, weight: float = 1.0) -> None:
        """Add ``weight`` times a tensor, each element smaller than :data:`LIMIT`."""
        if self._coarse is None or self._fine is None:
            self._coarse = torch.zeros(value.shape, dtype=torch.float64, device=value.device)
            self._fine = torch.zeros_like(self._coarse)
        size = _BLOCK if value.device.type == "cpu" else max(value.numel(), 1)
        pieces = (t.reshape(-1).split(size) for t in (value, self._coarse, self._fine))
        for given, coarse, fine in zip(*pieces, strict=True):
            term = given.double() * (weight * self._scale)
            whole = (term + _COARSE).sub_(_COARSE)
            coarse.add_(whole)
            fine.add_(term.sub_(whole).add_(_FINE).sub_(_FINE))
        self._taken(weight)

    def parts(self) -> Parts:
        """What :meth:`merge` takes; this sum can go on."""
        coarse, fine = self._known()
        carried = _carry(fine)
        return Parts(self._scale, coarse + carried, fine - carried, self.weight)

    def merge(self, parts: Parts) -> None:
        """Add another sum, whose weights are expected in this one: the same bits as if its terms came one by one."""
        if parts.scale != self._scale:
            raise ValueError("sums of different scales cannot be merged")
        self._take(parts.coarse.clone(), parts.fine.clone(), parts.weight)

    def _take(self, coarse: Tensor, fine: Tensor, weight: float) -> None:
        if self._coarse is None or self._fine is None:
            self._coarse, self._fine = coarse, fine
        else:
            self._coarse.add_(coarse)
            self._fine.add_(fine)
        self._taken(weight)

    def _taken(self, weight: float) -> None:
        self.weight += weight
        self._terms += 1
        if self._terms % CARRY == 0:
            coarse, fine = self._known()
            carried = _carry(fine)
            coarse.add_(carried)
            fine.sub_(carried)

    def _known(self) -> tuple[Tensor, Tensor]:
        if self._coarse is None or self._fine is None:
            raise ValueError("the sum of nothing")
        return self._coarse, self._fine

    def sum(self) -> Tensor:
        coarse, fine = self._known()
        return (coarse + fine) / self._scale

    def mean(self) -> Tensor:
        return self.sum() / self.weight


def _carry(fine: Tensor) -> Tensor:
    """What of a fine sum belongs into the coarse one."""
    return (fine + _COARSE).sub_(_COARSE)


def fits(*values: Tensor) -> bool:
    """Whether tensors are finite and within the range of an exact sum. Reads the device once."""
    # A NaN compares false. What is not a floating-point number cannot be NaN, and is not summed.
    checks = [(v.abs().max() < LIMIT) for v in values if v.numel() and v.is_floating_point()]
    return not checks or bool(torch.stack(checks).all())
