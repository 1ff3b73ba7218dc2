"""Batch norm for pictures of several sizes on sheets of one size: see :mod:`isofed.models.sheets`.

As :mod:`isofed.models.batch_norm`, two kernels forward and two back, with sums in a fixed order; but for each of the
networks that share a batch by itself.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isofed.functional.kernels import tl, triton
from isofed.models.base import FusedNorm
from isofed.models.sheets import Sheets
from isofed.models.tiles import PARTS, Cut, rows_of

if triton is not None:
    from isofed.models.sheets import side

MOST = 2**20  # pixels of a network's sheets, of which one can be found by a quick division
WIDE = 64  # channels, at most, that a program looks at together


def batch_norm(layer: FusedNorm, of: Sheets, x: Tensor, add: Tensor | None = None, relu: bool = False) -> Tensor:
    """A batch norm for each network by itself; then ``add`` is added, then a ReLU; and zeros around all that."""
    relu = relu or layer.relu
    if layer.fuses(x) and x.numel() // (x.shape[1] * len(of.sizes)) <= MOST:
        add = add if add is None else rows_of(add)
        stored = (layer.running_mean, layer.running_var, layer.ticket, layer.eps, layer.momentum)
        made: Tensor = _BatchNorm.apply(x, layer.weight, layer.bias, add, *of, *stored, relu)
        return made
    n, channels = len(of.sizes), x.shape[1]
    y = x.view(n, -1, channels, *(x.shape[2:] if x.dim() == 4 else (1, 1)))
    high, wide = (torch.arange(side, device=x.device) for side in y.shape[3:])
    inside = (high[:, None] < of.sizes[:, :1, None]) & (wide < of.sizes[:, 1:, None])
    inside = inside.view(n, 1, 1, *y.shape[3:])
    kept = (torch.arange(channels, device=x.device) < of.counts[:, None]).view(n, 1, channels, 1, 1)
    rows = (y.shape[1] * of.sizes.prod(1)).view(n, 1, 1, 1, 1)
    kind, (weight, bias) = y.dtype, (p.view(-1, 1, 1) for p in (layer.weight, layer.bias))
    y = y.to(weight.dtype)
    mean = torch.where(inside, y, 0).sum((1, 3, 4), keepdim=True) / rows
    y = torch.where(inside, y - mean, 0)
    var = y.square().sum((1, 3, 4), keepdim=True) / rows
    if of.whole:
        _store(layer, mean[0].detach().flatten(), var[0].detach().flatten(), rows[0].item())
    y = y * (var + layer.eps).rsqrt() * weight + bias
    y = layer.behind(y.to(kind).view(x.shape), add, relu)
    return torch.where((inside & kept).expand(n, len(x) // n, channels, *inside.shape[3:]).reshape(x.shape), y, 0)


def _store(layer: FusedNorm, mean: Tensor, var: Tensor, rows: float) -> None:
    assert layer.running_mean is not None and layer.running_var is not None and layer.momentum is not None
    layer.running_mean.data.lerp_(mean, layer.momentum)
    layer.running_var.data.lerp_(var * (rows / (rows - 1)), layer.momentum)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, sizes: Tensor, counts: Tensor,
        whole: bool, mean: Tensor, var: Tensor, ticket: Tensor, eps: float, momentum: float, relu: bool,
    ) -> Tensor:  # fmt: skip
        n, channels = len(sizes), x.shape[1]
        kept, y = torch.empty((n, 2, channels), device=x.device), torch.empty_like(x)
        cut = Cut.of(x[: len(x) // n], WIDE)
        ctx.relu, ctx.added = relu, add is not None
        # Behind a sum only the result tells where the ReLU was open; else that is found again from the input.
        ctx.save_for_backward(x, weight, bias, kept, ticket, sizes, counts, *([y] if add is not None and relu else []))
        sums, shape = torch.empty((n, cut.parts, 2, channels), device=x.device), _shape(x, n)
        _statistics[(cut.parts, cut.blocks, n)](
            x, sums, ticket[0], kept, mean, var, sizes, sizes.stride(0), *shape, cut.parts, eps, momentum,
            cut.tall, cut.wide, cut.unit, PARTS, whole, num_warps=cut.warps,
        )  # fmt: skip
        _normalise[(*cut.tiles, n)](
            x, y, weight, bias, x if add is None else add, kept, sizes, sizes.stride(0), counts, counts.stride(0),
            *shape, cut.tall, cut.wide, cut.unit, add is not None, relu, num_warps=cut.warps,
        )  # fmt: skip
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, kept, ticket, sizes, counts, *results = ctx.saved_tensors
        n, channels, g = len(sizes), x.shape[1], rows_of(g)
        cut, shape, dx = Cut.of(x[: len(x) // n], WIDE), _shape(x, n), torch.empty_like(x)
        sums, found = (torch.empty((n, k, 2, channels), device=x.device) for k in (cut.parts, 1))
        total = torch.empty((2, channels), device=x.device)
        # What of the gradient comes through the last ReLU; around the pictures, where nobody reads it, it is anything.
        through = torch.empty_like(g) if results else g
        _gradient_sums[(cut.parts, cut.blocks, n)](
            x, g, results[0] if results else x, through, sums, ticket[1], weight, bias, kept, found, total,
            sizes, sizes.stride(0), counts, counts.stride(0), *shape, n, cut.parts,
            cut.tall, cut.wide, cut.unit, PARTS, ctx.relu, bool(results), num_warps=cut.warps,
        )  # fmt: skip
        _gradient[(*cut.tiles, n)](
            x, through, dx, weight, bias, kept, found, sizes, sizes.stride(0), counts, counts.stride(0), *shape,
            cut.tall, cut.wide, cut.unit, ctx.relu and not results, num_warps=cut.warps,
        )  # fmt: skip
        return dx, total[0], total[1], through if ctx.added else None, *[None] * 9


def _shape(x: Tensor, n: int) -> tuple[int, int, int, int]:
    """Samples of each of n sub-networks, height, width, channels."""
    high, wide = x.shape[2:] if x.dim() == 4 else (1, 1)
    return len(x) // n, high, wide, x.shape[1]


if triton is not None:

    @triton.jit
    def _over(r, by):
        """r // by for r below ``MOST``, where no rounding can lead past a whole number; several times faster."""
        return ((r.to(tl.float32) + 0.5) * (1.0 / by)).to(tl.int32)

    @triton.jit
    def _pixel(r, high, wide, height, width):
        """Where the r-th of all pixels that belong to pictures stands on their sheets."""
        line = _over(r, wide)
        picture = _over(line, high)
        return (picture * height + line - picture * high) * width + r - line * wide

    @triton.jit
    def _within(r, high, wide, height, width):
        """Whether the r-th pixel of all sheets belongs to a picture."""
        line = _over(r, width)
        return (line - _over(line, height) * height < high) & (r - line * width < wide)

    @triton.jit
    def _statistics(
        x, sums, ticket, kept, running_mean, running_var, sizes, stride, samples, height, width, channels, parts, eps,
        momentum,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr,
    ):  # fmt: skip
        """Sums of x - x[0] and of its square over a part of the rows; who comes last makes mean and scale of them."""
        channels = channels // UNIT * UNIT  # so that the compiler knows, and reads several numbers at a time
        part, c, k = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.program_id(2)
        here = c < channels
        high, wide = side(sizes, k, stride)
        rows = samples * high * wide
        per = tl.cdiv(tl.cdiv(rows, parts), ROWS) * ROWS
        sheet = x + k.to(tl.int64) * samples * height * width * channels
        origin = tl.load(sheet + c, here, 0.0).to(tl.float32)
        one = tl.zeros((ROWS, CHANNELS), tl.float32)
        two = tl.zeros((ROWS, CHANNELS), tl.float32)
        for start in range(part * per, tl.minimum(part * per + per, rows), ROWS):
            r = start + tl.arange(0, ROWS)
            inside = (r < rows)[:, None] & here[None, :]
            place = _pixel(r, high, wide, height, width)[:, None] * channels + c[None, :]
            d = tl.load(sheet + place, inside, 0.0).to(tl.float32)
            d = tl.where(inside, d - origin[None, :], 0.0)
            one += d
            two += d * d
        mine = sums + (k * parts + part) * 2 * channels + c
        tl.store(mine, tl.sum(one, 0), here)
        tl.store(mine + channels, tl.sum(two, 0), here)
        tl.debug_barrier()
        mine = ticket + k * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(mine, 1) == parts - 1:
            p = tl.arange(0, PARTS)
            made = (p < parts)[:, None] & here[None, :]
            place = sums + (k * parts + p[:, None]) * 2 * channels + c[None, :]
            first = tl.sum(tl.load(place, made, 0.0, cache_modifier=".cg"), 0) / rows
            second = tl.sum(tl.load(place + channels, made, 0.0, cache_modifier=".cg"), 0) / rows
            mean, var = origin + first, tl.maximum(second - first * first, 0.0)
            tl.store(kept + 2 * k * channels + c, mean, here)
            tl.store(kept + (2 * k + 1) * channels + c, 1.0 / tl.sqrt_rn(var + eps), here)
            if WHOLE and k == 0:
                old_mean, old_var = tl.load(running_mean + c, here, 0.0), tl.load(running_var + c, here, 0.0)
                tl.store(running_mean + c, (1 - momentum) * old_mean + momentum * mean, here)
                unbiased = var * (rows / (rows - 1.0))
                tl.store(running_var + c, (1 - momentum) * old_var + momentum * unbiased, here)
            tl.store(mine, 0)  # for the next time

    @triton.jit
    def _normalise(
        x, y, weight, bias, add, kept, sizes, stride, counts, step, samples, height, width, channels,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, UNIT: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr,
    ):  # fmt: skip
        """A tile of the result."""
        channels = channels // UNIT * UNIT
        c, k = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.program_id(2)
        here = c < channels
        mean = tl.load(kept + 2 * k * channels + c, here, 0.0)
        scale = tl.load(kept + (2 * k + 1) * channels + c, here, 0.0)
        w, b = tl.load(weight + c, here, 0.0), tl.load(bias + c, here, 0.0)
        high, wide = side(sizes, k, stride)
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        rows = samples * height * width
        within = (r < rows) & _within(r, high, wide, height, width)
        # Reads go by what is known when this is compiled, several numbers at a time: not by which channels are left.
        inside = within[:, None] & here[None, :]
        group, place = k.to(tl.int64) * rows * channels, r[:, None] * channels + c[None, :]
        v = tl.load(x + group + place, inside, 0.0).to(tl.float32)
        v = (v - mean[None, :]) * scale[None, :] * w[None, :] + b[None, :]
        if ADD:
            v += tl.load(add + group + place, inside, 0.0).to(tl.float32)
        if RELU:
            v = tl.where(v < 0, 0.0, v)  # which hands a NaN on
        v = tl.where(within[:, None] & (c < tl.load(counts + k * step))[None, :], v, 0.0)
        tl.store(y + group + place, v.to(y.dtype.element_ty), (r < rows)[:, None] & here[None, :])

    @triton.jit
    def _gradient_sums(
        x, g, y, through, sums, ticket, weight, bias, kept, found, total, sizes, stride, counts, step,
        samples, height, width, channels, n, parts,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr, RELU: tl.constexpr,
        KEEP: tl.constexpr,
    ):  # fmt: skip
        """Sums of the gradient, and of its product with the normalised input: gradients of bias and weight.

        With ``KEEP`` the result y tells where the ReLU was open, and the gradient that comes through it is stored.
        """
        channels = channels // UNIT * UNIT
        part, c, k = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.program_id(2)
        here = c < channels
        left = c < tl.load(counts + k * step)
        mean = tl.load(kept + 2 * k * channels + c, here, 0.0)
        scale = tl.load(kept + (2 * k + 1) * channels + c, here, 0.0)
        w, b = tl.load(weight + c, here, 0.0), tl.load(bias + c, here, 0.0)
        high, wide = side(sizes, k, stride)
        rows = samples * high * wide
        per = tl.cdiv(tl.cdiv(rows, parts), ROWS) * ROWS
        group = k.to(tl.int64) * samples * height * width * channels
        one = tl.zeros((ROWS, CHANNELS), tl.float32)
        two = tl.zeros((ROWS, CHANNELS), tl.float32)
        for start in range(part * per, tl.minimum(part * per + per, rows), ROWS):
            r = start + tl.arange(0, ROWS)
            inside = (r < rows)[:, None] & here[None, :]
            place = _pixel(r, high, wide, height, width)[:, None] * channels + c[None, :]
            v = (tl.load(x + group + place, inside, 0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
            d = tl.load(g + group + place, inside, 0.0).to(tl.float32)
            d = tl.where(left[None, :], d, 0.0)
            if KEEP:
                d = tl.where(tl.load(y + group + place, inside, 0.0).to(tl.float32) > 0, d, 0.0)
                tl.store(through + group + place, d.to(through.dtype.element_ty), inside)
            elif RELU:
                d = tl.where(v * w[None, :] + b[None, :] > 0, d, 0.0)
            one += d
            two += d * v  # past the end d is 0
        mine = sums + (k * parts + part) * 2 * channels + c
        tl.store(mine, tl.sum(one, 0), here)
        tl.store(mine + channels, tl.sum(two, 0), here)
        tl.debug_barrier()
        blocks, block = tl.num_programs(1), tl.program_id(1)
        if tl.atomic_add(ticket + k * blocks + block, 1) == parts - 1:
            p = tl.arange(0, PARTS)
            made = (p < parts)[:, None] & here[None, :]
            place = sums + (k * parts + p[:, None]) * 2 * channels + c[None, :]
            tl.store(found + 2 * k * channels + c, tl.sum(tl.load(place, made, 0.0, cache_modifier=".cg"), 0), here)
            dweight = tl.sum(tl.load(place + channels, made, 0.0, cache_modifier=".cg"), 0)
            tl.store(found + (2 * k + 1) * channels + c, dweight, here)
            tl.store(ticket + k * blocks + block, 0)
            tl.debug_barrier()
            if tl.atomic_add(ticket + n * blocks + block, 1) == n - 1:  # of all networks
                one_sum = tl.zeros((CHANNELS,), tl.float32)
                two_sum = tl.zeros((CHANNELS,), tl.float32)
                for m in range(0, n):
                    one_sum += tl.load(found + 2 * m * channels + c, here, 0.0, cache_modifier=".cg")
                    two_sum += tl.load(found + (2 * m + 1) * channels + c, here, 0.0, cache_modifier=".cg")
                tl.store(total + c, two_sum, here)
                tl.store(total + channels + c, one_sum, here)
                tl.store(ticket + n * blocks + block, 0)

    @triton.jit
    def _gradient(
        x, g, dx, weight, bias, kept, found, sizes, stride, counts, step, samples, height, width, channels,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, UNIT: tl.constexpr, RELU: tl.constexpr,
    ):  # fmt: skip
        """A tile of the gradient with respect to the input."""
        channels = channels // UNIT * UNIT
        c, k = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS), tl.program_id(2)
        here = c < channels
        high, wide = side(sizes, k, stride)
        count = samples * high * wide
        one = tl.load(found + 2 * k * channels + c, here, 0.0) / count
        two = tl.load(found + (2 * k + 1) * channels + c, here, 0.0) / count
        mean = tl.load(kept + 2 * k * channels + c, here, 0.0)
        scale = tl.load(kept + (2 * k + 1) * channels + c, here, 0.0)
        w, b = tl.load(weight + c, here, 0.0), tl.load(bias + c, here, 0.0)
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        rows = samples * height * width
        within = (r < rows) & _within(r, high, wide, height, width)
        inside = within[:, None] & here[None, :]
        group, place = k.to(tl.int64) * rows * channels, r[:, None] * channels + c[None, :]
        v = (tl.load(x + group + place, inside, 0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        d = tl.load(g + group + place, inside, 0.0).to(tl.float32)
        if RELU:
            d = tl.where(v * w[None, :] + b[None, :] > 0, d, 0.0)
        v = (d - one[None, :] - v * two[None, :]) * (scale * w)[None, :]
        v = tl.where(within[:, None] & (c < tl.load(counts + k * step))[None, :], v, 0.0)
        tl.store(dx + group + place, v.to(dx.dtype.element_ty), (r < rows)[:, None] & here[None, :])
