"""Dropout whose draws come from the visit's plan."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isofed.functional import native
from isofed.models import fused


def _signed(value: int) -> int:
    """A 64-bit pattern as the number that an int64 tensor holds for it."""
    return value - 2**64 if value >= 2**63 else value


_RANGE = 2**24
MIX = (_signed(0x9E3779B97F4A7C15), _signed(0xFF51AFD7ED558CCD), _signed(0xC4CEB9FE1A85EC53))


class Dropout(nn.Module):
    """Zeroes entries with probability ``p`` in training, scaling the others up.

    Which ones is decided by a hash of a planned number and an entry's position, not by torch's generator: so a step
    can be captured in a CUDA graph, and a CPU and a GPU drop the same entries. Without such a number, that is outside
    of isofed's training, it is torch's dropout.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.key: Tensor | None = None  # int64, set for each step
        self._form: tuple[object, ...] = ()
        self._kept_places = torch.empty(0, dtype=torch.int64)
        self.fused = False  # see :mod:`isofed.models.fused`

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        if self.key is None:
            return nn.functional.dropout(x, self.p, training=True)
        if self.fused and x.is_cuda and x.dim() in (2, 4):
            return fused.dropout(x, self.key, self.p)
        if native.allowed() and _reads(x):
            return dropped(x, int(self.key), self.p)
        kept = hashed(self.key, self._places(x)) >= least_kept(self.p)
        if x.dtype != torch.float32:  # in which the number that the others are scaled up by would be a rough one
            return x / (1 - self.p) * kept.to(x.dtype)
        return x * kept.to(x.dtype).mul_(1 / (1 - self.p))  # one product forward and one back

    def _places(self, x: Tensor) -> Tensor:
        """Where entries stand, in the order of x's own memory; on a processor worth keeping for the next batch."""
        if x.is_cuda or type(x) is not Tensor:
            return places(x)
        form = (x.shape, x.stride())
        if self._form != form:
            self._form, self._kept_places = form, places(x)
        return self._kept_places


@cache
def _functions() -> Any:
    """What dropout.c has, or nothing where it cannot be compiled."""
    found = native.library(Path(__file__).with_suffix(".c"))
    if found is not None:
        number, long = ctypes.c_uint64, ctypes.c_long
        found.isofed_dropout.argtypes = [ctypes.c_void_p] * 2 + [number] * 2 + [ctypes.c_float] + [long] * 3
        found.isofed_dropout.restype = None
    return found


def _reads(x: Tensor) -> bool:
    """Whether C can do it: entries lie without gaps, in the order of the axes or with channels last."""
    if not native.reads(x) or _functions() is None:
        return False
    return x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)


class _Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: int, p: float) -> Tensor:
        ctx.shape, ctx.key, ctx.p = x.shape, key, p
        made = torch.empty_like(x)
        size = (1, 1, x.numel()) if x.is_contiguous() else (len(x), x.shape[2] * x.shape[3], x.shape[1])
        places = x.data_ptr(), made.data_ptr()
        _functions().isofed_dropout(*places, key % 2**64, least_kept(p), 1 / (1 - p), *size)
        return made

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return dropped(g, ctx.key, ctx.p, ctx.shape), None, None


def dropped(x: Tensor, key: int, p: float, shape: torch.Size | None = None) -> Tensor:
    """Entries dropped and scaled in one go; the derivative does the same with what comes back.

    ``shape`` is what one of several has, where ``x`` may be many at once.
    """
    if _reads(x):
        made: Tensor = _Dropped.apply(x, key, p)
        return made
    terms = places(x if shape is None else torch.empty(shape, device=x.device))
    return x * (hashed(key, terms) >= least_kept(p)).to(x.dtype).mul_(1 / (1 - p))


def least_kept(p: float) -> int:
    """The smallest hash of an entry that is not dropped."""
    return math.ceil(p * _RANGE)


def places(x: Tensor) -> Tensor:
    """The terms of a Weyl sequence, one for each entry of a tensor, by its place in the order of the axes."""
    sequence = (torch.arange(x.numel(), device=x.device).add_(1)).mul_(MIX[0]).view(x.shape)
    return torch.empty_like(x, dtype=torch.int64).copy_(sequence)


def hashed(key: Tensor | int, terms: Tensor) -> Tensor:
    """Whole numbers below 2^24 that depend on ``key`` and their places alone.

    They are the highest bits of murmur's finaliser, of which its last step changes none, and so is not made.
    """
    bits = terms + key
    spare = torch.empty_like(bits)
    for factor in MIX[1:]:
        torch.bitwise_right_shift(bits, 33, out=spare).bitwise_and_(0x7FFFFFFF)
        bits.bitwise_xor_(spare).mul_(factor)
    return bits.bitwise_right_shift_(40).bitwise_and_(_RANGE - 1)


def dropouts(network: nn.Module) -> list[Dropout]:
    """The layers that want a number each step."""
    return [m for m in network.modules() if isinstance(m, Dropout)]
