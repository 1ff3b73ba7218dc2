"""Pictures of another size."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from isofed.functional.kernels import here, tl, triton
from isofed.models.tiles import in_rows

BLOCK = 512  # numbers of a program


def resized(x: Tensor, size: tuple[int, int]) -> Tensor:
    """A batch of pictures, [batch, channels, height, width], at another size: bilinear, corner on corner.

    >>> resized(torch.tensor([[[[0.0, 1.0]]]]), (1, 3))
    tensor([[[[0.0000, 0.5000, 1.0000]]]])
    """
    if tuple(x.shape[2:]) == size:
        return x
    if not (here(x) and in_rows(x)) or x.dtype == torch.float64 or x.requires_grad:
        return interpolate(x, size, mode="bilinear", align_corners=True)
    # PyTorch's own kernel has one thread for all pictures and channels of a place.
    y = torch.empty((*x.shape[:2], *size), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    steps = [(old - 1) / (new - 1) if new > 1 else 0.0 for old, new in zip(x.shape[2:], size, strict=True)]
    _resize[(triton.cdiv(y.numel(), BLOCK),)](x, y, y.numel(), *x.shape[1:], *size, *steps, BLOCK)
    return y


if triton is not None:

    @triton.jit
    def between(x, picture, c, down, right, channels, height, width, inside):
        """The number between the four pixels around a place in a picture."""
        # A product that rounding makes too large must not lead past the last row or column.
        top, left = tl.minimum(down.to(tl.int32), height - 1), tl.minimum(right.to(tl.int32), width - 1)
        bottom, next_one = tl.minimum(top + 1, height - 1), tl.minimum(left + 1, width - 1)
        low, far = down - top.to(tl.float32), right - left.to(tl.float32)
        over, under = (picture * height + top) * width, (picture * height + bottom) * width
        a = tl.load(x + (over + left) * channels + c, inside, 0.0).to(tl.float32)
        b = tl.load(x + (over + next_one) * channels + c, inside, 0.0).to(tl.float32)
        d = tl.load(x + (under + left) * channels + c, inside, 0.0).to(tl.float32)
        e = tl.load(x + (under + next_one) * channels + c, inside, 0.0).to(tl.float32)
        return (1 - low) * ((1 - far) * a + far * b) + low * ((1 - far) * d + far * e)

    @triton.jit
    def _resize(
        x, y, count, channels, height, width, out_height, out_width, step_down, step_right, BLOCK: tl.constexpr
    ):  # fmt: skip
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = i < count
        c, pixel = i % channels, i // channels
        picture, row, column = pixel // (out_width * out_height), pixel // out_width % out_height, pixel % out_width
        down, right = row.to(tl.float32) * step_down, column.to(tl.float32) * step_right
        v = between(x, picture, c, down, right, channels, height, width, inside)
        tl.store(y + i, v.to(y.dtype.element_ty), inside)
