"""Batch norm on a GPU in few kernels, together with what a residual block adds to it and the ReLU behind it.

PyTorch needs seven kernels for a batch norm in training, one for a sum and two for a ReLU. Here it is two forward and
two back: the sums, and what is made with them. Sums are made in a fixed order, so the same input gives the same bits.
Pictures lie channels-last: rows of channels.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isofed.functional.kernels import tl, triton
from isofed.models.tiles import PARTS, Cut, rows_of

if TYPE_CHECKING:
    from isofed.models.base import FusedNorm

_TWIN = "isofed_twin"  # an attribute of a tensor


def batch_norm(
    x: Tensor,
    layer: FusedNorm,
    slim: tuple[Tensor, Tensor] | None = None,
    add: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """A batch norm in training, with the update of its running statistics; then ``add`` is added, then a ReLU.

    With ``slim``, the first numbers of its weight and bias, it leaves the running statistics as they are.
    """
    own = slim or (layer.weight, layer.bias)
    kept = (layer.running_mean, layer.running_var, layer.ticket)
    add = add if add is None else rows_of(add)
    y, twin = _BatchNorm.apply(x, *own, add, *kept, layer.eps, layer.momentum, layer.relu or relu, slim is None)
    setattr(y, _TWIN, twin)
    return y


def twin_of(x: Tensor) -> Tensor:
    """The same numbers for a second reader, such as the shortcut of a residual block.

    What a batch norm gives has a twin, whose gradient comes back to it by itself: its kernel adds the two up on the
    way, where PyTorch would write their sum into memory first.
    """
    twin: Tensor = getattr(x, _TWIN, x)
    return twin


def by_stored_statistics(x: Tensor, layer: FusedNorm, add: Tensor | None = None, relu: bool = False) -> Tensor:
    """A batch norm as it is after training, without a gradient; and what stands behind it."""
    cut, y, beside = Cut.of(x), torch.empty_like(x), x if add is None else rows_of(add)
    _normalise[cut.tiles](
        x, y, layer.weight, layer.bias, beside, layer.running_mean, layer.running_var, cut.rows, cut.channels,
        layer.eps, cut.tall, cut.wide, cut.unit, add is not None, layer.relu or relu, True, num_warps=cut.warps,
    )  # fmt: skip
    return y


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, mean: Tensor, var: Tensor,
        ticket: Tensor, eps: float, momentum: float, relu: bool, update: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        kept, y = torch.empty((2, x.shape[1]), device=x.device), torch.empty_like(x)
        ctx.relu, ctx.added, cut = relu, add is not None, Cut.of(x)
        # Behind a sum only the result tells where the ReLU was open; else that is found again from the input.
        ctx.save_for_backward(x, weight, bias, kept, ticket, *([y] if add is not None and relu else []))
        sums = torch.empty((cut.parts, 2, cut.channels), device=x.device)
        _statistics[(cut.parts, cut.blocks)](
            x, sums, ticket[0], kept[0], kept[1], mean, var, cut.rows, cut.channels, cut.per, cut.parts, eps, momentum,
            cut.tall, cut.wide, cut.unit, PARTS, update, num_warps=cut.warps,
        )  # fmt: skip
        _normalise[cut.tiles](
            x, y, weight, bias, x if add is None else add, kept[0], kept[1], cut.rows, cut.channels, eps,
            cut.tall, cut.wide, cut.unit, add is not None, relu, False, num_warps=cut.warps,
        )  # fmt: skip
        return y, y.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *both: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias, kept, ticket, *results = ctx.saved_tensors
        come = [rows_of(g) for g in both if g is not None]
        if not come:
            return (None,) * 11
        g, two, found, dx = come[0], len(come) > 1, torch.empty((2, x.shape[1]), device=x.device), torch.empty_like(x)
        cut = Cut.of(x)
        sums = torch.empty((cut.parts, 2, cut.channels), device=x.device)
        # What of the gradients comes through the last ReLU, where it is not found as easily again.
        through = torch.empty_like(g) if results or two else g
        _gradient_sums[(cut.parts, cut.blocks)](
            x, g, come[-1], results[0] if results else x, through, sums, ticket[1], weight, bias, kept[0], kept[1],
            found[0], found[1], cut.rows, cut.channels, cut.per, cut.parts, cut.tall, cut.wide, cut.unit, PARTS,
            ctx.relu, bool(results), two, num_warps=cut.warps,
        )  # fmt: skip
        _gradient[cut.tiles](
            x, through, dx, weight, bias, kept[0], kept[1], found[0], found[1],
            cut.rows, cut.channels, cut.tall, cut.wide, cut.unit, ctx.relu and through is g,
            num_warps=cut.warps,
        )  # fmt: skip
        return dx, found[0], found[1], through if ctx.added else None, *[None] * 7


if triton is not None:

    @triton.jit
    def _statistics(
        x, sums, ticket, means, scales, running_mean, running_var, rows, channels, per, parts, eps, momentum,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr, UPDATE: tl.constexpr,
    ):  # fmt: skip
        """Sums of x - x[0] and of its square over a part of the rows; who comes last makes mean and scale of them."""
        channels = channels // UNIT * UNIT  # so that the compiler knows, and reads several numbers at a time
        part, c = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        here = c < channels
        origin = tl.load(x + c, here, 0.0).to(tl.float32)
        one = tl.zeros((ROWS, CHANNELS), tl.float32)
        two = tl.zeros((ROWS, CHANNELS), tl.float32)
        for start in range(0, per, ROWS):
            r = part * per + start + tl.arange(0, ROWS)
            inside = (r < rows)[:, None] & here[None, :]
            d = tl.load(x + r[:, None].to(tl.int64) * channels + c[None, :], inside, 0.0).to(tl.float32)
            d = tl.where(inside, d - origin[None, :], 0.0)
            one += d
            two += d * d
        tl.store(sums + 2 * part * channels + c, tl.sum(one, 0), here)
        tl.store(sums + (2 * part + 1) * channels + c, tl.sum(two, 0), here)
        tl.debug_barrier()
        if tl.atomic_add(ticket + tl.program_id(1), 1) == parts - 1:
            p = tl.arange(0, PARTS)
            place = sums + 2 * p[:, None] * channels + c[None, :]
            made = (p < parts)[:, None] & here[None, :]
            first = tl.sum(tl.load(place, made, 0.0, cache_modifier=".cg"), 0) / rows
            second = tl.sum(tl.load(place + channels, made, 0.0, cache_modifier=".cg"), 0) / rows
            mean = origin + first
            var = tl.maximum(second - first * first, 0.0)
            tl.store(means + c, mean, here)
            tl.store(scales + c, 1.0 / tl.sqrt_rn(var + eps), here)
            if UPDATE:
                old_mean, old_var = tl.load(running_mean + c, here, 0.0), tl.load(running_var + c, here, 0.0)
                tl.store(running_mean + c, (1 - momentum) * old_mean + momentum * mean, here)
                unbiased = var * (rows / (rows - 1.0))
                tl.store(running_var + c, (1 - momentum) * old_var + momentum * unbiased, here)
            tl.store(ticket + tl.program_id(1), 0)  # for the next time

    @triton.jit
    def _normalise(
        x, y, weight, bias, add, means, scales, rows, channels, eps, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
        UNIT: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, STORED: tl.constexpr,
    ):  # fmt: skip
        """A tile of the result; what is ``STORED`` are not scales but variances."""
        channels = channels // UNIT * UNIT
        c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        here = c < channels
        mean, scale = tl.load(means + c, here, 0.0), tl.load(scales + c, here, 1.0)
        if STORED:
            scale = 1.0 / tl.sqrt_rn(scale + eps)
        w, b = tl.load(weight + c, here, 0.0), tl.load(bias + c, here, 0.0)
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside = (r < rows)[:, None] & here[None, :]
        place = r[:, None].to(tl.int64) * channels + c[None, :]
        v = (tl.load(x + place, inside, 0.0).to(tl.float32) - mean[None, :]) * scale[None, :] * w[None, :] + b[None, :]
        if ADD:
            v += tl.load(add + place, inside, 0.0).to(tl.float32)
        if RELU:
            v = tl.where(v < 0, 0.0, v)  # which hands a NaN on
        tl.store(y + place, v.to(y.dtype.element_ty), inside)

    @triton.jit
    def _gradient_sums(
        x, g, h, y, through, sums, ticket, weight, bias, means, scales, dweight, dbias, rows, channels, per, parts,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr, RELU: tl.constexpr,
        BEHIND: tl.constexpr, TWO: tl.constexpr,
    ):  # fmt: skip
        """Sums of the gradient, and of its product with the normalised input: gradients of bias and weight.

        With ``BEHIND`` the result y tells where the ReLU was open, with ``TWO`` the gradient is the sum of two; then
        what comes through is stored.
        """
        channels = channels // UNIT * UNIT
        part, c = tl.program_id(0), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        here = c < channels
        mean, scale = tl.load(means + c, here, 0.0), tl.load(scales + c, here, 0.0)
        w, b = tl.load(weight + c, here, 0.0), tl.load(bias + c, here, 0.0)
        one = tl.zeros((ROWS, CHANNELS), tl.float32)
        two = tl.zeros((ROWS, CHANNELS), tl.float32)
        for start in range(0, per, ROWS):
            r = part * per + start + tl.arange(0, ROWS)
            inside = (r < rows)[:, None] & here[None, :]
            place = r[:, None].to(tl.int64) * channels + c[None, :]
            n = (tl.load(x + place, inside, 0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
            d = tl.load(g + place, inside, 0.0).to(tl.float32)
            if TWO:
                d += tl.load(h + place, inside, 0.0).to(tl.float32)
                d = d.to(through.dtype.element_ty).to(tl.float32)  # as PyTorch's own sum is
            if BEHIND:
                d = tl.where(tl.load(y + place, inside, 0.0).to(tl.float32) > 0, d, 0.0)
            elif RELU:
                d = tl.where(n * w[None, :] + b[None, :] > 0, d, 0.0)
            if BEHIND or TWO:
                tl.store(through + place, d.to(through.dtype.element_ty), inside)
            one += d
            two += d * n  # past the end d is 0
        tl.store(sums + 2 * part * channels + c, tl.sum(one, 0), here)
        tl.store(sums + (2 * part + 1) * channels + c, tl.sum(two, 0), here)
        tl.debug_barrier()
        if tl.atomic_add(ticket + tl.program_id(1), 1) == parts - 1:
            p = tl.arange(0, PARTS)
            place = sums + 2 * p[:, None] * channels + c[None, :]
            made = (p < parts)[:, None] & here[None, :]
            tl.store(dbias + c, tl.sum(tl.load(place, made, 0.0, cache_modifier=".cg"), 0), here)
            tl.store(dweight + c, tl.sum(tl.load(place + channels, made, 0.0, cache_modifier=".cg"), 0), here)
            tl.store(ticket + tl.program_id(1), 0)

    @triton.jit
    def _gradient(
        x, g, dx, weight, bias, means, scales, dweight, dbias, rows, channels,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, UNIT: tl.constexpr, RELU: tl.constexpr,
    ):  # fmt: skip
        """A tile of the gradient with respect to the input."""
        channels = channels // UNIT * UNIT
        c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        here = c < channels
        one, two = tl.load(dbias + c, here, 0.0) / rows, tl.load(dweight + c, here, 0.0) / rows
        mean, scale = tl.load(means + c, here, 0.0), tl.load(scales + c, here, 0.0)
        w, b = tl.load(weight + c, here, 0.0), tl.load(bias + c, here, 0.0)
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside = (r < rows)[:, None] & here[None, :]
        place = r[:, None].to(tl.int64) * channels + c[None, :]
        n = (tl.load(x + place, inside, 0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
        d = tl.load(g + place, inside, 0.0).to(tl.float32)
        if RELU:
            d = tl.where(n * w[None, :] + b[None, :] > 0, d, 0.0)
        v = (d - one[None, :] - n * two[None, :]) * (scale * w)[None, :]
        tl.store(dx + place, v.to(dx.dtype.element_ty), inside)
