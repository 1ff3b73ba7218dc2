"""Parts of a weight on a GPU: its first outputs and inputs, which lie apart in it.

PyTorch's own kernels for such tensors read one number at a time.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math

import torch
from torch import Tensor

from isofed.functional.kernels import here, tl, triton
from isofed.models.tiles import WIDE, in_rows, rows_of

BLOCK = 1024  # numbers of a program


def taken(part: Tensor) -> Tensor:
    """A part in a piece of memory of its own; or itself, where it is one."""
    if in_rows(part) or not _suits(part):
        return rows_of(part)
    format = torch.channels_last if part.dim() == 4 else torch.contiguous_format
    made = torch.empty(part.shape, dtype=part.dtype, device=part.device, memory_format=format)
    _start(part, made, add=False)
    return made


def added(place: Tensor, gradient: Tensor) -> bool:
    """Add the gradient of a part to its place in that of the whole; or say that this is for others to do."""
    suits = _suits(place) and in_rows(gradient)
    if suits:
        _start(place, gradient, add=True)
    return suits


def _suits(part: Tensor) -> bool:
    """Whether a tensor is a matrix, or a convolution's, whose inputs lie next to each other and all taps evenly."""
    if not here(part) or part.dim() not in (2, 4) or part.stride(1) != 1:
        return False
    return part.dim() == 2 or part.stride(2) == part.shape[3] * part.stride(3)


def _start(part: Tensor, dense: Tensor, add: bool) -> None:
    taps = part[0, 0].numel()  # of a convolution; they lie between its outputs and its inputs
    by_output, by_tap = part.stride(0), part.stride(3) if part.dim() == 4 else 0
    rows, columns = part.shape[0] * taps, part.shape[1]
    wide = min(WIDE, triton.next_power_of_2(columns))
    _move[(triton.cdiv(rows, BLOCK // wide), triton.cdiv(columns, wide))](
        part, dense, rows, columns, taps, by_output, by_tap, BLOCK // wide, wide,
        math.gcd(columns, by_output, by_tap, 16), add,
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _move(
        part, dense, rows, columns, taps, by_output, by_tap,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, ADD: tl.constexpr,
    ):  # fmt: skip
        """Add to a part what is dense, or copy the part there."""
        # All of these are multiples of the unit: where the compiler knows it, several numbers are read at a time.
        columns, by_output, by_tap = columns // UNIT * UNIT, by_output // UNIT * UNIT, by_tap // UNIT * UNIT
        r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (r < rows)[:, None] & (c < columns)[None, :]
        at = part + (r // taps * by_output + r % taps * by_tap)[:, None] + c[None, :]
        beside = dense + r[:, None] * columns + c[None, :]
        v = tl.load(at, inside, 0.0)
        if ADD:
            tl.store(at, v + tl.load(beside, inside, 0.0).to(part.dtype.element_ty), inside)
        else:
            tl.store(beside, v, inside)
