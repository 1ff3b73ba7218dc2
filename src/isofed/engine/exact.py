"""Sums whose result does not depend on the order of the terms.

Clients finish in any order, and floating-point addition is not associative. Here each contribution is rounded to a
multiple of 2^-58, far below the rounding of the float32 weights themselves. float64 adds multiples of a fixed power
of two without any rounding as long as the sums stay below 2^53 of them, so every order gives the same bits. A small
term is added to a fine sum as it is; of a larger one, the multiple of 2^-20 goes into a coarse sum, and the rest, at
most 2^-21, into the fine one. What is counted is how large the fine sum can have become: before it could leave the
range, multiples of 2^-20 are carried over. So the whole sum, coarse and fine, is one number whatever was added where.
What could leave the range of the coarse sum is refused (:func:`fits`), never summed wrongly.

Sums of the same scale can be summed again (:meth:`ExactSum.merge`), so clients may be added up where they were trained:
a part that arrives is a multiple of the same two powers, and its rest is at most 2^-21.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isofed.functional import native

LIMIT = 2.0**31  # of a single value: the coarse sum, of weights that add up to at most 1, stays below 2^32
SMALL = 2.0**-8  # of a scaled term: what is smaller goes into the fine sum as it is
# Numbers that a processor adds at once: what is made on the way stays in its cache, and its memory in the process.
_BLOCK = 2**16
_COARSE = 1.5 * 2.0**32  # adding and subtracting it rounds to a multiple of 2^-20
_FINE = 1.5 * 2.0**-6  # the same for 2^-58
_REST = 2.0**-21  # of a term at most, once multiples of 2^-20 are taken out
_ROOM = 0.999 * 2.0**-5  # for the fine sum: a little less than 2^53 units, as its size is reckoned with rounding


class Parts(NamedTuple):
    """An exact sum as it travels."""

    scale: float
    coarse: Tensor  # multiples of 2^-20
    fine: Tensor  # multiples of 2^-58, at most 2^-21
    weight: float


class Uneven(ValueError):
    """Terms of a sum that have different shapes."""


class ExactSum:
    """A weighted sum of tensors, and their weighted mean; the division comes last, because clients fail.

    ``expected`` bounds the sum of the weights (all clients that were asked). Weights are scaled by the power of two
    above it, which costs no precision and keeps the sums in range.
    """

    def __init__(self, expected: float) -> None:
        self._scale = 2.0 ** -math.ceil(math.log2(expected))
        self._coarse: Tensor | None = None  # as long as there is nothing in it
        self._fine: Tensor | None = None
        self._filled = 0.0  # how large the fine sum may be
        self.weight = 0.0

    def add(self, value: Tensor, weight: float = 1.0, largest: float = math.inf) -> None:
        """Add ``weight`` times a tensor, each element smaller than :data:`LIMIT`.

        Where it is known that none is larger than ``largest``, the sum is the same and may be made in half the time.
        """
        if self._fine is None:
            self._fine = torch.zeros(value.shape, dtype=torch.float64, device=value.device)
        self._check(value)
        factor = weight * self._scale
        small = largest * factor < SMALL
        self._make_room(largest * factor if small else _REST)
        if self._coarse is None and not small:
            self._coarse = torch.zeros_like(self._fine)
        _add(value, factor, None if small else self._coarse, self._fine)
        self.weight += weight

    def parts(self) -> Parts:
        """What :meth:`merge` takes; this sum can go on."""
        fine = self._known()
        carried = _carry(fine)
        coarse = carried if self._coarse is None else self._coarse + carried
        return Parts(self._scale, coarse, fine - carried, self.weight)

    def merge(self, parts: Parts) -> None:
        """Add another sum, whose weights are expected in this one: the same bits as if its terms came one by one."""
        if parts.scale != self._scale:
            raise ValueError("sums of different scales cannot be merged")
        self._check(parts.fine)
        self._make_room(_REST)
        self._coarse = parts.coarse.clone() if self._coarse is None else self._coarse.add_(parts.coarse)
        self._fine = parts.fine.clone() if self._fine is None else self._fine.add_(parts.fine)
        self.weight += parts.weight

    def _check(self, value: Tensor) -> None:
        if self._fine is not None and self._fine.shape != value.shape:
            raise Uneven(f"{list(self._fine.shape)} and {list(value.shape)}")

    def _make_room(self, size: float) -> None:
        """For a term of at most this size, in the fine sum."""
        if self._fine is not None and self._filled + size > _ROOM:
            carried = _carry(self._fine)
            self._fine.sub_(carried)
            self._coarse = carried if self._coarse is None else self._coarse.add_(carried)
            self._filled = _REST
        self._filled += size

    def _known(self) -> Tensor:
        if self._fine is None:
            raise ValueError("the sum of nothing")
        return self._fine

    def sum(self) -> Tensor:
        fine = self._known()
        return (fine if self._coarse is None else self._coarse + fine) / self._scale

    def mean(self) -> Tensor:
        return self.sum() / self.weight


def _add(value: Tensor, factor: float, coarse: Tensor | None, fine: Tensor) -> None:
    """Add a term to the two sums; without a coarse one, all of it to the fine one."""
    tensors = [t for t in (value, fine, coarse) if t is not None]
    fits = all(t.device.type == "cpu" and t.is_contiguous() for t in tensors) and value.dtype == torch.float32
    if fits and native.has_numbers(value) and _functions() is not None:
        places = None if coarse is None else coarse.data_ptr(), fine.data_ptr(), value.numel()
        _functions().isofed_add(value.data_ptr(), factor, _COARSE, _FINE, *places)
        return
    size = _BLOCK if value.device.type == "cpu" else max(value.numel(), 1)
    upper = None if coarse is None else coarse.reshape(-1).split(size)
    for n, (given, lower) in enumerate(zip(*(t.reshape(-1).split(size) for t in (value, fine)), strict=True)):
        term = given.double() * factor
        if upper is not None:
            whole = (term + _COARSE).sub_(_COARSE)
            upper[n].add_(whole)
            term.sub_(whole)
        lower.add_(term.add_(_FINE).sub_(_FINE))


@cache
def _functions() -> Any:
    """What exact.c has, or nothing where it cannot be compiled: the same bits, with nothing written on the way."""
    found = native.library(Path(__file__).with_suffix(".c"), "-ffp-contract=off") if native.allowed() else None
    if found is not None:
        place = ctypes.c_void_p
        found.isofed_add.argtypes = [place, *[ctypes.c_double] * 3, place, place, ctypes.c_long]
        found.isofed_add.restype = None
    return found


def _carry(fine: Tensor) -> Tensor:
    """What of a fine sum belongs into the coarse one."""
    return (fine + _COARSE).sub_(_COARSE)


def fits(*values: Tensor) -> bool:
    """Whether tensors are finite and within the range of an exact sum. Reads the device once."""
    # A NaN compares false. What is not a floating-point number cannot be NaN, and is not summed.
    checks = [(v.abs().max() < LIMIT) for v in values if v.numel() and v.is_floating_point()]
    return not checks or bool(torch.stack(checks).all())
