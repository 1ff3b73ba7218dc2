"""Dropout whose draws come from the visit's plan."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isofed.models import fused


def _signed(value: int) -> int:
    """A 64-bit pattern as the number that an int64 tensor holds for it."""
    return value - 2**64 if value >= 2**63 else value


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
        self.fused = False  # see :mod:`isofed.models.fused`

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        if self.key is None:
            return nn.functional.dropout(x, self.p, training=True)
        if self.fused and x.is_cuda and x.dim() in (2, 4):
            return fused.dropout(x, self.key, self.p)
        kept = uniform(self.key, x.shape) >= self.p
        return torch.where(kept, x / (1 - self.p), 0)


def uniform(key: Tensor, shape: torch.Size) -> Tensor:
    """Numbers in [0, 1) that depend on ``key`` and their position alone (murmur's finaliser on a Weyl sequence)."""
    place = torch.arange(shape.numel(), device=key.device).view(shape)
    bits = (place + 1) * MIX[0] + key
    for factor in MIX[1:]:
        bits = (bits ^ ((bits >> 33) & 0x7FFFFFFF)) * factor
    bits = bits ^ ((bits >> 33) & 0x7FFFFFFF)
    return ((bits >> 40) & 0xFFFFFF).float() * 2**-24


def dropouts(network: nn.Module) -> list[Dropout]:
    """The layers that want a number each step."""
    return [m for m in network.modules() if isinstance(m, Dropout)]
