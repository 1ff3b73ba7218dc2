"""A distance that counts as much as another loss: FedAlign's term as its authors compute it."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from isofed.functional.kernels import found_before, here, tl, triton


def distance_like(z: Tensor, target: Tensor, like: Tensor, weight: float = 1.0) -> Tensor:
    """The mean squared distance from ``target``, rescaled to the value ``weight * like``; 0 where there is none.

    Only ``z`` has a gradient: neither the factor nor what it is made from.

    >>> float(distance_like(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 0.0]), torch.tensor(8.0), weight=0.5))
    4.0
    """
    target, like = target.detach(), like.detach()
    single = z.dtype == target.dtype == like.dtype == torch.float32
    if here(z) and single and z.is_contiguous() and z.shape == target.shape and z.numel():
        return _DistanceLike.apply(z, target.contiguous(), like, weight)
    return _plain(z, target, like, weight)


def _plain(z: Tensor, target: Tensor, like: Tensor, weight: float) -> Tensor:
    distance = mse_loss(z, target)
    value = distance.detach()
    there = value > 0
    return weight * torch.where(there, like / torch.where(there, value, 1), 0) * distance


class _DistanceLike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, target: Tensor, like: Tensor, weight: float) -> Tensor:
        found, gradient = z.new_empty(()), torch.empty_like(z)
        _both[(1,)](z, target, like, weight, found, gradient, z.numel(), triton.next_power_of_2(z.numel()))
        ctx.save_for_backward(z, gradient)
        ctx.plain = partial(_plain, target=target, like=like, weight=weight)
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return found_before(ctx, g), None, None, None


if triton is not None:

    @triton.jit
    def _both(z, target, like, weight, found, gradient, count, BLOCK: tl.constexpr):
        """The value and its gradient."""
        i = tl.arange(0, BLOCK)
        d = tl.load(z + i, i < count, 0.0) - tl.load(target + i, i < count, 0.0)
        distance = tl.sum(d * d, 0) / count
        there = distance > 0
        factor = tl.where(there, weight * tl.load(like) / tl.where(there, distance, 1.0), 0.0)
        tl.store(found, factor * distance)
        tl.store(gradient + i, 2 * factor * d / count, i < count)
