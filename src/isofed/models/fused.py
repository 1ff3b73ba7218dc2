"""Layers that a GPU does in few kernels: batch norm with the ReLU behind it, and planned dropout; and who gets them.

A kernel of a small network takes a GPU less time than getting it started, and PyTorch needs seven of them for a batch
norm, two for a ReLU and thirty for a dropout that hashes. Here it is four for the first two together and two for the
last. They are written in Triton, which comes with PyTorch where there is a GPU; without it everything works as before.

Sums are made in a fixed order, so the same input gives the same bits. Pictures lie channels-last: rows of channels.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isofed.functional.kernels import tl, triton
from isofed.models import thin
from isofed.models.convolution import FusedConv2d
from isofed.models.tiles import PARTS, Cut, rows_of, tickets

if TYPE_CHECKING:
    from isofed.models.base import FusedNorm


def available() -> bool:
    """Whether these layers can be used here; ``ISOFED_FUSED=0`` switches them off."""
    return triton is not None and torch.cuda.is_available() and os.environ.get("ISOFED_FUSED", "1") != "0"


def fuse(network: nn.Module) -> None:
    """Let the layers of a network on a GPU use these kernels; the names of its tensors stay as they are."""
    from isofed.models.base import FusedNorm  # which needs this module itself
    from isofed.models.dropout import Dropout

    if not available():
        return
    for module in [*network.modules()]:
        for name, child in [*module.named_children()]:
            if type(child) is nn.Conv2d:
                _fuse_convolution(module, name, child)
            elif isinstance(child, FusedNorm):
                child.ticket = tickets(child.num_features, child.weight.device)
                child.relu = child.relu or _taken(module, name, lambda m: type(m) is nn.ReLU)
            elif isinstance(child, Dropout):
                child.fused = True


def _fuse_convolution(parent: nn.Module, name: str, layer: nn.Conv2d) -> None:
    relu = layer.bias is not None and _taken(parent, name, lambda m: type(m) is nn.ReLU)
    pool = relu and _taken(parent, name, _halves, 2)
    if relu or thin.fits(layer):
        setattr(parent, name, FusedConv2d.of(layer, relu, pool))


def _halves(layer: nn.Module) -> bool:
    """Whether a layer takes the largest of squares of two by two."""
    if type(layer) is not nn.MaxPool2d or layer.ceil_mode or layer.return_indices:
        return False
    sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return sizes in ((2, 2, 0, 1), ((2, 2), (2, 2), (0, 0), (1, 1)))


def _taken(parent: nn.Module, name: str, wanted: Callable[[nn.Module], bool], steps: int = 1) -> bool:
    """Whether the layer so many steps behind this one is wanted; then nothing is left in its place."""
    if not isinstance(parent, nn.Sequential):
        return False
    behind = list(parent._modules).index(name) + steps
    if behind >= len(parent) or not wanted(parent[behind]):
        return False
    parent[behind] = nn.Identity()
    return True


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
        x, y, weight, bias, means, scales, rows, channels,
        ROWS: tl.constexpr, CHANNELS: tl.constexpr, RELU: tl.constexpr,
    ):  # fmt: skip
        """A tile of the result."""
        c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        here = c < channels
        mean, scale = tl.load(means + c, here, 0.0), tl.load(scales + c, here, 0.0)
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

    @triton.jit
    def _drop(x, y, key, count, channels, area, least, scale, mix0, mix1, mix2, BLOCK: tl.constexpr):
        """Zero entries by a hash of the key and their place in the order batch, channel, row, column."""
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = i < count
        c = i % channels
        rest = i // channels
        place = ((rest // area) * channels + c) * area + rest % area
        bits = (place + 1) * mix0 + tl.load(key)
        bits = (bits ^ ((bits >> 33) & 0x7FFFFFFF)) * mix1
        bits = (bits ^ ((bits >> 33) & 0x7FFFFFFF)) * mix2
        bits = bits ^ ((bits >> 33) & 0x7FFFFFFF)
        kept = ((bits >> 40) & 0xFFFFFF) >= least
        v = tl.load(x + i, inside, 0.0).to(tl.float32) * scale
        tl.store(y + i, tl.where(kept, v, 0.0).to(y.dtype.element_ty), inside)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, ticket: Tensor,
        eps: float, momentum: float, relu: bool, update: bool,
    ) -> Tensor:  # fmt: skip
        cut = Cut.of(x)
        sums = torch.empty((cut.parts, 2, cut.channels), device=x.device)
        kept, y = torch.empty((2, cut.channels), device=x.device), torch.empty_like(x)
        _statistics[(cut.parts, cut.blocks)](
            x, sums, ticket[0], kept[0], kept[1], mean, var, cut.rows, cut.channels, cut.per, cut.parts, eps, momentum,
            cut.tall, cut.wide, PARTS, update,
        )  # fmt: skip
        _normalise[cut.tiles](x, y, weight, bias, kept[0], kept[1], cut.rows, cut.channels, cut.tall, cut.wide, relu)
        ctx.save_for_backward(x, weight, bias, kept, ticket)
        ctx.relu = relu
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, kept, ticket = ctx.saved_tensors
        g, cut = rows_of(g), Cut.of(x)
        sums = torch.empty((cut.parts, 2, cut.channels), device=x.device)
        found, dx = torch.empty((2, cut.channels), device=x.device), torch.empty_like(x)
        _gradient_sums[(cut.parts, cut.blocks)](
            x, g, sums, ticket[1], weight, bias, kept[0], kept[1], found[0], found[1],
            cut.rows, cut.channels, cut.per, cut.parts, cut.tall, cut.wide, PARTS, ctx.relu,
        )  # fmt: skip
        _gradient[cut.tiles](
            x, g, dx, weight, bias, kept[0], kept[1], found[0], found[1],
            cut.rows, cut.channels, cut.tall, cut.wide, ctx.relu,
        )  # fmt: skip
        return dx, found[0], found[1], None, None, None, None, None, None, None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(key)
        ctx.p = p
        return _dropped(x, key, p)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (key,) = ctx.saved_tensors
        return _dropped(g, key, ctx.p), None, None


def _dropped(x: Tensor, key: Tensor, p: float) -> Tensor:
    from isofed.models.dropout import MIX, least_kept

    x = rows_of(x)
    area = x[0, 0].numel()
    y, block = torch.empty_like(x), 1024
    grid = (triton.cdiv(x.numel(), block),)
    _drop[grid](x, y, key, x.numel(), x.shape[1], area, least_kept(p), 1 / (1 - p), *MIX, block)
    return y


def batch_norm(x: Tensor, layer: FusedNorm, slim: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """A batch norm in training, with the update of its running statistics, and the ReLU behind it if it has one.

    With ``slim``, the first numbers of its weight and bias, it leaves the running statistics as they are.
    """
    own = slim or (layer.weight, layer.bias)
    kept = (layer.running_mean, layer.running_var, layer.ticket)
    return _BatchNorm.apply(x, *own, *kept, layer.eps, layer.momentum, layer.relu, slim is None)


def dropout(x: Tensor, key: Tensor, p: float) -> Tensor:
    """Dropout by a planned number, as :class:`isofed.models.dropout.Dropout` defines it."""
    return _Dropout.apply(x, key, p)
