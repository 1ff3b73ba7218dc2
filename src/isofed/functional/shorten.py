"""Vectors that are not to be longer than a limit."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor

from isofed.functional.kernels import here, tl, triton

BLOCK = 1024  # numbers that a program looks at together
PARTS = 512  # of a sum, at most


def shorten(vector: Tensor, limit: float) -> None:
    """Scale a vector in place to the length ``limit`` where it is longer, as ``clip_grad_norm_`` does.

    >>> v = torch.tensor([3.0, 4.0]); shorten(v, 1.0); v
    tensor([0.6000, 0.8000])
    """
    if here(vector) and vector.is_contiguous() and vector.dtype == torch.float32 and vector.numel():
        # PyTorch's norm is one kernel more: it has to count which of its programs is the last.
        size, blocks = vector.numel(), triton.cdiv(vector.numel(), BLOCK)
        each = triton.cdiv(blocks, PARTS)  # blocks of a part
        parts = triton.cdiv(blocks, each)
        squares = vector.new_empty(parts)
        _squares[(parts,)](vector, squares, size, each, BLOCK)
        _shorten[(blocks,)](vector, squares, limit, size, parts, triton.next_power_of_2(parts), BLOCK)
    else:
        vector.mul_((limit / (torch.linalg.vector_norm(vector) + 1e-6)).clamp_(max=1.0))


if triton is not None:

    @triton.jit
    def _squares(vector, squares, size, each, BLOCK: tl.constexpr):
        """The sum of the squares of each part."""
        part, total = tl.program_id(0), tl.zeros((BLOCK,), tl.float32)
        for n in range(each):
            i = (part.to(tl.int64) * each + n) * BLOCK + tl.arange(0, BLOCK)
            v = tl.load(vector + i, i < size, 0.0)
            total += v * v
        tl.store(squares + part, tl.sum(total, 0))

    @triton.jit
    def _shorten(vector, squares, limit, size, parts, PARTS: tl.constexpr, BLOCK: tl.constexpr):
        n = tl.arange(0, PARTS)
        length = tl.sqrt_rn(tl.sum(tl.load(squares + n, n < parts, 0.0), 0))
        factor = limit / (length + 1e-6)
        if (factor < 1.0) | (factor != factor):  # which hands a NaN on
            i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(vector + i, tl.load(vector + i, i < size, 0.0) * factor, i < size)
