"""The gradient of a first convolution on a GPU: one whose input is a picture of a few channels.

cuDNN has no fast algorithm with a fixed order of sums for three channels in float32: in a small network that one
gradient takes as long as all the rest of a step. Seen as a matrix product it is small: outputs x pixels times pixels x
taps, where taps are the few input numbers that an output pixel sees. Programs sum over a part of the pixels each, and
a second kernel adds the parts in order, so the same input gives the same bits.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isofed.functional.kernels import tl, triton
from isofed.models.tiles import PARTS, rows_of

PIXELS = 64  # of a piece that a program looks at together
COLUMNS = 32  # of the sums that a program adds up
TAPS = 64  # numbers of the input, at most, that an output pixel sees
OUTPUTS = 128  # channels of the output, at most


def is_plain(layer: nn.Conv2d) -> bool:
    """Whether a layer is a convolution and nothing more, with the same stride and padding both ways."""
    return (
        layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.stride[0] == layer.stride[1]
        and not isinstance(layer.padding, str)
        and layer.padding[0] == layer.padding[1]
        and layer.padding_mode == "zeros"
    )


def fits(layer: nn.Conv2d) -> bool:
    """Whether a layer is a plain convolution over few channels."""
    return is_plain(layer) and layer.weight[0].numel() <= TAPS and layer.out_channels <= OUTPUTS


def applies(x: Tensor, weight: Tensor) -> bool:
    """Whether this input and these weights ask for a gradient in float32, and of the weights alone."""
    single = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    return single and x.is_cuda and weight.requires_grad and not x.requires_grad and x.numel() > 0


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """A convolution whose input is no function of any weight."""
    return _Convolution.apply(x, weight, bias, stride, padding)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
        x = rows_of(x)
        ctx.save_for_backward(x)
        ctx.taps, ctx.stride, ctx.padding = weight.shape[1:], stride, padding
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        channels, tall, wide = ctx.taps
        g = rows_of(g)
        outputs, taps, pixels = g.shape[1], channels * tall * wide, g.numel() // g.shape[1]
        per = triton.cdiv(triton.cdiv(pixels, PARTS), PIXELS) * PIXELS
        parts = triton.cdiv(pixels, per)
        # A last column for the bias, whose gradient is the plain sum.
        sums = torch.empty((parts, outputs, taps + 1), device=x.device)
        dweight, dbias = torch.empty((outputs, tall, wide, channels), device=x.device), sums.new_empty(outputs)
        _part[(parts,)](
            x, g, sums, pixels, per, outputs, taps, *x.shape[2:], *g.shape[2:], channels, wide, ctx.stride, ctx.padding,
            PIXELS, max(16, triton.next_power_of_2(outputs)), max(16, triton.next_power_of_2(taps)),
            "tf32" if torch.backends.cudnn.allow_tf32 else "ieee",
        )  # fmt: skip
        _whole[(triton.cdiv(outputs * (taps + 1), COLUMNS),)](
            sums, dweight, dbias, parts, outputs, taps, PARTS, COLUMNS
        )
        return None, dweight.permute(0, 3, 1, 2), dbias if ctx.needs_input_grad[2] else None, None, None


if triton is not None:

    @triton.jit
    def _part(
        x, g, sums, pixels, per, outputs, taps, height, width, out_height, out_width, channels, wide, stride, padding,
        PIXELS: tl.constexpr, OUTPUTS: tl.constexpr, TAPS: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """The sum over a part of the pixels."""
        part, o, t = tl.program_id(0), tl.arange(0, OUTPUTS), tl.arange(0, TAPS)
        c, down, right = t % channels, t // (channels * wide), (t // channels) % wide
        total = tl.zeros((OUTPUTS, TAPS), tl.float32)
        plain = tl.zeros((OUTPUTS, PIXELS), tl.float32)
        for start in range(0, per, PIXELS):
            p = part * per + start + tl.arange(0, PIXELS)
            place = p % (out_height * out_width)
            row = (place // out_width * stride - padding)[:, None] + down[None, :]
            column = (place % out_width * stride - padding)[:, None] + right[None, :]
            seen = (p < pixels)[:, None] & (t < taps)[None, :]
            seen = seen & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            picture = (p // (out_height * out_width)).to(tl.int64)[:, None] * height
            v = tl.load(x + ((picture + row) * width + column) * channels + c[None, :], seen, 0.0)
            here = (o < outputs)[:, None] & (p < pixels)[None, :]
            d = tl.load(g + p[None, :].to(tl.int64) * outputs + o[:, None], here, 0.0)
            total = tl.dot(d, v, total, input_precision=PRECISION)
            plain += d
        row_of = sums + (part * outputs + o) * (taps + 1)
        tl.store(row_of[:, None] + t[None, :], total, (o < outputs)[:, None] & (t < taps)[None, :])
        tl.store(row_of + taps, tl.sum(plain, 1), o < outputs)

    @triton.jit
    def _whole(sums, dweight, dbias, parts, outputs, taps, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
        """The sum of the parts, for some of the numbers."""
        p, i = tl.arange(0, PARTS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        size = outputs * (taps + 1)
        made = (p < parts)[:, None] & (i < size)[None, :]
        v = tl.sum(tl.load(sums + p[:, None] * size + i[None, :], made, 0.0), 0)
        o, t = i // (taps + 1), i % (taps + 1)
        tl.store(dweight + o * taps + t, v, (i < size) & (t < taps))
        tl.store(dbias + o, v, (i < size) & (t == taps))
