"""SGD as ``torch.optim.SGD`` defines it, on all weights as one vector; and how gradients get into theirs."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from isofed.config import Settings
from isofed.functional.kernels import tl, triton

BLOCK = 1024  # numbers of a program on a GPU


def update(s: Settings, weights: Tensor, gradient: Tensor, momentum: Tensor, lr: Tensor, counter: Tensor) -> None:
    """One update of the weights, in place, and one more in the counter. The gradient's values are used up."""
    if triton is not None and weights.is_cuda:
        # PyTorch's fused optimiser gives a program 65,536 numbers: too few programs for a small network.
        _update[(triton.cdiv(weights.numel(), BLOCK),)](
            weights, gradient, momentum, lr, counter, weights.numel(), s.momentum, s.weight_decay,
            bool(s.momentum), s.nesterov, BLOCK,
        )  # fmt: skip
        return
    direction = gradient
    if s.weight_decay:
        direction.add_(weights, alpha=s.weight_decay)
    if s.momentum:
        momentum.mul_(s.momentum).add_(direction)
        direction = direction.add_(momentum, alpha=s.momentum) if s.nesterov else momentum
    weights.addcmul_(direction, lr, value=-1)
    counter.add_(1)


def put(place: Tensor, gradient: Tensor) -> None:
    """Copy a gradient to its place, which may be of another precision."""
    # PyTorch's own kernel for two precisions reads one number at a time.
    dense = gradient.is_contiguous() or gradient.is_contiguous(memory_format=torch.channels_last)
    if triton is not None and place.is_cuda and dense and gradient.stride() == place.stride():
        _put[(triton.cdiv(place.numel(), BLOCK),)](place, gradient, place.numel(), BLOCK)
    else:
        place.copy_(gradient)


if triton is not None:

    @triton.jit
    def _put(place, gradient, size, BLOCK: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(place + i, tl.load(gradient + i, i < size, 0.0).to(place.dtype.element_ty), i < size)

    @triton.jit
    def _update(
        weights, gradient, momentum, lr, counter, size, factor, decay,
        MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = i < size
        w = tl.load(weights + i, inside, 0.0)
        d = tl.load(gradient + i, inside, 0.0) + decay * w
        if MOMENTUM:
            m = factor * tl.load(momentum + i, inside, 0.0) + d
            tl.store(momentum + i, m, inside)
            d = d + factor * m if NESTEROV else m
        tl.store(weights + i, w - tl.load(lr) * d, inside)
        if tl.program_id(0) == 0:
            tl.store(counter, tl.load(counter) + 1)
