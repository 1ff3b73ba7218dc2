"""Pictures of several sizes on sheets of one size, and their means: see :mod:`isofed.models.beside`.

A batch is that of several sub-networks, one behind the other. Each has its own size, by which its pictures lie in the
upper left corner of their sheets, and its own number of channels, and none sees anything of another's. In PyTorch's
operations, and as kernels in Triton, which look at the pictures alone where nothing has to be written around them.
Their batch norm is in :mod:`isofed.models.sheet_norm`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from isofed.functional.kernels import here, tl, triton
from isofed.models.tiles import in_rows

if triton is not None:
    from isofed.models.resize import between

BLOCK = 512  # numbers of a program that resizes


class Sheets(NamedTuple):
    """What is whose: one entry for each of the sub-networks that share a batch."""

    sizes: Tensor  # int64 [n, 2]: height and width of its pictures
    counts: Tensor  # int64 [n]: channels that it has
    whole: bool  # whether the first is the whole network, whose statistics are stored


def resized(x: Tensor, sizes: Tensor) -> Tensor:
    """Pictures [batch, channels, height, width] at each of some sizes [n, 2], none of them larger, with zeros around.

    Bilinear, corner on corner, as :func:`isofed.models.resize.resized`; [n * batch, channels, height, width].
    """
    n, (high, wide) = len(sizes), x.shape[2:]
    if not (here(x) and in_rows(x)) or x.dtype == torch.float64 or x.requires_grad:
        whole = [F.interpolate(x, side, mode="bilinear", align_corners=True) for side in map(tuple, sizes.tolist())]
        return torch.cat([F.pad(y, (0, wide - y.shape[3], 0, high - y.shape[2])) for y in whole])
    shape = (n * len(x), *x.shape[1:])
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    _resize[(triton.cdiv(x.numel(), BLOCK), n)](
        x, y, sizes, sizes.stride(0), x.numel(), *x.shape[1:], high - 1.0, wide - 1.0, BLOCK
    )
    return y


def average(sizes: Tensor, x: Tensor) -> Tensor:
    """The mean over each picture, as pictures of one pixel."""
    if here(x) and in_rows(x) and x.dtype != torch.float64:
        made: Tensor = _Average.apply(x, sizes)
        return made
    areas = sizes.prod(1).repeat_interleave(len(x) // len(sizes)).view(-1, 1, 1, 1)
    return x.sum((2, 3), keepdim=True) / areas


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Tensor) -> Tensor:
        n, channels, *side = x.shape
        ctx.shape, each = x.shape, n // len(sizes)
        ctx.save_for_backward(sizes)
        y, wide = x.new_empty((n, channels, 1, 1)), min(128, triton.next_power_of_2(channels))
        _mean[(n, triton.cdiv(channels, wide))](x, y, sizes, sizes.stride(0), each, channels, *side, wide)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (sizes,) = ctx.saved_tensors
        n, channels, *side = ctx.shape
        dx = torch.empty(ctx.shape, dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
        wide = min(128, triton.next_power_of_2(channels))
        _spread[(n, triton.cdiv(channels, wide))](
            g.reshape(n, channels).contiguous(), dx, sizes, sizes.stride(0), n // len(sizes), channels, *side, wide
        )
        return dx, None


if triton is not None:

    @triton.jit
    def side(sizes, at, stride):
        """Height and width of a network's pictures."""
        return tl.load(sizes + at * stride).to(tl.int32), tl.load(sizes + at * stride + 1).to(tl.int32)

    @triton.jit
    def _resize(
        x, y, sizes, stride, count, channels, height, width, last_row, last_column, BLOCK: tl.constexpr
    ):  # fmt: skip
        g = tl.program_id(1)
        high, wide = side(sizes, g, stride)
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        c, pixel = i % channels, i // channels
        picture, row, column = pixel // (width * height), pixel // width % height, pixel % width
        inside = (i < count) & (row < high) & (column < wide)
        step_down = tl.div_rn(last_row, tl.maximum(high - 1, 1).to(tl.float32))
        step_right = tl.div_rn(last_column, tl.maximum(wide - 1, 1).to(tl.float32))
        down, right = row.to(tl.float32) * step_down, column.to(tl.float32) * step_right
        v = between(x, picture, c, down, right, channels, height, width, inside)
        place = y + g.to(tl.int64) * count + i
        tl.store(place, tl.where(inside, v, 0.0).to(y.dtype.element_ty), i < count)

    @triton.jit
    def _mean(x, y, sizes, stride, each, channels, height, width, CHANNELS: tl.constexpr):
        sample, c = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        g = sample // each
        high, wide = side(sizes, g, stride)
        total = tl.zeros((CHANNELS,), tl.float32)
        for r in range(0, high * wide):
            pixel = (sample.to(tl.int64) * height + r // wide) * width + r % wide
            total += tl.load(x + pixel * channels + c, c < channels, 0.0).to(tl.float32)
        mean = total / (high * wide).to(tl.float32)
        tl.store(y + sample.to(tl.int64) * channels + c, mean.to(y.dtype.element_ty), c < channels)

    @triton.jit
    def _spread(g, dx, sizes, stride, each, channels, height, width, CHANNELS: tl.constexpr):
        sample, c = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        n = sample // each
        high, wide = side(sizes, n, stride)
        share = tl.load(g + sample * channels + c, c < channels, 0.0).to(tl.float32) / (high * wide).to(tl.float32)
        for r in range(0, height * width):
            inside = (r // width < high) & (r % width < wide)
            place = dx + (sample.to(tl.int64) * height * width + r) * channels + c
            tl.store(place, tl.where(inside, share, 0.0).to(dx.dtype.element_ty), c < channels)
