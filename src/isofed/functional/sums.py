"""A running total of losses."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isofed.functional.kernels import here, tl, triton


def add_sum(total: Tensor, terms: Sequence[Tensor], weight: float) -> None:
    """Add the sum of some numbers, times a weight, to a total.

    >>> total = torch.tensor(1.0); add_sum(total, [torch.tensor(2.0), torch.tensor(3.0)], 10); total
    tensor(51.)
    """
    *others, last = terms
    if not others:
        total.add_(last, alpha=weight)
        return
    rest = sum(others[1:], others[0])
    # Somebody's own term may have been made on the processor.
    if all(here(t) and t.dtype == torch.float32 and t.dim() == 0 for t in (total, rest, last)):
        _add_two[(1,)](total, rest, last, float(weight), num_warps=1)
    else:
        total.add_(rest + last, alpha=weight)


if triton is not None:

    @triton.jit
    def _add_two(total, one, two, weight):
        tl.store(total, tl.load(total) + weight * (tl.load(one) + tl.load(two)))
