"""Losses over the columns of a batch, and rows of length 1, in few kernels.

As in :mod:`isofed.functional.pairs`, a value is found together with its gradient where both need the same numbers.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isofed.functional.kernels import Plain, again, found_before, here, tl, triton

MOST = 128  # samples, and classes
WIDEST = 8192  # features
COLUMNS = 16  # of a program


def available(z: Tensor) -> bool:
    """Whether these kernels can be used for such features or logits."""
    fits = z.dim() == 2 and 2 <= len(z) <= MOST and 1 <= z.shape[1] <= WIDEST
    return here(z) and z.dtype == torch.float32 and fits


def rows_available(z: Tensor) -> bool:
    """Whether rows can be scaled by the kernel."""
    fits = z.dim() == 2 and len(z) > 0 and 1 <= z.shape[1] <= WIDEST
    return here(z) and z.dtype == torch.float32 and fits


def unit(z: Tensor, plain: Plain, shortest: float) -> Tensor:
    """Rows scaled to length 1."""
    return _Unit.apply(z, plain, shortest)


def scaled(z: Tensor, shortest: float) -> tuple[Tensor, Tensor]:
    """The same without a gradient, and what each row was multiplied by: 0 where it is no longer than ``shortest``."""
    rows, width = z.shape
    y, scales = torch.empty_like(z, memory_format=torch.contiguous_format), z.new_empty(rows)
    _unit[(rows,)](z.contiguous(), y, scales, width, shortest, triton.next_power_of_2(width))
    return y, scales


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, plain: Plain, shortest: float) -> Tensor:
        y, scales = scaled(z, shortest)
        ctx.save_for_backward(z, y, scales)
        ctx.plain = plain
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        z, y, scales = ctx.saved_tensors
        if torch.is_grad_enabled():
            return again(ctx.plain, z, g), None, None
        dz = torch.empty_like(y)
        _unit_back[(len(y),)](y, scales, g.contiguous(), dz, y.shape[1], triton.next_power_of_2(y.shape[1]))
        return dz, None, None


def variance(
    logits: Tensor, onto: Tensor | None, plain: Plain, deviation: bool, target: float, hinge: str, weight: float
) -> Tensor:
    """How much less the probabilities of each class vary over the batch than they should, times the weight."""
    if onto is not None and not (onto.dim() == 0 and onto.dtype == torch.float32 and onto.device == logits.device):
        return onto + variance(logits, None, plain, deviation, target, hinge, weight)
    return _Variance.apply(logits, onto, plain, deviation, target, hinge, weight)


class _Variance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, onto: Tensor | None, plain: Plain, deviation: bool, target: float, hinge: str,
        weight: float,
    ) -> Tensor:  # fmt: skip
        count, classes = logits.shape
        loss, gradient = logits.new_empty(()), torch.empty_like(logits, memory_format=torch.contiguous_format)
        sides = triton.next_power_of_2(count), triton.next_power_of_2(classes)
        power = {"none": 0, "linear": 1, "squared": 2}[hinge]
        warps = min(16, max(1, sides[0] * sides[1] // 1024))
        _variance[(1,)](
            logits.contiguous(), gradient, loss, loss if onto is None else onto, onto is not None,
            count, classes, target, deviation, power, weight, *sides, num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(logits, gradient)
        ctx.plain = plain
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        to_logits, to_onto = ctx.needs_input_grad[:2]
        return found_before(ctx, g) if to_logits else None, g if to_onto else None, *[None] * 5


def decorrelation(z: Tensor, plain: Plain, paper: bool, weight: float) -> Tensor:
    """The squares of the correlations of the columns, as they are summed over samples: for more columns than those."""
    return _Decorrelation.apply(z, plain, paper, weight)


class _Decorrelation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, plain: Plain, paper: bool, weight: float) -> Tensor:
        count, width = z.shape
        loss, scales, own = z.new_empty(()), z.new_empty(width), z.new_empty(width)
        normal = torch.empty_like(z, memory_format=torch.contiguous_format)
        blocks, side = (triton.cdiv(width, COLUMNS),), triton.next_power_of_2(count)
        _standardise[blocks](z.contiguous(), normal, scales, own, count, width, side, COLUMNS)
        gram = normal @ normal.T
        weight *= (count * width) ** -2.0 if paper else 1 / (width * (width - 1) * count)
        gate = z.new_empty(())  # 0 where rounding has made the sum negative
        warps = min(16, max(1, side * side // 1024))
        _decorrelation[(1,)](
            gram, own, loss, gate, count, width, weight, paper, side, triton.next_power_of_2(width), num_warps=warps
        )  # fmt: skip
        # Here and not on the way back, whose thread may have no handle of cuBLAS yet and would warn.
        product = gram @ normal if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(z, normal, scales, own, product, gate)
        ctx.plain, ctx.paper = plain, paper
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        z, normal, scales, own, product, gate = ctx.saved_tensors
        if torch.is_grad_enabled():
            return again(ctx.plain, z, g), None, None, None
        count, width = normal.shape
        dz = torch.empty_like(normal)
        blocks, side = (triton.cdiv(width, COLUMNS),), triton.next_power_of_2(count)
        _standardise_back[blocks](
            normal, product, scales, own, gate, g, dz, count, width, ctx.paper, side, COLUMNS
        )  # fmt: skip
        return dz, None, None, None


if triton is not None:

    @triton.jit
    def _unit(z, y, scales, width, shortest, WIDTH: tl.constexpr):
        row, c = tl.program_id(0), tl.arange(0, WIDTH)
        v = tl.load(z + row * width + c, c < width, 0.0)
        squared = tl.sum(v * v, 0)
        long = squared > shortest * shortest
        scale = tl.where(long, 1 / tl.sqrt_rn(tl.where(long, squared, 1.0)), 0.0)
        tl.store(y + row * width + c, v * scale, c < width)
        tl.store(scales + row, scale)

    @triton.jit
    def _unit_back(y, scales, g, dz, width, WIDTH: tl.constexpr):
        row, c = tl.program_id(0), tl.arange(0, WIDTH)
        v = tl.load(y + row * width + c, c < width, 0.0)
        d = tl.load(g + row * width + c, c < width, 0.0)
        along = tl.sum(v * d, 0)
        tl.store(dz + row * width + c, (d - v * along) * tl.load(scales + row), c < width)

    @triton.jit
    def _variance(
        logits, gradient, loss, onto, ONTO: tl.constexpr, count, classes, target, deviation, power, weight,
        COUNT: tl.constexpr, CLASSES: tl.constexpr,
    ):  # fmt: skip
        i, j = tl.arange(0, COUNT), tl.arange(0, CLASSES)
        real, here = (i < count)[:, None] & (j < classes)[None, :], i[:, None] * classes + j[None, :]
        x = tl.load(logits + here, real, -float("inf"))
        x = tl.where((i < count)[:, None], x, 0.0)  # rows past the end stay finite
        e = tl.exp(x - tl.max(x, 1)[:, None])
        p = tl.where(real, e / tl.sum(e, 1)[:, None], 0.0)
        away = tl.where(real, p - (tl.sum(p, 0) / count)[None, :], 0.0)
        spread = tl.sum(away * away, 0) / (count - 1.0)
        seen = spread > 1.1754943508222875e-38
        root = tl.where(seen, tl.sqrt_rn(tl.where(seen, spread, 1.0)), 0.0)
        slope = tl.where(deviation, tl.where(seen, 0.5 / tl.where(seen, root, 1.0), 0.0), 1.0)
        spread = tl.where(deviation, root, spread)
        lacking = tl.where(j < classes, target - spread, 0.0)
        short = (lacking >= 0) | (power == 0)
        lacking = tl.where(short, lacking, 0.0)
        value = tl.sum(tl.where(power == 2, lacking * lacking, lacking), 0) * (weight / classes)
        if ONTO:
            value += tl.load(onto)
        tl.store(loss, value)
        slope *= tl.where(short, -tl.where(power == 2, 2 * lacking, 1.0), 0.0) * (weight / classes)
        d = away * (slope * 2 / (count - 1.0))[None, :]
        tl.store(gradient + here, p * (d - tl.sum(p * d, 1)[:, None]), real)

    @triton.jit
    def _standardise(z, normal, scales, own, count, width, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
        i, c = tl.arange(0, COUNT), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        real, here = (i < count)[:, None] & (c < width)[None, :], i[:, None] * width + c[None, :]
        v = tl.load(z + here, real, 0.0)
        for _ in tl.static_range(2):  # what rounding leaves of a large constant would look like a signal
            v = tl.where(real, v - (tl.sum(v, 0) / count)[None, :], 0.0)
        scale = 1 / tl.sqrt_rn(tl.sum(v * v, 0) / (count - 1.0) + 1e-8)
        v *= scale[None, :]
        tl.store(normal + here, v, real)
        tl.store(scales + c, scale, c < width)
        tl.store(own + c, tl.sum(v * v, 0), c < width)

    @triton.jit
    def _decorrelation(
        gram, own, loss, gate, count, width, weight, paper, COUNT: tl.constexpr, WIDTH: tl.constexpr
    ):  # fmt: skip
        i, j, c = tl.arange(0, COUNT), tl.arange(0, COUNT), tl.arange(0, WIDTH)
        g = tl.load(gram + i[:, None] * count + j[None, :], (i < count)[:, None] & (j < count)[None, :], 0.0)
        alone = tl.load(own + c, c < width, 0.0)
        total = tl.sum(g * g) - tl.where(paper, 0.0, tl.sum(alone * alone, 0))
        tl.store(loss, tl.maximum(total, 0.0) * weight)
        tl.store(gate, tl.where(total >= 0, weight, 0.0))

    @triton.jit
    def _standardise_back(
        normal, product, scales, own, gate, g, dz, count, width, paper, COUNT: tl.constexpr, COLUMNS: tl.constexpr
    ):  # fmt: skip
        i, c = tl.arange(0, COUNT), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        real, here = (i < count)[:, None] & (c < width)[None, :], i[:, None] * width + c[None, :]
        v = tl.load(normal + here, real, 0.0)
        alone = tl.where(paper, 0.0, tl.load(own + c, c < width, 0.0))
        d = tl.load(product + here, real, 0.0) - alone[None, :] * v
        d = tl.where(real, 4 * tl.load(gate) * tl.load(g) * d, 0.0)
        d -= v * (tl.sum(d * v, 0) / (count - 1.0))[None, :]
        d *= tl.load(scales + c, c < width, 0.0)[None, :]
        tl.store(dz + here, d - (tl.sum(tl.where(real, d, 0.0), 0) / count)[None, :], real)
