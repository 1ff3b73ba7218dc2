"""Triton, in which a few kernels for GPUs are written, or nothing where it is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    tl: Any
    triton: Any
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None

Plain = Callable[[Tensor], Tensor]  # what a kernel computes, in PyTorch's operations


def here(z: Tensor) -> bool:
    """Whether a kernel can be started for a tensor: Triton starts them on the present GPU only."""
    return triton is not None and z.is_cuda and z.get_device() == torch.cuda.current_device()


def again(plain: Plain, z: Tensor, g: Tensor) -> Tensor:
    """The gradient that a kernel would give, as something that has a gradient itself."""
    return torch.autograd.grad(plain(z), z, g, create_graph=True)[0]


def found_before(ctx: Any, g: Tensor) -> Tensor:
    """The gradient of a loss whose kernel found it along with the value, and saved both what it was of and itself."""
    z, gradient = ctx.saved_tensors
    return again(ctx.plain, z, g) if torch.is_grad_enabled() else gradient * g


__all__ = ["Plain", "again", "found_before", "here", "tl", "triton"]
