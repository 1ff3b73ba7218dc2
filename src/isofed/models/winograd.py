"""3x3 convolutions on a processor with a quarter of the multiplications: Winograd's minimal filtering, F(4x4, 3x3).

Six by six pixels go over into 36 other numbers, and so do the nine weights between two channels. The products of the
two, summed over channels, go back into four by four pixels of the result: 36 products where the definition has 144.
Gradients go the same way back. The numbers are those of the definition to rounding: some 1e-6 of the largest away from
float64, where PyTorch's own are at some 3e-7.

All of it are products of small matrices, many at once (:mod:`isofed.models.products`). In memory the 36 places come
first, then the squares, the pictures and the channels, so that matrices have long rows; and there the largest of two by
two pixels is the largest of four such blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

from isofed.models import dense
from isofed.models.products import SMALL, along, multiply, pieces, room

# Lavin and Gray, arXiv 1509.09308: the interpolation points are 0, 1, -1, 2, -2 and infinity.
_INTO = torch.tensor([
    [4.0, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0],
    [0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1],
])  # fmt: skip
_BACK = torch.tensor([[1.0, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]])
_WEIGHT = torch.tensor([[6.0, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]]) / 24
_WEIGHTS = torch.kron(_WEIGHT, _WEIGHT)  # both ways at once
_INTO_T, _BACK_T, _WEIGHTS_T = (matrix.t().contiguous() for matrix in (_INTO, _BACK, _WEIGHTS))

NUMBERS = 2**21  # of transformed pictures and results that are held at once


class Convolution(nn.Conv2d):
    """``nn.Conv2d`` that does it this way where that is faster."""

    pool = False  # whether a maximum over squares of two by two, and the ReLU behind it, have become parts of it

    @classmethod
    def of(cls, layer: nn.Conv2d) -> Convolution:
        """The same convolution, with the same parameters, that does what stands behind it in one place as well."""
        made = cls.__new__(cls)
        made.__dict__ = vars(layer) | {"pool": True}
        return made

    def forward(self, input: Tensor) -> Tensor:
        if all(_is_plain(t) for t in (input, self.weight, self.bias) if t is not None) and self._pays(input):
            return convolution(input, self.weight, self.bias, self.zeros, self.pool)
        return self.behind(super().forward(input))

    @property
    def zeros(self) -> tuple[int, int]:
        """Rows and columns of them on each side of a picture."""
        return int(self.padding[0]), int(self.padding[1])

    def behind(self, y: Tensor) -> Tensor:
        """What stood behind the convolution, in PyTorch's own parts."""
        return F.max_pool2d(y, 2).relu_() if self.pool else y

    def _pays(self, x: Tensor) -> bool:
        size = (self.out_channels, self.in_channels, 3, 3)
        right = x.dim() == 4 and x.shape[1] == self.in_channels and self.weight.shape == size
        # PyTorch's own would share the work among threads, and wants channels that lie otherwise as they are.
        return right and x.stride(1) == 1 and torch.get_num_threads() == 1 and Cut.of(self, x).pays


def fits(layer: nn.Conv2d) -> bool:
    """Whether a layer is a convolution of this kind."""
    same = (layer.kernel_size, layer.stride, layer.dilation) == ((3, 3), (1, 1), (1, 1))
    return same and layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _is_plain(x: Tensor) -> bool:
    """Whether NumPy can read a tensor, and nobody wants to see or change what PyTorch does with it."""
    seen = torch._C._len_torch_function_stack() > 0 or torch._C._len_torch_dispatch_stack() > 0
    return not seen and dense._is_plain(x) and not x.is_neg()


