"""Large dense layers on a processor.

PyTorch leaves products of float32 matrices to MKL, which has no AVX-512 for processors of other makers than its own:
on one core of an AMD EPYC it reaches 120 GFLOP/s where oneDNN, which PyTorch has for convolutions, reaches 269
(``benchmarks/operations.py``). So the large ones are oneDNN's here. The numbers differ by rounding alone.

The gradient of a weight is a product of two small matrices, as large as the weight itself: megabytes that are written
and read once more. Who only wants to go along it can have the two factors instead (:func:`go_along`), where there is a
C compiler.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isofed.functional import native

LEAST = 2**21  # multiplications from which on it pays; a smaller product is over before oneDNN has begun
MOST = 128  # rows of a batch with which factors are quicker; with more of them, to write and read is the smaller part


def available() -> bool:
    """Whether this processor and this PyTorch have such products; ``ISOFED_FUSED=0`` switches them off."""
    return native.allowed() and _is_here()


@cache
def _is_here() -> bool:
    fits = torch.backends.mkldnn.is_available() and native.wide()
    return fits and hasattr(torch.ops.mkldnn, "_linear_pointwise")


Factors = list[tuple[Tensor, Tensor]]  # pairs of matrices; what they stand for is the sum of a'b


class Dense(nn.Linear):
    """``nn.Linear`` with another product for large batches.

    Where ``factors`` is a list, the gradient of the weight is not multiplied out: its factors are put there.
    """

    factors: Factors | None = None

    def forward(self, input: Tensor) -> Tensor:
        if native.reads(input) and native.reads(self.weight) and self._has_usual_bias() and self._is_large(input):
            factors = self.factors if len(input) <= MOST else None
            made: Tensor = _Product.apply(input, self.weight, self.bias, factors)
            return made
        return super().forward(input)

    def _has_usual_bias(self) -> bool:
        """oneDNN reads as many numbers as there are outputs, whatever is there."""
        return self.bias is None or (native.reads(self.bias) and self.bias.shape == self.weight.shape[:1])

    def _is_large(self, x: Tensor) -> bool:
        """Whether a product is worth it, and one of two matrices: with a vector, PyTorch is as fast."""
        (outputs, width), two = self.weight.shape, x.dim() == 2 and len(x) > 1
        return two and outputs > 1 and x.shape[1] == width and len(x) * outputs * width >= LEAST


class _Product(torch.autograd.Function):
    """a b' + bias. Its derivatives are such products again, and so are theirs."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, factors: Factors | None = None) -> Tensor:
        to_a, to_b, *_ = ctx.needs_input_grad
        ctx.factors = factors
        # As PyTorch's own: somebody may change in place what no derivative needs.
        ctx.save_for_backward(a if to_b else None, b if to_a else None)
        bias = None if bias is None else bias.contiguous()
        made: Tensor = torch.ops.mkldnn._linear_pointwise(_matrix(a), _matrix(b), bias, "none", [], "")
        return made

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        to_a, to_b, to_bias, *_ = ctx.needs_input_grad
        if ctx.factors is not None and to_b and not torch.is_grad_enabled():
            ctx.factors.append((g, a.detach()))
            to_b = False
        return (
            _product(g, b.t()) if to_a else None,
            _product(g.t(), a.t()) if to_b else None,
            g.sum(0) if to_bias else None,
            None,
        )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b' in the course of a derivative."""
    made: Tensor = _Product.apply(a, b, None) if native.reads(a) and native.reads(b) else a @ b.t()
    return made


def _matrix(x: Tensor) -> Tensor:
    """The same numbers as oneDNN takes them: in rows or in columns that do not overlap."""
    (down, across), (rows, columns) = x.stride(), x.shape
    fits = (across == 1 and down >= columns) or (down == 1 and across >= rows)
    return x if fits else x.contiguous()


@cache
def _functions() -> Any:
    """What dense.c has, or nothing where it cannot be compiled."""
    found = native.library(Path(__file__).with_suffix(".c"))
    if found is not None:
        found.isofed_add_product.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 3
        found.isofed_add_product.restype = None
    return found


def goes_along(weight: Tensor) -> bool:
    """Whether a weight can go along factors."""
    fits = weight.dim() == 2 and not (weight.shape[0] % 4 or weight.shape[1] % 64)
    return fits and weight.is_contiguous() and available() and _functions() is not None


def go_along(weight: Tensor, factors: Factors, lr: Tensor) -> None:
    """``weight - lr a'b`` for each pair, in place."""
    for a, b in factors:
        a, b = (a * -lr).contiguous(), b.contiguous()
        _functions().isofed_add_product(a.data_ptr(), b.data_ptr(), weight.data_ptr(), len(a), *weight.shape)


def multiplied(factors: Factors) -> Tensor:
    """The gradient that factors stand for."""
    ahead, behind = (torch.cat(some) for some in zip(*factors, strict=True))
    return ahead.t() @ behind
