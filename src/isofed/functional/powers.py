"""A power iteration among a few places, as one kernel forward and one back.

Written with PyTorch's operations (:mod:`isofed.functional.lipschitz`) it is some fifty kernels on matrices of 16 x 16,
and as many again for the gradient: most of what FedAlign would cost on a GPU. Here one program does it for one sample,
with both matrices at hand all the time.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isofed.functional.kernels import here, tl, triton

MOST = 64  # places; more would not fit into a program


def available(like: Tensor, places: int) -> bool:
    """Whether this kernel can be used for matrices of so many places, where such a tensor is."""
    return here(like) and like.dtype == torch.float32 and places <= MOST


def largest_stretch(within: Tensor, between: Tensor, start: Tensor, iterations: int) -> Tensor:
    """The square root of how much a last step lengthens: |a B w'| / |a B w|, with w' = W B w after the steps before.

    Args:
        within: W = a'a of each sample, [batch, places, places], of whatever size its numbers are.
        between: B = b'b, likewise.
        start: a' times ones, [batch, places].
        iterations: two at least; w is ``start`` after all but two steps w -> W B w.

    Returns:
        [batch]; 0, without a gradient, where a step leads to nothing.
    """
    return _LargestStretch.apply(within, between, start, iterations)


class _LargestStretch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, within: Tensor, between: Tensor, start: Tensor, iterations: int) -> Tensor:
        within, between, start = within.contiguous(), between.contiguous(), start.contiguous()
        batch, places = start.shape
        found = start.new_empty(batch)
        steps = iterations - 2
        # Each step's w and B w, then the last w, x = B w, w' = W x and x' = B w'; and 1 / the largest of each w.
        kept, scales = start.new_empty((batch, 2 * steps + 4, places)), start.new_empty((batch, steps + 1))
        _forward[(batch,)](within, between, start, found, kept, scales, places, steps, triton.next_power_of_2(places))
        ctx.save_for_backward(within, between, kept, scales, found)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        within, between, kept, scales, found = ctx.saved_tensors
        batch, rows, places = kept.shape
        gradients = torch.empty_like(within), torch.empty_like(between), kept.new_empty((batch, places))
        _backward[(batch,)](
            within, between, kept, scales, found, g.contiguous(), *gradients, places, (rows - 4) // 2,
            triton.next_power_of_2(places),
        )  # fmt: skip
        return *gradients, None


if triton is not None:

    @triton.jit
    def _times(matrix, vector):
        return tl.sum(matrix * vector[None, :], 1)

    @triton.jit
    def _to_one(vector):
        """What makes the largest number of a vector 1, so that numbers stay in their range."""
        largest = tl.max(tl.abs(vector), 0)
        return tl.where(largest > 0, 1.0 / largest, 1.0)

    @triton.jit
    def _of_trace_one(matrix, at, inside, P: tl.constexpr):
        """A matrix divided by its trace, and the trace: in place of squared lengths, which would leave their range."""
        m = tl.load(matrix + at, inside, 0.0)
        trace = tl.sum(tl.sum(tl.where(tl.arange(0, P)[:, None] == tl.arange(0, P)[None, :], m, 0.0), 1), 0)
        trace = tl.where(trace > 0, trace, 1.0)
        return m / trace, trace

    @triton.jit
    def _forward(within, between, start, found, kept, scales, places, steps, P: tl.constexpr):
        sample, i, j = tl.program_id(0), tl.arange(0, P), tl.arange(0, P)
        inside = (i < places)[:, None] & (j < places)[None, :]
        at = sample * places * places + i[:, None] * places + j[None, :]
        W, size_W = _of_trace_one(within, at, inside, P)
        B, size_B = _of_trace_one(between, at, inside, P)
        row = kept + sample * (2 * steps + 4) * places + i
        w = tl.load(start + sample * places + i, i < places, 0.0)
        scale = _to_one(w)
        tl.store(scales + sample * (steps + 1), scale)
        w *= scale
        for k in range(steps):
            tl.store(row, w, i < places)
            x = _times(B, w)
            tl.store(row + places, x, i < places)
            w = _times(W, x)
            scale = _to_one(w)
            tl.store(scales + sample * (steps + 1) + k + 1, scale)
            w *= scale
            row += 2 * places
        x = _times(B, w)
        after = _times(W, x)
        y = _times(B, after)
        tl.store(row, w, i < places)
        tl.store(row + places, x, i < places)
        tl.store(row + 2 * places, after, i < places)
        tl.store(row + 3 * places, y, i < places)
        first, second = tl.sum(x * after, 0), tl.sum(y * _times(W, y), 0)  # lengths of a x and a y, squared
        real = (first > 0) & (second > 0)
        ratio = tl.sqrt_rn(tl.where(real, second, 0.0)) / tl.sqrt_rn(tl.where(real, first, 1.0))
        tl.store(found + sample, tl.sqrt_rn(ratio) * (tl.sqrt_rn(size_W) * tl.sqrt_rn(size_B)))

    @triton.jit
    def _backward(
        within, between, kept, scales, found, g, dwithin, dbetween, dstart, places, steps, P: tl.constexpr
    ):  # fmt: skip
        sample, i, j = tl.program_id(0), tl.arange(0, P), tl.arange(0, P)
        inside = (i < places)[:, None] & (j < places)[None, :]
        at = sample * places * places + i[:, None] * places + j[None, :]
        W, size_W = _of_trace_one(within, at, inside, P)
        B, size_B = _of_trace_one(between, at, inside, P)
        row = kept + sample * (2 * steps + 4) * places + 2 * steps * places + i
        w, x = tl.load(row, i < places, 0.0), tl.load(row + places, i < places, 0.0)
        after = tl.load(row + 2 * places, i < places, 0.0)
        y = tl.load(row + 3 * places, i < places, 0.0)
        quarter = tl.load(g + sample) * tl.load(found + sample) / 4
        Wy = _times(W, y)
        first, second = tl.sum(x * after, 0), tl.sum(y * Wy, 0)
        real = (first > 0) & (second > 0)
        dfirst = tl.where(real, -quarter / tl.where(real, first, 1.0), 0.0)
        dsecond = tl.where(real, quarter / tl.where(real, second, 1.0), 0.0)
        dy = 2 * dsecond * Wy
        dafter = _times(B, dy)
        dx = _times(W, dafter) + 2 * dfirst * after
        dW = (dsecond * y)[:, None] * y[None, :] + (dafter + dfirst * x)[:, None] * x[None, :]
        dB = dy[:, None] * after[None, :] + dx[:, None] * w[None, :]
        d = _times(B, dx)  # of w
        for n in range(steps):
            k = steps - 1 - n
            row -= 2 * places
            w, x = tl.load(row, i < places, 0.0), tl.load(row + places, i < places, 0.0)
            d *= tl.load(scales + sample * (steps + 1) + k + 1)
            dW += d[:, None] * x[None, :]
            dx = _times(W, d)
            dB += dx[:, None] * w[None, :]
            d = _times(B, dx)
        # The result is found of W and B as they came: it grows with the root of either, so nothing comes by the traces.
        tl.store(dwithin + at, dW / size_W, inside)
        tl.store(dbetween + at, dB / size_B, inside)
        tl.store(dstart + sample * places + i, d * tl.load(scales + sample * (steps + 1)), i < places)
