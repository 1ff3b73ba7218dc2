"""Large dense layers on a processor.

PyTorch leaves products of float32 matrices to MKL, which has no AVX-512 for processors of other makers than its own:
on one core of an AMD EPYC it reaches 120 GFLOP/s where oneDNN, which PyTorch has for convolutions, reaches 269
(``benchmarks/operations.py``). So the large ones are oneDNN's here. The numbers differ by rounding alone.

The gradient of a weight is a product of two small matrices, as large as the weight itself: megabytes that are written
and read once more. Who only wants to go along it can have the two factors instead (:func:`go_along`).
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

LEAST = 2**21  # multiplications from which on it pays; a smaller product is over before oneDNN has begun
_FEW, _ROWS, _PART = 16, 16, 2**18  # of :func:`go_along`: rows that are few, rows and numbers of a part


def available() -> bool:
    """Whether this processor and this PyTorch have such products; ``ISOFED_FUSED=0`` switches them off."""
    return os.environ.get("ISOFED_FUSED", "1") != "0" and _is_here()


@cache
def _is_here() -> bool:
    fits = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return fits and hasattr(torch.ops.mkldnn, "_linear_pointwise")


Factors = list[tuple[Tensor, Tensor]]  # pairs of matrices; what they stand for is the sum of a'b


class Dense(nn.Linear):
    """``nn.Linear`` with another product for large batches.

    Where ``factors`` is a list, the gradient of the weight is not multiplied out: its factors are put there.
    """

    factors: Factors | None = None

    def forward(self, input: Tensor) -> Tensor:
        if _is_plain(input) and _is_plain(self.weight) and self._is_large(input):
            made: Tensor = _Product.apply(input, self.weight, self.bias, self.factors)
            return made
        return super().forward(input)

    def _is_large(self, x: Tensor) -> bool:
        """Whether a product is worth it, and one of two matrices: with a vector, PyTorch is as fast."""
        (outputs, width), two = self.weight.shape, x.dim() == 2 and len(x) > 1
        return two and outputs > 1 and x.shape[1] == width and len(x) * outputs * width >= LEAST


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor is one of a processor and nothing has to be done with a call that only PyTorch's own can do."""
    if type(x) not in (Tensor, nn.Parameter) or x.device.type != "cpu" or x.dtype != torch.float32:
        return False
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    forward = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return not (traced or forward or torch.is_autocast_enabled("cpu")) and x.layout == torch.strided


class _Product(torch.autograd.Function):
    """a b' + bias. Its derivatives are such products again, and so are theirs."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, factors: Factors | None = None) -> Tensor:
        to_a, to_b, *_ = ctx.needs_input_grad
        ctx.factors = factors
        # As PyTorch's own: somebody may change in place what no derivative needs.
        ctx.save_for_backward(a if to_b else None, b if to_a else None)
        made: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
        return made

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        to_a, to_b, to_bias, *_ = ctx.needs_input_grad
        if ctx.factors is not None and to_b and not torch.is_grad_enabled():
            ctx.factors.append((g, a.detach()))
            to_b = False
        return (
            _Product.apply(g, b.t(), None) if to_a else None,
            _Product.apply(g.t(), a.t(), None) if to_b else None,
            g.sum(0) if to_bias else None,
            None,
        )


def go_along(weight: Tensor, factors: Factors, lr: Tensor) -> None:
    """``weight - lr a'b`` for each pair, in place.

    With few rows in a and b, the weight's own memory is what takes time, and a part of it at once is faster: of 128 by
    12,544 numbers with ten rows 1.0 ms, where the whole took 1.5 and the product and an update 1.6 (one core of an AMD
    EPYC, caches cold).
    """
    for a, b in factors:
        rows = max(_ROWS, _PART // weight.shape[1]) if len(a) <= _FEW else len(weight)
        for to, some in zip(weight.split(rows), (a * -lr).t().split(rows), strict=True):
            to.addmm_(some, b)


def multiplied(factors: Factors) -> Tensor:
    """The gradient that factors stand for."""
    return torch.stack([a.t() @ b for a, b in factors]).sum(0)