@dataclass(frozen=True)
class Cut:
    """How pictures are cut into squares of six by six that overlap by two, for four by four of the result each."""

    pictures: int
    inside: int  # channels
    outside: int
    rows: int  # of pictures,
    columns: int
    above: int  # with so many of zeros on each side
    beside: int
    pool: bool  # whether of the result only the largest of two by two numbers are wanted, cut off at zero

    @classmethod
    def of(cls, layer: Convolution, x: Tensor) -> Cut:
        n, inside, rows, columns = x.shape
        return cls(n, inside, layer.out_channels, rows, columns, *layer.zeros, layer.pool)

    @cached_property
    def height(self) -> int:
        """Of the result."""
        return self.rows + 2 * self.above - 2

    @cached_property
    def width(self) -> int:
        return self.columns + 2 * self.beside - 2

    @cached_property
    def tall(self) -> int:
        """Squares on top of each other."""
        return -(-self.height // 4)

    @cached_property
    def wide(self) -> int:
        """Squares side by side."""
        return -(-self.width // 4)

    @property
    def sides(self) -> tuple[int, int, int]:
        """Numbers of a square that are wanted, down and across; rows and columns of all."""
        return (2, self.height // 2, self.width // 2) if self.pool else (4, self.height, self.width)

    @cached_property
    def matrices(self) -> tuple[int, int, int]:
        """Squares as the rows of matrices: places, matrices of each, rows of each."""
        rows = self.tall * self.wide * self.pictures
        n = pieces(rows, SMALL // (self.inside * self.outside))
        return 36, n, rows // n

    @property
    def pays(self) -> bool:
        """Whether PyTorch's own takes longer, by a fifth at least, forward and back: as measured on an AMD EPYC.

        With few channels it takes longer to move numbers than to multiply them, and with many channels a product that
        is small has few rows.
        """
        if min(self.height, self.width) < 2 or not self.pictures:
            return False
        squares, channels = self.tall * self.wide, self.inside * self.outside
        wasted = 16 * squares > 1.5 * self.height * self.width  # in squares that stick out
        right = min(self.inside, self.outside) >= 32 and 2**11 <= channels <= 2**14
        return right and not wasted and self.pictures * squares * channels >= 2**19


# The steps, each with its way back. Axes: two for the place in a square, two for the square, then pictures x channels.


def _squares(x: Tensor, cut: Cut) -> Tensor:
    """Squares of pictures, transformed."""
    high, wide, long = 4 * cut.tall + 2, 4 * cut.wide + 2, cut.pictures * cut.inside
    sheet = room("sheet", high, wide, cut.pictures, cut.inside)
    if (high, wide) != (cut.rows, cut.columns):
        sheet.zero_()
    _within(sheet, cut).copy_(x.permute(2, 3, 0, 1))
    lines, made = room("lines", 6, cut.tall, wide, long), x.new_empty(6, 6, cut.tall, cut.wide, long)
    row = wide * long
    along(_INTO, sheet.as_strided((cut.tall, 6, row), (4 * row, row, 1)), lines.flatten(2).transpose(0, 1))
    windows = lines.as_strided((6, cut.tall, cut.wide, 6, long), (cut.tall * row, row, 4 * long, long, 1))
    along(_INTO, windows, made.permute(0, 2, 3, 1, 4))
    return made


def _from_squares(g: Tensor, cut: Cut) -> Tensor:
    """The gradient of pictures."""
    high, wide, long = 4 * cut.tall + 2, 4 * cut.wide + 2, cut.pictures * cut.inside
    lines, sheet = room("lines", 6, cut.tall, wide, long), room("sheet", high, wide * long)
    _add_up(g.permute(0, 2, 3, 1, 4), lines)
    _add_up(lines.flatten(2).transpose(0, 1), sheet)
    found = _within(sheet.view(high, wide, cut.pictures, cut.inside), cut).permute(2, 3, 0, 1)
    return torch.empty(found.shape, memory_format=torch.channels_last).copy_(found)


def _within(sheet: Tensor, cut: Cut) -> Tensor:
    """The pictures themselves, without the zeros around them."""
    return sheet[cut.above : cut.above + cut.rows, cut.beside : cut.beside + cut.columns]


def _add_up(g: Tensor, out: Tensor) -> None:
    """Back from windows of six, each of which begins four after the one before: where two overlap, their sum."""
    *many, windows, _, long = g.shape
    over = room("over", *many, windows, 2, long)
    along(_INTO_T[:4], g, out[..., : 4 * windows, :].unflatten(-2, (windows, 4)))
    along(_INTO_T[4:], g, over)
    out[..., 4 * windows :, :].zero_()
    for k in range(2):
        out[..., 4 + k :: 4, :].add_(over[..., k, :])


def _result(m: Tensor, bias: Tensor | None, cut: Cut) -> tuple[Tensor, list[Tensor]]:
    """Results back from what they are transformed; of maxima, also what their gradient needs."""
    squares = (cut.tall, cut.wide, cut.pictures, cut.outside)
    long = math.prod(squares[1:])
    lines, made = room("lines", 4, 6, cut.tall, long), room("made", 4, 4, cut.tall, long)
    along(_BACK, m.view(6, 6, cut.tall, long).permute(1, 2, 0, 3), lines.permute(1, 2, 0, 3))
    along(_BACK, lines.transpose(1, 2), made.transpose(1, 2))
    if not cut.pool:
        return _pictures(made.view(4, 4, *squares), bias, cut), []
    pairs = made.view(2, 2, 2, 2, *squares)  # of rows, and of columns
    right = pairs[:, :, :, 1] - pairs[:, :, :, 0]
    most = torch.maximum(pairs[:, :, :, 0], pairs[:, :, :, 1], out=room("most", 2, 2, 2, *squares))
    below, best = most[:, 1] - most[:, 0], torch.maximum(most[:, 0], most[:, 1])
    y = _pictures(best, bias, cut).relu_()
    return y, [right, below, y]


def _from_result(g: Tensor, cut: Cut, kept: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The gradient of transformed results, and that of the bias."""
    if cut.pool:
        right, below, y = kept
        g = torch.ops.aten.threshold_backward(g, y, 0)
    bias = g.permute(0, 2, 3, 1).reshape(-1, cut.outside).sum(0)
    g = _from_pictures(g, cut)
    if cut.pool:
        rows, pairs = room("most", 2, 2, *g.shape[1:]), room("made", 2, 2, 2, 2, *g.shape[2:])
        # All of a maximum's gradient goes to one of two, so what is left for the other one is exact.
        torch.sub(g, _where_positive(g, below, rows[:, 1]), out=rows[:, 0])
        torch.sub(rows, _where_positive(rows, right, pairs[:, :, :, 1]), out=pairs[:, :, :, 0])
        g = pairs
    g = g.view(4, 4, cut.tall, -1)
    lines, made = room("lines", 4, 6, cut.tall, g.shape[3]), room("results", 6, 6, cut.tall, g.shape[3])
    along(_BACK_T, g.transpose(1, 2), lines.transpose(1, 2))
    along(_BACK_T, lines.permute(1, 2, 0, 3), made.permute(1, 2, 0, 3))
    return made, bias


def _where_positive(g: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """``g`` where ``x`` is above zero (or not a number), and zeros."""
    made: Tensor = torch.ops.aten.threshold_backward.grad_input(g, x, 0, grad_input=out)
    return made


def _pictures(y: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
    """Pictures of numbers that lie by their places in squares, without what sticks out; and a bias."""
    side, height, width = cut.sides
    made = y.new_empty(cut.pictures, cut.tall, side, cut.wide, side, cut.outside).copy_(y.permute(4, 2, 0, 3, 1, 5))
    made = made.view(cut.pictures, cut.tall * side, cut.wide * side, cut.outside)[:, :height, :width].contiguous()
    return (made if bias is None else made.add_(bias)).permute(0, 3, 1, 2)


def _from_pictures(g: Tensor, cut: Cut) -> Tensor:
    """The way back, with zeros where squares stick out."""
    side, height, width = cut.sides
    g = g.permute(0, 2, 3, 1)
    if (height, width) != (cut.tall * side, cut.wide * side):
        g = F.pad(g, (0, 0, 0, cut.wide * side - width, 0, cut.tall * side - height))
    g = g.unflatten(2, (cut.wide, side)).unflatten(1, (cut.tall, side)).permute(2, 4, 1, 3, 0, 5)
    return room("places", *g.shape).copy_(g)


def _weights(weight: Tensor) -> Tensor:
    """Transformed weights: places, then the two axes of channels as they come."""
    made = weight.new_empty(36, *weight.shape[:2])
    along(_WEIGHTS, weight.permute(2, 3, 0, 1).reshape(9, -1), made.view(36, -1))
    return made


def _from_weights(g: Tensor) -> Tensor:
    """The gradient of weights from parts, to be added up, of that of transformed ones: channels inside come first."""
    _, many, inside, outside = g.shape
    parts = room("weights", 9, many * inside * outside)
    along(_WEIGHTS_T, g.view(36, -1), parts)
    found = parts.view(3, 3, many, inside, outside).sum(2)
    return found.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> tuple[Tensor, list[Tensor]]:
    """The result, and what the way back needs."""
    with np.errstate(all="ignore"):  # it is not here that a run is told that it has diverged
        squares, m = _squares(x, cut), room("results", *cut.matrices, cut.outside)
        multiply(squares.view(*cut.matrices, -1), _weights(weight.transpose(0, 1))[:, None], m)
        made, kept = _result(m, bias, cut)
    return made, [squares, *kept]


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
        made, kept = _forward(x, weight, bias, cut)
        to_x, to_weight, _, _ = ctx.needs_input_grad
        # As with PyTorch's own, nobody may change in place what a derivative needs, and everybody what none does.
        ctx.save_for_backward(x if to_weight or cut.pool else None, weight if to_x or cut.pool else None, bias, *kept)
        ctx.cut = cut
        return made

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, bias, squares, *kept), cut = ctx.saved_tensors, ctx.cut
        g = g.to(memory_format=torch.channels_last)
        if torch.is_grad_enabled() or not _is_plain(g):
            return *_backward_by_pytorch(g, (x, weight, bias), cut, ctx.needs_input_grad), None
        to_x, to_weight, to_bias, _ = ctx.needs_input_grad
        dx = dweight = None
        with np.errstate(all="ignore"):
            made, dbias = _from_result(g, cut, kept)
            m = made.view(*cut.matrices, cut.outside)
            if to_weight:
                parts = room("parts", 36, cut.matrices[1], cut.inside, cut.outside)
                multiply(squares.view(*cut.matrices, -1).transpose(2, 3), m, parts)
                dweight = _from_weights(parts)
            if to_x:
                found = room("squares", *cut.matrices, cut.inside)
                multiply(m, _weights(weight)[:, None], found)
                dx = _from_squares(found.view(6, 6, cut.tall, cut.wide, -1), cut)
        return dx, dweight, dbias if to_bias else None, None


def _backward_by_pytorch(
    g: Tensor, given: tuple[Tensor, Tensor, Tensor | None], cut: Cut, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The same gradients in PyTorch's own operations, which can be differentiated again."""
    (x, weight, _), padding, again = given, (cut.above, cut.beside), torch.is_grad_enabled()
    if cut.pool:
        with torch.enable_grad():
            y = F.max_pool2d(F.conv2d(*given, padding=padding), 2).relu()
            inputs = [t for t, want in zip(given, wanted, strict=False) if want and t is not None]
            found = iter(torch.autograd.grad(y, inputs, g, create_graph=again))
        return [next(found) if want else None for want in wanted[:3]]
    pictures, filters = (cut.pictures, cut.inside, cut.rows, cut.columns), (cut.outside, cut.inside, 3, 3)
    to_x, to_weight, to_bias, _ = wanted
    return [
        conv2d_input(pictures, weight, g, padding=padding) if to_x else None,
        conv2d_weight(x, filters, g, padding=padding) if to_weight else None,
        g.sum((0, 2, 3)) if to_bias else None,
    ]


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], pool: bool) -> Tensor:
    """A 3x3 convolution of plain tensors; with ``pool``, the largest of two by two numbers of it, cut off at zero."""
    (n, inside, rows, columns), outside = x.shape, len(weight)
    one = Cut(1, inside, outside, rows, columns, *padding, pool)
    most = max(1, NUMBERS // (36 * one.tall * one.wide * (inside + outside)))
    made = []
    for some in x.split(-(-n // -(-n // most))):  # in as few parts as possible, and those alike
        cut = replace(one, pictures=len(some))
        if torch.is_grad_enabled():
            made.append(_Convolution.apply(some, weight, bias, cut))
        else:
            made.append(_forward(some, weight, bias, cut)[0])
    return made[0] if len(made) == 1 else torch.cat(made)
