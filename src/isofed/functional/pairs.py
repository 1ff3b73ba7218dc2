"""Losses over all pairs of a batch, as one kernel between two matrix products.

Written with PyTorch's operations, uniformity and hyperspherical energy are some twenty kernels on matrices of 64 x 64,
and as many again for the gradient. Both are functions of the Gram matrix G = Z Z' alone. So the gradient is M Z, with a
symmetric matrix M that the same kernel finds as finds the value: it is given along with it.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isofed.functional.kernels import Plain, found_before, here, tl, triton

MOST = 128  # samples; more would not fit into a program


def available(z: Tensor) -> bool:
    """Whether these kernels can be used for such features."""
    return here(z) and z.dtype == torch.float32 and 2 <= len(z) <= MOST


def uniformity(z: Tensor, plain: Plain, factor: float, detach: bool, sigma: float | None) -> Tensor:
    """The mean over pairs of exp(-||z_i - z_j||^2 / (factor * median))."""
    return _OfPairs.apply(z, plain, "uniformity", (factor, detach, sigma))


def energy(z: Tensor, plain: Plain, eps: float, diagonal: bool, shortest: float) -> Tensor:
    """The mean over pairs of 1 / (1 - cosine + eps)."""
    return _OfPairs.apply(z, plain, "energy", (eps, diagonal, shortest))


class _OfPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, plain: Plain, kind: str, options: tuple[Any, ...]) -> Tensor:
        wide = z.double()
        count, side = len(z), max(16, triton.next_power_of_2(len(z)))
        loss, matrix = z.new_empty(()), wide.new_empty((count, count))
        warps = max(1, side * side // 1024)
        if kind == "uniformity":
            factor, detach, sigma = options
            wide = wide - wide.mean(0)
            gram = wide @ wide.T
            median = sigma is None
            _uniformity[(1,)](
                gram, matrix, loss, count, sigma or 0.0, factor, median, median and not detach, side,
                num_warps=min(16, warps),
            )  # fmt: skip
        else:
            gram = wide @ wide.T
            _energy[(1,)](gram, matrix, loss, count, *options, side, num_warps=min(16, warps))
        # Here and not on the way back, whose thread may have no handle of cuBLAS yet and would warn.
        ctx.save_for_backward(z, (matrix @ wide).to(z.dtype) if ctx.needs_input_grad[0] else None)
        ctx.plain = plain
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return found_before(ctx, g), None, None, None


if triton is not None:

    @triton.jit
    def _median(values, chosen):
        """The lower median of the chosen values, none of them negative, by halving the range of their bits."""
        bits, rank = values.to(tl.int32, bitcast=True), (tl.sum(chosen.to(tl.int32)) + 1) // 2
        low, high = tl.full((), 0, tl.int32), tl.full((), 0x7F800000, tl.int32)
        for _ in range(31):
            middle = low + (high - low) // 2
            enough = tl.sum((chosen & (bits <= middle)).to(tl.int32)) >= rank
            low, high = tl.where(enough, low, middle + 1), tl.where(enough, middle, high)
        return tl.where(rank > 0, high.to(tl.float32, bitcast=True), 1.0)

    @triton.jit
    def _uniformity(
        gram, matrix, loss, count, sigma, factor, MEDIAN: tl.constexpr, ATTACHED: tl.constexpr, SIDE: tl.constexpr
    ):  # fmt: skip
        i, j = tl.arange(0, SIDE), tl.arange(0, SIDE)
        pair = (i < count)[:, None] & (j < count)[None, :]
        here = i[:, None] * count + j[None, :]
        own, other = tl.load(gram + i * (count + 1), i < count, 0.0), tl.load(gram + j * (count + 1), j < count, 0.0)
        both = own[:, None] + other[None, :]
        distance = both - 2 * tl.load(gram + here, pair, 0.0)
        others = pair & (i[:, None] != j[None, :])
        # What is left of two equal rows is rounding, not a distance.
        apart = others & (distance > 64 * 2.220446049250313e-16 * both)
        d = tl.where(apart, distance, 0.0).to(tl.float32)
        s = sigma
        if MEDIAN:
            s = _median(d, apart)
        e = tl.where(others, tl.exp(-d / (s * factor)), 0.0)
        pairs = count * (count - 1.0)
        tl.store(loss, tl.sum(e) / pairs)
        slope = tl.where(apart, -e / (s * factor), 0.0)
        if ATTACHED:
            same = apart & (d == s)
            share = tl.sum(e * d) / (s * s * factor) / tl.maximum(tl.sum(same.to(tl.float32)), 1.0)
            slope += tl.where(same, share, 0.0)
        slope = slope * (4 / pairs)
        m = tl.where(i[:, None] == j[None, :], tl.sum(slope, 1)[:, None], -slope)
        tl.store(matrix + here, m.to(tl.float64), pair)

    @triton.jit
    def _energy(gram, matrix, loss, count, eps, diagonal, shortest, SIDE: tl.constexpr):
        i, j = tl.arange(0, SIDE), tl.arange(0, SIDE)
        pair = (i < count)[:, None] & (j < count)[None, :]
        here = i[:, None] * count + j[None, :]
        own, other = tl.load(gram + i * (count + 1), i < count, 0.0), tl.load(gram + j * (count + 1), j < count, 0.0)
        least = shortest * shortest
        left = tl.where(own > least, 1 / tl.sqrt(tl.where(own > least, own, 1.0)), 0.0)
        right = tl.where(other > least, 1 / tl.sqrt(tl.where(other > least, other, 1.0)), 0.0)
        scale = left[:, None] * right[None, :]
        cosine = tl.load(gram + here, pair, 0.0) * scale
        others = pair & (i[:, None] != j[None, :])
        apart = tl.where(others, 1 - cosine, 1.0)
        apart32 = tl.maximum(apart, 0.0).to(tl.float32)
        one = 1 / (apart32 + eps)
        alone = tl.where(diagonal, count / eps, 0.0)
        pairs = tl.where(diagonal, count * 1.0 * count, count * (count - 1.0))
        tl.store(loss, (tl.sum(tl.where(others, one, 0.0)) + alone) / pairs)
        slope = tl.where(others & (apart >= 0), one * one / pairs, 0.0)  # with respect to the cosine
        turn = tl.sum(slope * cosine, 1) * left * left
        m = tl.where(i[:, None] == j[None, :], -2 * turn[:, None], 2 * slope * scale)
        tl.store(matrix + here, m.to(tl.float64), pair)
