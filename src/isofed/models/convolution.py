"""A convolution on a GPU with what stands around it: its bias, the ReLU behind it, the 2x2 maximum behind that.

PyTorch needs a kernel for each of them, and two for the gradient of a bias. Here it is one kernel forward and one back,
written in Triton. Sums are made in a fixed order, so the same input gives the same bits. Pictures lie channels-last.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isofed.functional.kernels import tl, triton
from isofed.models import tf32, thin
from isofed.models.tiles import PARTS, Cut, in_rows, rows_of, tickets


class FusedConv2d(nn.Conv2d):
    """A convolution that does more, or does it faster; where that is not possible it is made of PyTorch's own parts."""

    thin = False  # whether the gradient of its weights is that of :mod:`isofed.models.thin`,
    thick = False  # or it is that of :mod:`isofed.models.tf32` where that is the precision
    relu = False  # whether the ReLU behind it,
    pool = False  # and the maximum over squares of two by two behind that, have become parts of it
    ticket: Tensor | None = None

    @classmethod
    def of(cls, layer: nn.Conv2d, relu: bool, pool: bool) -> FusedConv2d:
        """The same convolution, with the same parameters and not copies of them."""
        made = cls.__new__(cls)
        made.__dict__ = layer.__dict__
        made.thin, made.thick, made.relu, made.pool = thin.fits(layer), tf32.fits(layer), relu, pool
        made.ticket = tickets(layer.out_channels, layer.weight.device)[0] if relu else None
        return made

    def forward(self, x: Tensor) -> Tensor:
        after = self.relu and x.is_cuda  # the bias comes together with the ReLU
        bias = None if after else self.bias
        if self.thin and thin.applies(x, self.weight):
            y = thin.convolution(x, self.weight, bias, self.stride[0], int(self.padding[0]))
        elif self.thick and tf32.applies(x, self.weight):
            y = tf32.convolution(x, self.weight, bias, self.stride[0], int(self.padding[0]))
        else:
            y = self._conv_forward(x, self.weight, bias)
        if after and in_rows(y):
            return _BiasReLU.apply(y, self.bias, self.ticket, self.pool)
        return self.behind(y + self.bias.to(y.dtype)[:, None, None] if after and self.bias is not None else y)

    def behind(self, y: Tensor) -> Tensor:
        """What stood behind the convolution, in PyTorch's own parts."""
        y = y.relu() if self.relu else y
        return F.max_pool2d(y, 2) if self.pool else y


class _BiasReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, ticket: Tensor, pool: bool) -> Tensor:
        n, channels, height, width = x.shape
        size = (n, channels, height // 2, width // 2) if pool else x.shape
        y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        which = torch.empty_like(y, dtype=torch.int8) if pool else y  # of four was the largest
        cut = Cut.of(y)
        _forward[cut.tiles](
            x, bias, y, which, cut.rows, channels, height, width, *size[2:], cut.tall, cut.wide, pool
        )  # fmt: skip
        ctx.save_for_backward(bias, ticket, y, which)
        ctx.size, ctx.pool = x.shape, pool
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        bias, ticket, y, which = ctx.saved_tensors
        g, cut, (_, channels, height, width) = rows_of(g), Cut.of(y), ctx.size
        dx = torch.empty(ctx.size, dtype=y.dtype, device=y.device, memory_format=torch.channels_last)
        if ctx.pool and (height % 2 or width % 2):
            dx.zero_()  # of a row or column that is in no square
        sums, dbias = torch.empty((cut.parts, channels), device=y.device), torch.empty_like(bias)
        _backward[(cut.parts, cut.blocks)](
            g, y, which, dx, dbias, sums, ticket, cut.rows, channels, height, width, *y.shape[2:], cut.per, cut.parts,
            cut.tall, cut.wide, PARTS, ctx.pool,
        )  # fmt: skip
        return dx, dbias, None, None


if triton is not None:

    @triton.jit
    def _corner(r, c, channels, height, width, out_height, out_width):
        """Where the first of the four numbers under an output stands."""
        picture, place = r // (out_height * out_width), r % (out_height * out_width)
        row = picture.to(tl.int64) * height + place // out_width * 2
        return (row * width + place % out_width * 2)[:, None] * channels + c[None, :]

    @triton.jit
    def _forward(
        x, bias, y, which, rows, channels, height, width, out_height, out_width,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, POOL: tl.constexpr,
    ):  # fmt: skip
        """A tile of the result."""
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = (r < rows)[:, None] & (c < channels)[None, :]
        b = tl.load(bias + c, c < channels, 0.0).to(tl.float32)
        place = r[:, None].to(tl.int64) * channels + c[None, :]
        if POOL:
            at = _corner(r, c, channels, height, width, out_height, out_width)
            v = tl.load(x + at, inside, 0.0).to(tl.float32)
            best = tl.zeros((ROWS, CHANNELS), tl.int8)
            for k in tl.static_range(1, 4):
                other = tl.load(x + at + ((k // 2) * width + k % 2) * channels, inside, 0.0).to(tl.float32)
                better = (other > v) | (other != other)  # which hands a NaN on
                v = tl.where(better, other, v)
                best = tl.where(better, tl.full((ROWS, CHANNELS), k, tl.int8), best)
            tl.store(which + place, best, inside)
        else:
            v = tl.load(x + place, inside, 0.0).to(tl.float32)
        v += b[None, :]
        tl.store(y + place, tl.where(v < 0, 0.0, v).to(y.dtype.element_ty), inside)

    @triton.jit
    def _backward(
        g, y, which, dx, dbias, sums, ticket, rows, channels, height, width, out_height, out_width, per, parts,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr, POOL: tl.constexpr,
    ):  # fmt: skip
        """The gradient of a part of the rows, and its sum; who comes last adds the sums up."""
        part, c = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        here = c < channels
        total = tl.zeros((ROWS, CHANNELS), tl.float32)
        for start in range(0, per, ROWS):
            r = part * per + start + tl.arange(0, ROWS)
            inside = (r < rows)[:, None] & here[None, :]
            place = r[:, None].to(tl.int64) * channels + c[None, :]
            d = tl.load(g + place, inside, 0.0).to(tl.float32)
            d = tl.where(tl.load(y + place, inside, 0.0) > 0, d, 0.0)
            total += d
            d = d.to(dx.dtype.element_ty)
            if POOL:
                at = _corner(r, c, channels, height, width, out_height, out_width)
                best = tl.load(which + place, inside, 0)
                for k in tl.static_range(0, 4):
                    where = dx + at + ((k // 2) * width + k % 2) * channels
                    tl.store(where, tl.where(best == k, d, 0.0), inside)
            else:
                tl.store(dx + place, d, inside)
        tl.store(sums + part * channels + c, tl.sum(total, 0), here)
        tl.debug_barrier()
        if tl.atomic_add(ticket + tl.program_id(1), 1) == parts - 1:
            p = tl.arange(0, PARTS)
            made = (p < parts)[:, None] & here[None, :]
            all_parts = tl.load(sums + p[:, None] * channels + c[None, :], made, 0.0, cache_modifier=".cg")
            tl.store(dbias + c, tl.sum(all_parts, 0).to(dbias.dtype.element_ty), here)
            tl.store(ticket + tl.program_id(1), 0)
