"""Losses over all pairs of a batch, in two or three kernels forward and one back.

Written with PyTorch's operations, uniformity and hyperspherical energy are some twenty kernels on matrices of 64 x 64,
and as many again for the gradient. Here distances are sums of squared differences, for which float32 is enough; there
they are made in float64, so that something is left between long vectors that are close to each other. The kernel that
finds the value from them also finds how strongly each pair pulls; on the way back each sample is moved along its
differences to the others by that much.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isofed.functional import columns
from isofed.functional.kernels import Plain, again, here, tl, triton

MOST = 128  # samples; more would not fit into a program
ROWS, COLUMNS, DEEP = 16, 32, 8  # on the way back: samples and features of a program, and what is summed at a time
FEW, FAR = 4, 32  # of distances: samples of a program, and features at a time


def available(z: Tensor) -> bool:
    """Whether these kernels can be used for such features."""
    return here(z) and z.dtype == torch.float32 and 2 <= len(z) <= MOST and 1 <= z.shape[1] <= columns.WIDEST


def uniformity(z: Tensor, plain: Plain, factor: float, detach: bool, sigma: float | None, weight: float) -> Tensor:
    """The mean over pairs of exp(-||z_i - z_j||^2 / (factor * median)), times the weight."""
    return _OfPairs.apply(z, plain, "uniformity", (factor, detach, sigma), weight)


def energy(z: Tensor, plain: Plain, eps: float, diagonal: bool, shortest: float, weight: float) -> Tensor:
    """The mean over pairs of 1 / (1 - cosine + eps), times the weight."""
    return _OfPairs.apply(z, plain, "energy", (eps, diagonal, shortest), weight)


class _OfPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, plain: Plain, kind: str, options: tuple[Any, ...], weight: float) -> Tensor:
        count, width = z.shape
        side = max(16, triton.next_power_of_2(count))
        loss, pull, squared = z.new_empty(()), z.new_empty((count, count)), z.new_empty((count, count))
        v, scales, along = z.contiguous(), pull, pull  # not the loss: whoever changes that in place may do so
        if kind == "energy":
            v, scales = columns.scaled(z, options[2])
            along = z.new_empty(count)
        _apart[(triton.cdiv(count, FEW),)](v, squared, count, width, side, FEW, FAR, num_warps=max(4, side // 16))
        warps = min(16, max(1, side * side // 512))
        if kind == "uniformity":
            factor, detach, sigma = options
            median = sigma is None
            _uniformity[(1,)](
                squared, pull, loss, count, sigma or 0.0, factor, weight, median, median and not detach, side,
                num_warps=warps,
            )  # fmt: skip
        else:
            _energy[(1,)](squared, scales, pull, along, loss, count, *options[:2], weight, side, num_warps=warps)
        ctx.save_for_backward(z, v, pull, scales, along)
        ctx.plain, ctx.unit = plain, kind == "energy"
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        z, v, pull, scales, along = ctx.saved_tensors
        if torch.is_grad_enabled():
            return again(ctx.plain, z, g), None, None, None, None
        (count, width), dz = v.shape, torch.empty_like(v)
        _back[(triton.cdiv(count, ROWS), triton.cdiv(width, COLUMNS))](
            v, pull, scales, along, g, dz, count, width, ctx.unit, ROWS, COLUMNS, DEEP
        )  # fmt: skip
        return dz, None, None, None, None


if triton is not None:

    @triton.jit
    def _apart(v, squared, count, width, SIDE: tl.constexpr, ROWS: tl.constexpr, DEEP: tl.constexpr):
        """Squared distances of some rows to all."""
        i, j = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIDE)
        total = tl.zeros((ROWS, SIDE, DEEP), tl.float32)
        for start in range(0, width, DEEP):
            k = start + tl.arange(0, DEEP)
            within = (k < width)[None, None, :]
            one = tl.load(v + i[:, None, None] * width + k[None, None, :], (i < count)[:, None, None] & within, 0.0)
            two = tl.load(v + j[None, :, None] * width + k[None, None, :], (j < count)[None, :, None] & within, 0.0)
            away = one - two
            total += away * away
        pair = (i < count)[:, None] & (j < count)[None, :]
        tl.store(squared + i[:, None] * count + j[None, :], tl.sum(total, 2), pair)

    @triton.jit
    def _median(values, chosen):
        """The lower median of the chosen values, none of them negative, by finding two bits at a time."""
        bits, rank = values.to(tl.int32, bitcast=True), (tl.sum(chosen.to(tl.int32)) + 1) // 2
        half = 1 << 30
        base = tl.where(tl.sum((chosen & (bits < half)).to(tl.int32)) >= rank, 0, half)
        for n in range(15):
            step = 1 << (28 - 2 * n)
            # How many are below each of three limits, in one sum: a count has less than 20 bits.
            below = (chosen & (bits < base + step)).to(tl.int64)
            below += (chosen & (bits < base + 2 * step)).to(tl.int64) << 20
            below += (chosen & (bits < base + 3 * step)).to(tl.int64) << 40
            counts = tl.sum(below)
            one, two, three = counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40
            base += step * ((one < rank).to(tl.int32) + (two < rank).to(tl.int32) + (three < rank).to(tl.int32))
        return tl.where(rank > 0, base.to(tl.float32, bitcast=True), 1.0)

    @triton.jit
    def _uniformity(
        squared, pull, loss, count, sigma, factor, weight,
        MEDIAN: tl.constexpr, ATTACHED: tl.constexpr, SIDE: tl.constexpr,
    ):  # fmt: skip
        i, j = tl.arange(0, SIDE), tl.arange(0, SIDE)
        pair, here = (i < count)[:, None] & (j < count)[None, :], i[:, None] * count + j[None, :]
        others = pair & (i[:, None] != j[None, :])
        d = tl.load(squared + here, others, 0.0)
        apart = others & (d > 0)
        s = sigma
        if MEDIAN:
            s = _median(d, apart)
        e = tl.where(others, tl.exp(-d / (s * factor)), 0.0)
        pairs = count * (count - 1.0)
        tl.store(loss, tl.sum(e) * (weight / pairs))
        slope = tl.where(apart, -e / (s * factor), 0.0)
        if ATTACHED:
            same = apart & (d == s)
            share = tl.sum(e * d) / (s * s * factor) / tl.maximum(tl.sum(same.to(tl.float32)), 1.0)
            slope += tl.where(same, share, 0.0)
        tl.store(pull + here, slope * (-4 * weight / pairs), pair)

    @triton.jit
    def _energy(squared, scales, pull, along, loss, count, eps, diagonal, weight, SIDE: tl.constexpr):
        i, j = tl.arange(0, SIDE), tl.arange(0, SIDE)
        pair, here = (i < count)[:, None] & (j < count)[None, :], i[:, None] * count + j[None, :]
        others = pair & (i[:, None] != j[None, :])
        left, right = tl.load(scales + i, i < count, 0.0), tl.load(scales + j, j < count, 0.0)
        long = others & (left > 0)[:, None] & (right > 0)[None, :]
        # Of vectors of length 1 this is 1 - cosine. One that has no direction is at a right angle to all.
        apart = tl.where(long, tl.load(squared + here, pair, 0.0) / 2, 1.0)
        one = 1 / (apart + eps)
        alone = tl.where(diagonal, count / eps, 0.0)
        pairs = tl.where(diagonal, count * 1.0 * count, count * (count - 1.0))
        tl.store(loss, (tl.sum(tl.where(others, one, 0.0)) + alone) * (weight / pairs))
        slope = tl.where(long, one * one * (2 * weight / pairs), 0.0)  # with respect to the cosine
        tl.store(pull + here, slope, pair)
        tl.store(along + i, tl.sum(slope * apart, 1), i < count)

    @triton.jit
    def _back(
        v, pull, scales, along, g, dz, count, width,
        UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr,
    ):  # fmt: skip
        """Each row along its differences to the others; of rows that were scaled, what is left beside their length."""
        i, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        here, at = (i < count)[:, None] & (k < width)[None, :], i[:, None] * width + k[None, :]
        own = tl.load(v + at, here, 0.0)
        total = tl.zeros((ROWS, COLUMNS, DEEP), tl.float32)
        for start in range(0, count, DEEP):
            j = start + tl.arange(0, DEEP)
            there = (j < count)[None, None, :]
            c = tl.load(pull + j[None, None, :] * count + i[:, None, None], there & (i < count)[:, None, None], 0.0)
            other = tl.load(v + j[None, None, :] * width + k[None, :, None], there & (k < width)[None, :, None], 0.0)
            total += c * (other - own[:, :, None])
        moved = tl.sum(total, 2)
        if UNIT:
            moved += own * tl.load(along + i, i < count, 0.0)[:, None]
            moved *= tl.load(scales + i, i < count, 0.0)[:, None]
        tl.store(dz + at, moved * tl.load(g), here)
