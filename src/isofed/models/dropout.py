"""Dropout whose draws come from the visit's plan."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

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


def least_kept(p: float) -> int:
    """The smallest hash of an entry that is not dropped."""
    return math.ceil(p * _RANGE)


def places(x: Tensor) -> Tensor:
    """The terms of a Weyl sequence, one for each entry of a tensor, by its place in the order of the axes."""
    sequence = (torch.arange(x.numel(), device=x.device).add_(1)).mul_(MIX[0]).view(x.shape)
    return torch.empty_like(x, dtype=torch.int64).copy_(sequence)


def hashed(key: Tensor, terms: Tensor) -> Tensor:
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
