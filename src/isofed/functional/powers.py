"""The norm of a stage by power iteration, as one kernel forward and one back.

Written with PyTorch's operations (:mod:`isofed.functional.lipschitz`) it is some eighty kernels on matrices of 16 x 16,
and as many again for the gradient: most of what FedAlign would cost on a GPU. Here one program does it for one sample,
from the two feature maps as they are to the number, with all matrices at hand all the time.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isofed.functional.kernels import here, tl, triton

MOST = 64  # places; more would not fit into a program
WINDOW = 16  # pixels of a place, at most
_KINDS = (torch.float32, torch.bfloat16, torch.float16)

Maps = tuple[Tensor, Tensor]  # before a stage and after it, [batch, channels, height, width]
Plain = Callable[[Tensor, Tensor], Tensor]  # the norm of a stage in PyTorch's operations


def available(a: Tensor, b: Tensor, iterations: int) -> bool:
    """Whether this kernel can be used for these maps, [batch, channels, height, width]."""
    if iterations < 2 or len(a) != len(b) or not a.numel() or not b.numel() or not (here(a) and here(b)):
        return False
    high, wide = _places(a, b)
    divides = not any(m.shape[2] % high or m.shape[3] % wide for m in (a, b))
    window = max(m[0, 0].numel() for m in (a, b)) // (high * wide)
    return high * wide <= MOST and divides and window <= WINDOW and a.dtype in _KINDS and b.dtype in _KINDS


def stage_norm(a: Tensor, b: Tensor, iterations: int, plain: Plain) -> Tensor:
    """The norm of each sample, [batch]; 0, without a gradient, where a step leads to nothing.

    With w = a'v, a step v -> a b'b a'v is w -> W B w among the places, with W = a'a and B = b'b. Starting from v = ones
    the last two of the steps are written out: the result is the square root of |a B w'| / |a B w|, with w' = W B w.
    """
    return _StageNorm.apply(_by_place(a), _by_place(b), iterations, plain)


def two_available(first: Maps, second: Maps, iterations: int) -> bool:
    """Whether the norms of two stages can be found together: the first has no gradient, and both as many places."""
    fixed = not any(m.requires_grad for m in first)
    alike = len(first[0]) == len(second[0]) and _places(*first) == _places(*second)
    return fixed and alike and available(*first, iterations) and available(*second, iterations)


def two_norms(first: Maps, second: Maps, iterations: int, plain: Plain) -> tuple[Tensor, Tensor]:
    """The norms of two stages, in one kernel."""
    found: tuple[Tensor, Tensor] = _TwoNorms.apply(*(_by_place(m) for m in (*first, *second)), iterations, plain)
    return found


def _places(a: Tensor, b: Tensor) -> tuple[int, int]:
    """The size to which both maps are averaged down."""
    return min(a.shape[2], b.shape[2]), min(a.shape[3], b.shape[3])


def _by_place(m: Tensor) -> Tensor:
    """A map with the channels of a place next to each other; it may be some of the channels of a larger one."""
    return m if m.stride(1) == 1 else m.contiguous(memory_format=torch.channels_last)


def _described(m: Tensor, places: tuple[int, int]) -> tuple[int, ...]:
    """Where a map's numbers are: steps to the next sample, row and column, channels, and the window of a place."""
    windows = (m.shape[2] // places[0], m.shape[3] // places[1])
    return m.stride(0), m.stride(2), m.stride(3), m.shape[1], *windows


class _StageNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, iterations: int, plain: Plain) -> Tensor:
        ctx.plain = plain
        return _found(ctx, a, b, iterations)[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, g, *ctx.needs_input_grad[:2]), None, None


