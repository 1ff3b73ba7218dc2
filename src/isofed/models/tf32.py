"""Convolutions in tf32 on a GPU, where cuDNN takes longer for them than it would have to.

cuDNN has good kernels for many channels and large pictures. With few of either, with a stride, and for the gradients of
a layer with 32 channels, a plain matrix product in Triton is faster (``benchmarks/convolutions.py --precision tf32``):
outputs x taps, where taps are the numbers of the input that an output pixel sees. Tensor cores want both factors of a
product in the order in which they are summed. Forward that is how pictures and weights lie. In a gradient it is not,
and there four rows are woven into one, in registers, on the way: :func:`_woven`.

Sums are made in a fixed order, so the same input gives the same bits. Factors are cut off to the 11 bits of tf32 by the
tensor cores themselves, as in some of cuDNN's kernels; others round. Pictures and weights lie channels-last.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isofed.functional.kernels import tl, triton
from isofed.models.thin import is_plain
from isofed.models.tiles import in_rows, rows_of

DEPTH = 32  # numbers of each factor that are multiplied at a time; of channels there must be a multiple of it
FEW = 2048  # output pixels up to which there are so few programs that each has to look further ahead
THIN = 32  # channels of the input up to which cuDNN's gradients are the slower ones
PROGRAMS = 132  # that share the sum of a weight's gradient, about: as many as a large GPU has multiprocessors
OUTPUTS = 64  # of the weight's gradient that a program makes: the least that tensor cores multiply
COLUMNS = 256  # of the sums that a program adds up
_LARGEST = 2**30  # numbers of a batch: places are counted in 32 bits, and padding may make a result the larger one


def fits(layer: nn.Conv2d) -> bool:
    """Whether a layer is a plain convolution over many channels."""
    return is_plain(layer) and layer.in_channels % DEPTH == layer.out_channels % DEPTH == 0


def applies(x: Tensor, weight: Tensor) -> bool:
    """Whether this input and these weights are to be multiplied in tf32, and lie as the kernels want them."""
    allowed = torch.backends.cudnn.allow_tf32 and not torch.is_autocast_enabled("cuda")
    single = x.dtype == weight.dtype == torch.float32 and x.is_cuda
    small = max(x.numel(), x.numel() // x.shape[1] * len(weight)) < _LARGEST
    return allowed and single and small and in_rows(x) and in_rows(weight)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """A convolution for which :func:`fits` and :func:`applies` hold."""
    y: Tensor = _Convolution.apply(x, weight, stride, padding)
    return y if bias is None else y + bias[:, None, None]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return forward(x, weight, stride, padding)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x, to_weight = ctx.needs_input_grad[:2]
        dx = dweight = None
        if not torch.is_grad_enabled():  # or else this is to be differentiated again
            g = rows_of(g)
            if to_x and input_is_ours(weight, ctx.stride):
                dx = input_gradient(g, weight, x.shape, ctx.stride, ctx.padding)
            if to_weight and weight_is_ours(weight):
                dweight = weight_gradient(g, x, weight.shape, ctx.stride, ctx.padding)
        wanted = [to_x and dx is None, to_weight and dweight is None, False]
        if any(wanted):
            sides = [ctx.stride] * 2, [ctx.padding] * 2, [1, 1]
            rest = torch.ops.aten.convolution_backward(g, x, weight, None, *sides, False, [0, 0], 1, wanted)
            dx, dweight = rest[0] if wanted[0] else dx, rest[1] if wanted[1] else dweight
        return dx, dweight, None, None


def input_is_ours(weight: Tensor, stride: int) -> bool:
    """Whether cuDNN is slower with the gradient of the input."""
    _, channels, tall, wide = weight.shape
    return (channels <= THIN and stride == 1) or (tall == wide == 1 and stride > 1)


def weight_is_ours(weight: Tensor) -> bool:
    """Whether cuDNN is slower with the gradient of the weights."""
    outputs, channels, _, wide = weight.shape
    return channels <= THIN and outputs % OUTPUTS == 0 and wide == 3


def forward(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """What a convolution without a bias gives."""
    outputs, channels, tall, wide = weight.shape
    n, _, *sides = x.shape
    height, width = ((s + 2 * padding - k) // stride + 1 for s, k in zip(sides, (tall, wide), strict=True))
    if min(height, width) < 1:
        return F.conv2d(x, weight, None, stride, padding)  # which says what is wrong
    y = torch.empty((n, outputs, height, width), device=x.device, memory_format=torch.channels_last)
    pixels = n * height * width
    across = next(size for size in (128, 64, 32) if outputs % size == 0)
    _forward[(outputs // across, triton.cdiv(pixels, 128))](
        x, weight, y, pixels, *sides, height, width, stride, padding, outputs, channels, wide, tall * wide,
        128, across, DEPTH, num_warps=8 if across == 128 else 4, num_stages=4 if pixels <= FEW else 3,
    )  # fmt: skip
    return y


def input_gradient(g: Tensor, weight: Tensor, size: torch.Size, stride: int, padding: int) -> Tensor:
    """The gradient of a convolution's input, which has this size."""
    outputs, channels, tall, wide = weight.shape
    n, _, *sides = size
    dx = torch.empty(size, device=g.device, memory_format=torch.channels_last)
    # Pixels whose places leave the same remainder by the stride see the same taps: they are done together.
    pixels = n * triton.cdiv(sides[0], stride) * triton.cdiv(sides[1], stride)
    down, across = (128, 64) if channels % 64 == 0 else (256, 32)
    _input[(channels // across, triton.cdiv(pixels, down), stride * stride)](
        g, weight, dx, pixels, *sides, *g.shape[2:], padding, channels, outputs, tall, wide, stride,
        down, across, DEPTH, num_warps=4 if across == 64 else 8, num_stages=3,
    )  # fmt: skip
    return dx


def weight_gradient(g: Tensor, x: Tensor, size: torch.Size, stride: int, padding: int) -> Tensor:
    """The gradient of a convolution's weights, which have this size and are three columns wide."""
    outputs, channels, tall, wide = size
    pixels = g.numel() // outputs
    tiles = tall * (channels // THIN) * (outputs // OUTPUTS)
    per = triton.cdiv(triton.cdiv(pixels, max(1, PROGRAMS // tiles)), DEPTH) * DEPTH
    parts = triton.cdiv(pixels, per)
    sums = torch.empty((parts, outputs, tall, wide, channels), device=x.device)
    _weight[(tall * (channels // THIN), outputs // OUTPUTS, parts)](
        x, g, sums, pixels, per, *x.shape[2:], stride, padding, *g.shape[2:], outputs, channels, tall,
        OUTPUTS, THIN, DEPTH, num_warps=4, num_stages=1,
    )  # fmt: skip
    dweight = torch.empty(sums.shape[1:], device=x.device) if parts > 1 else sums[0]
    if parts > 1:
        _whole[(triton.cdiv(dweight.numel(), COLUMNS),)](sums, dweight, dweight.numel(), parts, COLUMNS)
    return dweight.permute(0, 3, 1, 2)


if triton is not None:

    @triton.jit
    def _forward(
        x, weight, y, pixels, height, width, out_height, out_width, stride, padding, OUTPUTS: tl.constexpr,
        CHANNELS: tl.constexpr, WIDE: tl.constexpr, TAPS: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        """Some channels of some output pixels."""
        o, p = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        k = tl.arange(0, DEPTH)
        place = p % (out_height * out_width)
        row, column = place // out_width * stride - padding, place % out_width * stride - padding
        corner = ((p // (out_height * out_width) * height + row) * width + column) * CHANNELS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for i in range(TAPS * (CHANNELS // DEPTH)):
            tap, c = i // (CHANNELS // DEPTH), i % (CHANNELS // DEPTH) * DEPTH
            r, q = row + tap // WIDE, column + tap % WIDE
            seen = (p < pixels) & (r >= 0) & (r < height) & (q >= 0) & (q < width)
            there = corner[:, None] + ((tap // WIDE * width + tap % WIDE) * CHANNELS + c) + k[None, :]
            v = tl.load(x + there, seen[:, None], 0.0)
            w = tl.load(weight + o[None, :] * (TAPS * CHANNELS) + (tap * CHANNELS + c) + k[:, None])
            total = tl.dot(v, w, total, input_precision="tf32")
        tl.store(y + p[:, None] * OUTPUTS + o[None, :], total, (p < pixels)[:, None])

    @triton.jit
    def _woven(a, b, c, d):
        """Four matrices, the rows of which become columns, one of each by turns.

        What stands in a thread's registers stays there, and numbers that follow one another in the new order do so
        in its registers too: they go to the tensor cores' memory four at a time.
        """
        four = tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (1, 0, 3, 2))
        return tl.reshape(four, (four.shape[0], four.shape[1] * 4))

    @triton.jit
    def _tap(weight, o, tap, c, TAPS: tl.constexpr, CHANNELS: tl.constexpr):
        return tl.load(weight + (o[:, None] * TAPS + tap) * CHANNELS + c[None, :])

    @triton.jit
    def _input(
        g, weight, dx, pixels, height, width, out_height, out_width, padding, CHANNELS: tl.constexpr,
        OUTPUTS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, STRIDE: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        """Some channels of some input pixels, whose places leave the same remainder by the stride."""
        TAPS: tl.constexpr = TALL * WIDE
        c, p = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        k, four = tl.arange(0, DEPTH), tl.arange(0, DEPTH // 4) * 4
        below, beside = tl.program_id(2) // STRIDE, tl.program_id(2) % STRIDE  # the remainders
        across = (width + STRIDE - 1) // STRIDE
        area = (height + STRIDE - 1) // STRIDE * across
        row, column = p % area // across * STRIDE + below, p % across * STRIDE + beside
        inside = (p < pixels) & (row < height) & (column < width)
        # The first of the taps through which these pixels were seen, how many there are, and the output behind it; each
        # next tap has been used by the output one before.
        first, next_to = (below + padding) % STRIDE, (beside + padding) % STRIDE
        tall, wide = (TALL - first + STRIDE - 1) // STRIDE, (WIDE - next_to + STRIDE - 1) // STRIDE
        r0, q0 = (row + padding - first) // STRIDE, (column + padding - next_to) // STRIDE
        corner = ((p // area * out_height + r0) * out_width + q0) * OUTPUTS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for i in range(tall * wide * (OUTPUTS // DEPTH)):
            t, o = i // (OUTPUTS // DEPTH), i % (OUTPUTS // DEPTH) * DEPTH
            up, left = t // wide, t % wide
            seen = inside & (r0 - up >= 0) & (r0 - up < out_height) & (q0 - left >= 0) & (q0 - left < out_width)
            d = tl.load(g + corner[:, None] + (o - (up * out_width + left) * OUTPUTS) + k[None, :], seen[:, None], 0.0)
            tap = (first + up * STRIDE) * WIDE + next_to + left * STRIDE
            w = _woven(
                _tap(weight, o + four, tap, c, TAPS, CHANNELS), _tap(weight, o + four + 1, tap, c, TAPS, CHANNELS),
                _tap(weight, o + four + 2, tap, c, TAPS, CHANNELS), _tap(weight, o + four + 3, tap, c, TAPS, CHANNELS),
            )  # fmt: skip
            total = tl.dot(d, tl.trans(w), total, input_precision="tf32")
        there = ((p // area * height + row) * width + column)[:, None] * CHANNELS + c[None, :]
        tl.store(dx + there, total, inside[:, None])

    @triton.jit
    def _gradients(g, p, pixels, o, OUTPUTS: tl.constexpr):
        return tl.load(g + p[:, None] * OUTPUTS + o[None, :], (p < pixels)[:, None], 0.0)

    @triton.jit
    def _seen(x, p, c, down, right, shape, CHANNELS: tl.constexpr):
        """What output pixels see through one tap."""
        pixels, height, width, out_height, out_width, stride, padding = shape
        place = p % (out_height * out_width)
        r = place // out_width * stride - padding + down
        q = place % out_width * stride - padding + right
        inside = (p < pixels) & (r >= 0) & (r < height) & (q >= 0) & (q < width)
        there = (p // (out_height * out_width) * height + r) * width + q
        return tl.load(x + there[:, None] * CHANNELS + c[None, :], inside[:, None], 0.0)

    @triton.jit
    def _seen_by_four(x, p, c, down, right, shape, CHANNELS: tl.constexpr):
        q: tl.constexpr = p.shape[0]
        one, two = _seen(x, p, c, down, right, shape, CHANNELS), _seen(x, p + q, c, down, right, shape, CHANNELS)
        three = _seen(x, p + 2 * q, c, down, right, shape, CHANNELS)
        return _woven(one, two, three, _seen(x, p + 3 * q, c, down, right, shape, CHANNELS))

    @triton.jit
    def _weight(
        x, g, sums, pixels, per, height, width, stride, padding, out_height: tl.constexpr, out_width: tl.constexpr,
        OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, TALL: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ):  # fmt: skip
        """The sum over a part of the pixels, for a row of three taps: what they see is mostly the same."""
        q: tl.constexpr = DEPTH // 4
        shape = (pixels, height, width, out_height, out_width, stride, padding)
        down, part = tl.program_id(0) // (CHANNELS // COLUMNS), tl.program_id(2)
        c = tl.program_id(0) % (CHANNELS // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
        o = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        left = tl.zeros((ROWS, COLUMNS), tl.float32)
        middle = tl.zeros((ROWS, COLUMNS), tl.float32)
        right = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, per, DEPTH):
            p = part * per + start + tl.arange(0, q)
            d = _woven(
                _gradients(g, p, pixels, o, OUTPUTS), _gradients(g, p + q, pixels, o, OUTPUTS),
                _gradients(g, p + 2 * q, pixels, o, OUTPUTS), _gradients(g, p + 3 * q, pixels, o, OUTPUTS),
            )  # fmt: skip
            v = _seen_by_four(x, p, c, down, 0, shape, CHANNELS)
            left = tl.dot(d, tl.trans(v), left, input_precision="tf32")
            v = _seen_by_four(x, p, c, down, 1, shape, CHANNELS)
            middle = tl.dot(d, tl.trans(v), middle, input_precision="tf32")
            v = _seen_by_four(x, p, c, down, 2, shape, CHANNELS)
            right = tl.dot(d, tl.trans(v), right, input_precision="tf32")
        there = sums + ((part * OUTPUTS + o[:, None]) * TALL + down) * (3 * CHANNELS) + c[None, :]
        tl.store(there, left)
        tl.store(there + CHANNELS, middle)
        tl.store(there + 2 * CHANNELS, right)

    @triton.jit
    def _whole(sums, dweight, size, parts, COLUMNS: tl.constexpr):
        """The sum of the parts, for some of the numbers."""
        i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((COLUMNS,), tl.float32)
        for part in range(parts):
            total += tl.load(sums + part * size + i, i < size, 0.0)
        tl.store(dweight + i, total, i < size)
