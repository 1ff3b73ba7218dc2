"""How a batch is cut into pieces for the kernels of :mod:`isofed.models.fused` and its neighbours."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from isofed.functional.kernels import triton

PARTS = 128  # pieces, at most, into which the rows of a sum are cut
TILE = 2048  # numbers that a program looks at together,
WIDE = 32  # of at most so many channels
WARPS = 4  # that do so
GROUPS = 8  # networks, at most, that share a pass: see :mod:`isofed.models.beside`


@dataclass(frozen=True)
class Cut:
    """Rows are pixels, or samples; a tile is some rows of some channels, a part all rows that one program adds up."""

    rows: int
    channels: int
    tall: int  # rows of a tile
    wide: int  # channels of a tile
    per: int  # rows of a part
    parts: int
    unit: int  # channels are a multiple of this: numbers that can be read together
    warps: int

    @classmethod
    def of(cls, x: Tensor, widest: int = WIDE) -> Cut:
        channels = x.shape[1]
        rows, wide = x.numel() // channels, min(widest, triton.next_power_of_2(channels))
        tall = TILE // wide
        per = triton.cdiv(triton.cdiv(rows, PARTS), tall) * tall
        return cls(rows, channels, tall, wide, per, triton.cdiv(rows, per), math.gcd(channels, 16), WARPS)

    @property
    def blocks(self) -> int:
        return int(triton.cdiv(self.channels, self.wide))

    @property
    def tiles(self) -> tuple[int, int]:
        return int(triton.cdiv(self.rows, self.tall)), self.blocks


def tickets(channels: int, device: torch.device) -> Tensor:
    """Counters by which the last of several programs knows that it is the last; forward and backward.

    For each block of channels, of each network that shares a pass, and of all of them.
    """
    return torch.zeros((2, (GROUPS + 1) * -(-channels // WIDE)), dtype=torch.int32, device=device)


def in_rows(x: Tensor) -> bool:
    """Whether a batch has rows, the channels of which lie next to each other."""
    if not x.numel():  # which the kernels could not cut into pieces
        return False
    return x.is_contiguous() if x.dim() == 2 else x.is_contiguous(memory_format=torch.channels_last)


def rows_of(x: Tensor) -> Tensor:
    """The same batch with its channels next to each other."""
    if in_rows(x):
        return x
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.contiguous()
