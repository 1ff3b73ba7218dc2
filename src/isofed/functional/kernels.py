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

_IS_ONE = "isofed_one"  # an attribute of a tensor

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
    if torch.is_grad_enabled():
        return again(ctx.plain, z, g)
    return gradient if is_one(g) else gradient * g


def one(device: torch.device) -> Tensor:
    """The number 1 to begin backward passes with, which nobody may change.

    PyTorch would make a new one for each pass; and of this one a loss knows, without looking at the value, that there
    is nothing to multiply its gradient with.
    """
    made = torch.ones((), device=device)
    setattr(made, _IS_ONE, True)
    return made


def is_one(g: Tensor) -> bool:
    """Whether this is such a tensor, as it comes through any number of sums."""
    return getattr(g, _IS_ONE, False)


__all__ = ["Plain", "again", "found_before", "here", "is_one", "one", "tl", "triton"]
