"""Vectors that are not to be longer than a limit."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from isofed.functional.kernels import here, tl, triton

BLOCK = 1024  # numbers of a program


def shorten(vector: Tensor, limit: float) -> None:
    """Scale a vector in place to the length ``limit`` where it is longer, as ``clip_grad_norm_`` does.

    >>> v = torch.tensor([3.0, 4.0]); shorten(v, 1.0); v
    tensor([0.6000, 0.8000])
    """
    length = torch.linalg.vector_norm(vector)
    if here(vector) and vector.is_contiguous():
        _shorten[(triton.cdiv(vector.numel(), BLOCK),)](vector, length, limit, vector.numel(), BLOCK)
    else:
        vector.mul_((limit / (length + 1e-6)).clamp_(max=1.0))


if triton is not None:

    @triton.jit
    def _shorten(vector, length, limit, size, BLOCK: tl.constexpr):
        factor = limit / (tl.load(length) + 1e-6)
        if (factor < 1.0) | (factor != factor):  # which hands a NaN on
            i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(vector + i, tl.load(vector + i, i < size, 0.0) * factor, i < size)
