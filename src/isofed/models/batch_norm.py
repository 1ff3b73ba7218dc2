"""Batch norm on a GPU in few kernels, together with the ReLU behind it.

PyTorch needs seven kernels for a batch norm in training and two for a ReLU. Here it is two forward and two back: the
sums, and what is made with them. Sums are made in a fixed order, so the same input gives the same bits. Pictures lie
channels-last: rows of channels.
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


def batch_norm(x: Tensor, layer: FusedNorm, slim: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """A batch norm in training, with the update of its running statistics, and the ReLU behind it if it has one.

    With ``slim``, the first numbers of its weight and bias, it leaves the running statistics as they are.
    """
    own = slim or (layer.weight, layer.bias)
    kept = (layer.running_mean, layer.running_var, layer.ticket)
    return _BatchNorm.apply(x, *own, *kept, layer.eps, layer.momentum, layer.relu, slim is None)


def by_stored_statistics(x: Tensor, layer: FusedNorm) -> Tensor:
    """A batch norm as it is after training, without a gradient."""
    cut, y = Cut.of(x), torch.empty_like(x)
    _normalise[cut.tiles](
        x, y, layer.weight, layer.bias, layer.running_mean, layer.running_var, cut.rows, cut.channels, layer.eps,
        cut.tall, cut.wide, layer.relu, True,
    )  # fmt: skip
    return y


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, ticket: Tensor,
        eps: float, momentum: float, relu: bool, update: bool,
    ) -> Tensor:  # fmt: skip
        kept, y = torch.empty((2, x.shape[1]), device=x.device), torch.empty_like(x)
        ctx.save_for_backward(x, weight, bias, kept, ticket)
        ctx.relu, cut = relu, Cut.of(x)
        sums = torch.empty((cut.parts, 2, cut.channels), device=x.device)
        _statistics[(cut.parts, cut.blocks)](
            x, sums, ticket[0], kept[0], kept[1], mean, var, cut.rows, cut.channels, cut.per, cut.parts, eps, momentum,
            cut.tall, cut.wide, PARTS, update,
        )  # fmt: skip
        _normalise[cut.tiles](
            x, y, weight, bias, kept[0], kept[1], cut.rows, cut.channels, eps, cut.tall, cut.wide, relu, False
        )  # fmt: skip
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, kept, ticket = ctx.saved_tensors
        g, found, dx = rows_of(g), torch.empty((2, x.shape[1]), device=x.device), torch.empty_like(x)
        cut = Cut.of(x)
        sums = torch.empty((cut.parts, 2, cut.channels), device=x.device)
        _gradient_sums[(cut.parts, cut.blocks)](
            x, g, sums, ticket[1], weight, bias, kept[0], kept[1], found[0], found[1],
            cut.rows, cut.channels, cut.per, cut.parts, cut.tall, cut.wide, PARTS, ctx.relu,
        )  # fmt: skip
        _gradient[cut.tiles](
            x, g, dx, weight, bias, kept[0], kept[1], found[0], found[1],
            cut.rows, cut.channels, cut.tall, cut.wide, ctx.relu,
        )  # fmt: skip
        return dx, found[0], found[1], *[None] * 7


if triton is not None:

    @triton.jit
    def _statistics(
        x, sums, ticket, means, scales, running_mean, running_var, rows, channels, per, parts, eps, momentum,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr, UPDATE: tl.constexpr,
    ):  # fmt: skip
        """Sums of x - x[0] and of its square over a part of the rows; who comes last makes mean and scale of them."""
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
        x, y, weight, bias, means, scales, rows, channels, eps,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, RELU: tl.constexpr, STORED: tl.constexpr,
    ):  # fmt: skip
        """A tile of the result; what is ``STORED`` are not scales but variances."""
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
        if RELU:
            v = tl.where(v < 0, 0.0, v)  # which hands a NaN on
        tl.store(y + place, v.to(y.dtype.element_ty), inside)

    @triton.jit
    def _gradient_sums(
        x, g, sums, ticket, weight, bias, means, scales, dweight, dbias, rows, channels, per, parts,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr, RELU: tl.constexpr,
    ):  # fmt: skip
        """Sums of the gradient, and of its product with the normalised input: gradients of bias and weight."""
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
            if RELU:
                d = tl.where(n * w[None, :] + b[None, :] > 0, d, 0.0)
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
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, RELU: tl.constexpr,
    ):  # fmt: skip
        """A tile of the gradient with respect to the input."""
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
