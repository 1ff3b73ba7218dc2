"""The end of a residual block on a GPU: a sum and the ReLU behind it, in one kernel forward and one back."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isofed.functional.kernels import tl, triton

BLOCK = 2048  # numbers of a program


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors on a GPU lie in the same order, without gaps."""
    dense = a.is_contiguous() or a.is_contiguous(memory_format=torch.channels_last)
    same = (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    return a.is_cuda and a.numel() > 0 and a.dtype != torch.float64 and dense and same


def add_relu(a: Tensor, b: Tensor) -> Tensor:
    """relu(a + b) of two tensors that are alike."""
    return _AddReLU.apply(a, b)


class _AddReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        y = torch.empty_like(a)
        _forward[(triton.cdiv(a.numel(), BLOCK),)](a, b, y, a.numel(), BLOCK)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        (y,) = ctx.saved_tensors
        d = torch.empty_like(y)
        g = g if g.stride() == y.stride() else torch.empty_like(y).copy_(g)
        _backward[(triton.cdiv(y.numel(), BLOCK),)](y, g, d, y.numel(), BLOCK)
        return d, d


if triton is not None:

    @triton.jit
    def _forward(a, b, y, size, BLOCK: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = i < size
        v = tl.load(a + i, inside, 0.0).to(tl.float32) + tl.load(b + i, inside, 0.0).to(tl.float32)
        tl.store(y + i, tl.where(v < 0, 0.0, v).to(y.dtype.element_ty), inside)  # which hands a NaN on

    @triton.jit
    def _backward(y, g, d, size, BLOCK: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = i < size
        v = tl.load(g + i, inside, 0.0)
        tl.store(d + i, tl.where(tl.load(y + i, inside, 0.0) <= 0, 0.0, v), inside)