class _TwoNorms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, c: Tensor, d: Tensor, iterations: int, plain: Plain
    ) -> tuple[Tensor, Tensor]:
        ctx.plain = plain
        second, first = _found(ctx, c, d, iterations, beside=(a, b))
        ctx.mark_non_differentiable(first)
        return first, second

    @staticmethod
    def backward(ctx: Any, _: Tensor, g: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_gradients(ctx, g, *ctx.needs_input_grad[2:4]), None, None


def _found(ctx: Any, a: Tensor, b: Tensor, iterations: int, beside: Maps | None = None) -> tuple[Tensor, Tensor]:
    """The norm of a stage, of which all is kept that a gradient needs, and that of another one beside it, if any."""
    places, steps, batch = _places(a, b), iterations - 2, len(a)
    P = max(16, triton.next_power_of_2(places[0] * places[1]))
    found, grams = a.new_empty((2, batch), dtype=torch.float32), a.new_empty((2, batch, P, P), dtype=torch.float32)
    # Each step's w and B w, then the last w, x = B w, w' = W x and x' = B w'; and 1 / the largest of each w.
    kept, scales = grams.new_empty((batch, 2 * steps + 4, P)), grams.new_empty((batch, steps + 1))
    together, warps = _shape(P)
    maps = [x for m in (a, b, *(beside or (a, b))) for x in (m, *_described(m, places))]
    _forward[(batch, 2 if beside else 1)](
        *maps, grams[0], grams[1], found[0], found[1], kept, scales, places[0] * places[1], places[1], steps, P,
        together, num_warps=warps,
    )  # fmt: skip
    ctx.save_for_backward(a, b, grams, found, kept, scales)
    ctx.places, ctx.steps = places, steps
    return found[0], found[1]


def _gradients(ctx: Any, g: Tensor, with_a: bool, with_b: bool) -> tuple[Tensor | None, Tensor | None]:
    a, b, grams, found, kept, scales = ctx.saved_tensors
    if torch.is_grad_enabled():  # the gradient is to be differentiated itself
        wanted = [m for m, needed in ((a, with_a), (b, with_b)) if needed]
        again = iter(torch.autograd.grad(ctx.plain(a, b), wanted, g, create_graph=True))
        return next(again) if with_a else None, next(again) if with_b else None
    made = [torch.empty_like(m, memory_format=torch.channels_last) for m in (a, b)]
    P, places = grams.shape[2], ctx.places
    arguments = [x for m, dm in zip((a, b), made, strict=True) for x in (m, *_described(m, places), dm)]
    arguments += [step for dm in made for step in _described(dm, places)[:3]]
    together, warps = _shape(P)
    _backward[(len(a),)](
        *arguments, grams[0], grams[1], found[0], kept, scales, g.contiguous(), places[0] * places[1], places[1],
        ctx.steps, P, together, with_a, with_b, num_warps=warps,
    )  # fmt: skip
    return made[0] if with_a else None, made[1] if with_b else None


def _shape(P: int) -> tuple[int, int]:
    """Channels that a program looks at together, and the warps that do so: one alone need not wait for others."""
    return {16: (32, 1), 32: (64, 2)}.get(P, (32, 4))


if triton is not None:
    PRECISION = tl.constexpr("tf32x3")  # three products of eleven bits each for one of float32

    @triton.jit
    def _times(matrix, vector):
        return tl.sum(matrix * vector[None, :], 1)

    @triton.jit
    def _to_one(vector):
        """What makes the largest number of a vector 1, so that numbers stay in their range."""
        largest = tl.max(tl.abs(vector), 0)
        return tl.where(largest > 0, 1.0 / largest, 1.0)

    @triton.jit
    def _of_trace_one(m, P: tl.constexpr):
        """A matrix divided by its trace, and the trace: in place of squared lengths, which would leave their range."""
        trace = tl.sum(tl.sum(tl.where(tl.arange(0, P)[:, None] == tl.arange(0, P)[None, :], m, 0.0), 1), 0)
        trace = tl.where(trace > 0, trace, 1.0)
        return m / trace, trace

    @triton.jit
    def _corner(by_row, by_column, tall, wide, across, P: tl.constexpr):
        """Where the window of each place begins."""
        i = tl.arange(0, P)
        return i // across * tall * by_row + i % across * wide * by_column

    @triton.jit
    def _averaged(
        at, c, inside, by_row, by_column, tall: tl.constexpr, wide: tl.constexpr, P: tl.constexpr, C: tl.constexpr
    ):  # fmt: skip
        """Some channels of each place, averaged over its window."""
        v = tl.zeros((P, C), tl.float32)
        for k in tl.static_range(tall * wide):
            where = at + k // wide * by_row + k % wide * by_column
            v += tl.load(where[:, None] + c[None, :], inside, 0.0).to(tl.float32)
        return v / (tall * wide)

    @triton.jit
    def _gram(
        m, by_sample, by_row, by_column, channels, tall: tl.constexpr, wide: tl.constexpr, places, across,
        P: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        """Products of a map's places with each other, and the sum of each."""
        at = m + tl.program_id(0).to(tl.int64) * by_sample + _corner(by_row, by_column, tall, wide, across, P)
        gram, total = tl.zeros((P, P), tl.float32), tl.zeros((P,), tl.float32)
        for start in range(0, channels, C):
            c = start + tl.arange(0, C)
            inside = (tl.arange(0, P) < places)[:, None] & (c < channels)[None, :]
            v = _averaged(at, c, inside, by_row, by_column, tall, wide, P, C)
            gram = tl.dot(v, tl.trans(v), gram, input_precision=PRECISION)
            total += tl.sum(v, 1)
        return gram, total

    @triton.jit
    def _give_back(
        dgram, dtotal, m, by_sample, by_row, by_column, channels, tall: tl.constexpr, wide: tl.constexpr,
        dm, dby_sample, dby_row, dby_column, places, across, P: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        """The gradient of a map from those of its products and sums."""
        sample = tl.program_id(0).to(tl.int64)
        at = m + sample * by_sample + _corner(by_row, by_column, tall, wide, across, P)
        dat = dm + sample * dby_sample + _corner(dby_row, dby_column, tall, wide, across, P)
        both = dgram + tl.trans(dgram)
        for start in range(0, channels, C):
            c = start + tl.arange(0, C)
            inside = (tl.arange(0, P) < places)[:, None] & (c < channels)[None, :]
            v = _averaged(at, c, inside, by_row, by_column, tall, wide, P, C)
            d = tl.dot(both, v, input_precision=PRECISION) + dtotal[:, None]
            d = (d / (tall * wide)).to(dm.dtype.element_ty)
            for k in tl.static_range(tall * wide):
                where = dat + k // wide * dby_row + k % wide * dby_column
                tl.store(where[:, None] + c[None, :], d, inside)

    @triton.jit
    def _forward(
        a, a_sample, a_row, a_column, a_channels, a_tall: tl.constexpr, a_wide: tl.constexpr,
        b, b_sample, b_row, b_column, b_channels, b_tall: tl.constexpr, b_wide: tl.constexpr,
        c, c_sample, c_row, c_column, c_channels, c_tall: tl.constexpr, c_wide: tl.constexpr,
        d, d_sample, d_row, d_column, d_channels, d_tall: tl.constexpr, d_wide: tl.constexpr,
        within, between, found, beside, kept, scales, places, across, steps,
        P: tl.constexpr, C: tl.constexpr,
    ):  # fmt: skip
        if tl.program_id(1) == 1:
            _norm(
                c, c_sample, c_row, c_column, c_channels, c_tall, c_wide,
                d, d_sample, d_row, d_column, d_channels, d_tall, d_wide,
                within, between, beside, kept, scales, places, across, steps, P, C, False,
            )  # fmt: skip
        else:
            _norm(
                a, a_sample, a_row, a_column, a_channels, a_tall, a_wide,
                b, b_sample, b_row, b_column, b_channels, b_tall, b_wide,
                within, between, found, kept, scales, places, across, steps, P, C, True,
            )  # fmt: skip

    @triton.jit
    def _norm(
        a, a_sample, a_row, a_column, a_channels, a_tall: tl.constexpr, a_wide: tl.constexpr,
        b, b_sample, b_row, b_column, b_channels, b_tall: tl.constexpr, b_wide: tl.constexpr,
        within, between, found, kept, scales, places, across, steps,
        P: tl.constexpr, C: tl.constexpr, KEEP: tl.constexpr,
    ):  # fmt: skip
        """That of one sample; and all that its gradient needs, if it is to be kept."""
        sample, i, j = tl.program_id(0), tl.arange(0, P), tl.arange(0, P)
        W, w = _gram(a, a_sample, a_row, a_column, a_channels, a_tall, a_wide, places, across, P, C)
        B, _ = _gram(b, b_sample, b_row, b_column, b_channels, b_tall, b_wide, places, across, P, C)
        at = sample * P * P + i[:, None] * P + j[None, :]
        if KEEP:
            tl.store(within + at, W)
            tl.store(between + at, B)
        W, size_W = _of_trace_one(W, P)
        B, size_B = _of_trace_one(B, P)
        row = kept + sample * (2 * steps + 4) * P + i
        scale = _to_one(w)
        if KEEP:
            tl.store(scales + sample * (steps + 1), scale)
        w *= scale
        for k in range(steps):
            x = _times(B, w)
            if KEEP:
                tl.store(row, w)
                tl.store(row + P, x)
            w = _times(W, x)
            scale = _to_one(w)
            if KEEP:
                tl.store(scales + sample * (steps + 1) + k + 1, scale)
            w *= scale
            row += 2 * P
        x = _times(B, w)
        after = _times(W, x)
        y = _times(B, after)
        if KEEP:
            tl.store(row, w)
            tl.store(row + P, x)
            tl.store(row + 2 * P, after)
            tl.store(row + 3 * P, y)
        first, second = tl.sum(x * after, 0), tl.sum(y * _times(W, y), 0)  # lengths of a x and a y, squared
        nothing = (first <= 0) | (second <= 0)  # which a NaN is not: it is handed on
        ratio = tl.sqrt_rn(tl.where(nothing, 0.0, second)) / tl.sqrt_rn(tl.where(nothing, 1.0, first))
        tl.store(found + sample, tl.sqrt_rn(ratio) * (tl.sqrt_rn(size_W) * tl.sqrt_rn(size_B)) / places)

    @triton.jit
    def _backward(
        a, a_sample, a_row, a_column, a_channels, a_tall: tl.constexpr, a_wide: tl.constexpr, da,
        b, b_sample, b_row, b_column, b_channels, b_tall: tl.constexpr, b_wide: tl.constexpr, db,
        da_sample, da_row, da_column, db_sample, db_row, db_column, within, between, found, kept, scales, g,
        places, across, steps, P: tl.constexpr, C: tl.constexpr, WITH_A: tl.constexpr, WITH_B: tl.constexpr,
    ):  # fmt: skip
        sample, i, j = tl.program_id(0), tl.arange(0, P), tl.arange(0, P)
        at = sample * P * P + i[:, None] * P + j[None, :]
        W, size_W = _of_trace_one(tl.load(within + at), P)
        B, size_B = _of_trace_one(tl.load(between + at), P)
        row = kept + sample * (2 * steps + 4) * P + 2 * steps * P + i
        w, x, after, y = tl.load(row), tl.load(row + P), tl.load(row + 2 * P), tl.load(row + 3 * P)
        quarter = tl.load(g + sample) * tl.load(found + sample) / 4
        Wy = _times(W, y)
        first, second = tl.sum(x * after, 0), tl.sum(y * Wy, 0)
        nothing = (first <= 0) | (second <= 0)
        dfirst = tl.where(nothing, 0.0, -quarter / tl.where(nothing, 1.0, first))
        dsecond = tl.where(nothing, 0.0, quarter / tl.where(nothing, 1.0, second))
        dy = 2 * dsecond * Wy
        dafter = _times(B, dy)
        dx = _times(W, dafter) + 2 * dfirst * after
        dW = (dsecond * y)[:, None] * y[None, :] + (dafter + dfirst * x)[:, None] * x[None, :]
        dB = dy[:, None] * after[None, :] + dx[:, None] * w[None, :]
        d = _times(B, dx)  # of w
        for n in range(steps):
            k = steps - 1 - n
            row -= 2 * P
            w, x = tl.load(row), tl.load(row + P)
            d *= tl.load(scales + sample * (steps + 1) + k + 1)
            dW += d[:, None] * x[None, :]
            dx = _times(W, d)
            dB += dx[:, None] * w[None, :]
            d = _times(B, dx)
        # The result is found of W and B as they came: it grows with the root of either, so nothing comes by the traces.
        if WITH_A:
            dstart = d * tl.load(scales + sample * (steps + 1))
            _give_back(
                dW / size_W, dstart, a, a_sample, a_row, a_column, a_channels, a_tall, a_wide,
                da, da_sample, da_row, da_column, places, across, P, C,
            )  # fmt: skip
        if WITH_B:
            _give_back(
                dB / size_B, tl.zeros((P,), tl.float32), b, b_sample, b_row, b_column, b_channels, b_tall, b_wide,
                db, db_sample, db_row, db_column, places, across, P, C,
            )  # fmt: skip
