"""3x3 convolutions on a processor with a quarter of the multiplications: Winograd's minimal filtering, F(4x4, 3x3).

A square of six by six pixels goes over into 36 other numbers, and so do the nine weights between two channels; the
products of the two, summed over channels, go back into four by four pixels of the result. There are 36 products where
the definition has 144, and a gradient goes the same way back. The numbers are those of the definition to rounding: a
few times PyTorch's own distance from float64, some 1e-6 of them.

Everything here is a product of small matrices, many at once, and those are NumPy's: its OpenBLAS has kernels for small
matrices that use AVX-512 on processors of any maker and copy nothing, where PyTorch has MKL (see
:mod:`isofed.models.dense`), or oneDNN one matrix at a time. In memory the 36 places come first, then the squares, then
the pictures, then the channels: each matrix has long rows.
"""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isofed.models.dense import _is_plain

# The interpolation points are 0, 1, -1, 2, -2 and infinity (Lavin and Gray, arXiv 1509.09308).
_INTO = torch.tensor([
    [4.0, 0, -5, 0, 1, 0], [0, -4, -4, 1, 1, 0], [0, 4, -4, -1, 1, 0],
    [0, -2, -1, 2, 1, 0], [0, 2, -1, -2, 1, 0], [0, 4, 0, -5, 0, 1],
])  # fmt: skip
_WEIGHT = torch.tensor(
    [[1 / 4, 0, 0], [-1 / 6, -1 / 6, -1 / 6], [-1 / 6, 1 / 6, -1 / 6], [1 / 24, 1 / 12, 1 / 6], [1 / 24, -1 / 12, 1 / 6], [0, 0, 1]]
)
_BACK = torch.tensor([[1.0, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]])
_BACK_T, _INTO_T = _BACK.t().contiguous(), _INTO.t().contiguous()
_WEIGHTS = torch.kron(_WEIGHT, _WEIGHT)  # 36 x 9
_WEIGHTS_T = _WEIGHTS.t().contiguous()

SMALL = 10**6  # multiplications up to which OpenBLAS has those kernels, with one thread
NUMBERS = 2**21  # of transformed pictures that are held at once


def available() -> bool:
    """Whether this processor and this NumPy have such products; ``ISOFED_FUSED=0`` switches them off."""
    return os.environ.get("ISOFED_FUSED", "1") != "0" and _is_here()


@cache
def _is_here() -> bool:
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    built: Any = np.show_config(mode="dicts")
    return "openblas" in str(built.get("Build Dependencies", {}).get("blas", {}).get("name", "")).lower()


class _Rooms(threading.local):
    """Memory for numbers that are needed only until the next step: fresh memory has to be cleared by the system."""

    def __init__(self) -> None:
        self.here: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        if name not in self.here or len(self.here[name]) < size:
            self.here[name] = torch.empty(size)
        return self.here[name][:size].view(shape)


_room = _Rooms()


@cache
def _pieces(length: int, most: int) -> int:
    """Into how many equal pieces, as few as possible, something has to be cut for none to be longer than that."""
    return next(n for n in range(max(1, -(-length // max(1, most))), length + 1) if length % n == 0)


def _along(matrix: Tensor, x: Tensor, out: Tensor) -> None:
    """``matrix @ x`` for the last two axes of ``x``, in matrices for which there are those kernels."""
    n = _pieces(x.shape[-1], SMALL // matrix.numel())
    if n > 1:
        x, out = (t.unflatten(-1, (n, -1)).transpose(-3, -2) for t in (x, out))
    np.matmul(matrix.numpy(), x.numpy(), out=out.numpy())


@dataclass(frozen=True)
class Cut:
    """How pictures are cut into squares of six by six that overlap by two, of which the result has four by four."""

    pictures: int
    inside: int  # channels
    outside: int
    rows: int  # of pictures,
    columns: int
    above: int  # with so many of zeros on each side
    beside: int
    pool: bool  # whether of the result only the largest numbers of squares of two by two are wanted, cut off at zero

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

    @cached_property
    def matrices(self) -> tuple[int, int, int]:
        """Squares as the rows of matrices: places, matrices of each, rows of each."""
        rows = self.tall * self.wide * self.pictures
        n = _pieces(rows, SMALL // (self.inside * self.outside))
        return 36, n, rows // n


# The steps, each with its way back. Axes: two for the place in a square, two for the square, then pictures x channels.


def squares_of(x: Tensor, cut: Cut) -> Tensor:
    """Squares of pictures, transformed."""
    high, wide, long = 4 * cut.tall + 2, 4 * cut.wide + 2, cut.pictures * cut.inside
    exact = (high, wide) == (cut.rows, cut.columns)
    sheet = _room("sheet", high, wide, cut.pictures, cut.inside)
    _inner(sheet if exact else sheet.zero_(), cut).copy_(x.permute(2, 3, 0, 1))
    lines, made = _room("lines", 6, cut.tall, wide, long), x.new_empty(6, 6, cut.tall, cut.wide, long)
    row = wide * long
    _along(_INTO, sheet.as_strided((cut.tall, 6, row), (4 * row, row, 1)), lines.flatten(2).transpose(0, 1))
    overlapping = lines.as_strided((6, cut.tall, cut.wide, 6, long), (cut.tall * row, row, 4 * long, long, 1))
    _along(_INTO, overlapping, made.permute(0, 2, 3, 1, 4))
    return made


def _inner(sheet: Tensor, cut: Cut) -> Tensor:
    return sheet[cut.above : cut.above + cut.rows, cut.beside : cut.beside + cut.columns]


def pictures_of(g: Tensor, cut: Cut) -> Tensor:
    """The gradient of pictures from that of their squares."""
    high, wide, long = 4 * cut.tall + 2, 4 * cut.wide + 2, cut.pictures * cut.inside
    lines, sheet = _room("lines", 6, cut.tall, wide, long), _room("sheet", high, wide * long)
    _add_up(g.permute(0, 2, 3, 1, 4), lines)
    _add_up(lines.flatten(2).transpose(0, 1), sheet)
    found = _inner(sheet.view(high, wide, cut.pictures, cut.inside), cut).permute(2, 3, 0, 1)
    return found.contiguous(memory_format=torch.channels_last)


def _add_up(g: Tensor, out: Tensor) -> None:
    """Back from windows of six, each of which begins four after the one before: where two overlap, their sum."""
    *many, windows, _, long = g.shape
    end, over = 4 * windows, _room("over", *many, windows, 2, long)
    _along(_INTO_T[:4], g, out[..., :end, :].unflatten(-2, (windows, 4)))
    _along(_INTO_T[4:], g, over)
    out[..., end:, :].zero_()
    for k in range(2):
        out[..., 4 + k :: 4, :].add_(over[..., k, :])


def result_of(m: Tensor, bias: Tensor | None, cut: Cut) -> tuple[Tensor, list[Tensor]]:
    """Transformed results back to pictures; with the maximum, also what its way back needs."""
    long = cut.wide * cut.pictures * cut.outside
    lines, made = _room("lines", 4, 6, cut.tall, long), _room("made", 4, 4, cut.tall, long)
    _along(_BACK, m.view(6, 6, cut.tall, long).permute(1, 2, 0, 3), lines.permute(1, 2, 0, 3))
    _along(_BACK, lines.transpose(1, 2), made.transpose(1, 2))
    places = (4, 4, cut.tall, cut.wide, cut.pictures, cut.outside)
    if not cut.pool:
        return _picture(made.view(places) if bias is None else made.view(places).add_(bias), cut), []
    pairs = made.view(2, 2, 2, 2, *places[2:])  # rows in two pairs, columns in two pairs
    right = pairs[:, :, :, 1] - pairs[:, :, :, 0]
    most = torch.maximum(pairs[:, :, :, 0], pairs[:, :, :, 1], out=_room("most", 2, 2, 2, *places[2:]))
    below = most[:, 1] - most[:, 0]
    made = torch.maximum(most[:, 0], most[:, 1])
    made = (made if bias is None else made.add_(bias)).relu_()
    return _picture(made, cut), [right, below, made]


def of_result(g: Tensor, cut: Cut, kept: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The gradient of transformed results, and that of the bias."""
    places = (4, 4, cut.tall, cut.wide, cut.pictures, cut.outside)
    if cut.pool:
        right, below, made = kept
        g = _places(g, cut)
        g = _where_positive(g, made, g)
        bias = g.view(-1, cut.outside).sum(0)
        rows, pairs = _room("most", 2, 2, 2, *places[2:]), _room("made", 2, 2, 2, 2, *places[2:])
        # The gradient of a maximum: all of it goes one way, so that the difference is exact.
        torch.sub(g, _where_positive(g, below, rows[:, 1]), out=rows[:, 0])
        torch.sub(rows, _where_positive(rows, right, pairs[:, :, :, 1]), out=pairs[:, :, :, 0])
        g = pairs.view(places)
    else:
        g = _places(g, cut)
        bias = g.view(-1, cut.outside).sum(0)
    g = g.view(4, 4, cut.tall, -1)
    lines, made = _room("lines", 4, 6, cut.tall, g.shape[3]), _room("results", 6, 6, cut.tall, g.shape[3])
    _along(_BACK_T, g.transpose(1, 2), lines.transpose(1, 2))
    _along(_BACK_T, lines.permute(1, 2, 0, 3), made.permute(1, 2, 0, 3))
    return made, bias


def _where_positive(g: Tensor, x: Tensor, out: Tensor) -> Tensor:
    made: Tensor = torch.ops.aten.threshold_backward.grad_input(g, x, 0, grad_input=out)
    return made


def _sides(cut: Cut) -> tuple[int, int, int]:
    return (2, cut.height // 2, cut.width // 2) if cut.pool else (4, cut.height, cut.width)


def _picture(y: Tensor, cut: Cut) -> Tensor:
    """Pictures of numbers that lie by their places in a square."""
    side, height, width = _sides(cut)
    whole = y.new_empty(cut.pictures, cut.tall, side, cut.wide, side, cut.outside)
    whole.copy_(y.permute(4, 2, 0, 3, 1, 5))
    whole = whole.view(cut.pictures, cut.tall * side, cut.wide * side, cut.outside)[:, :height, :width]
    return whole.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)


def _places(g: Tensor, cut: Cut) -> Tensor:
    """The way back: zeros where squares stick out."""
    side, height, width = _sides(cut)
    g = g.permute(0, 2, 3, 1)
    if (height, width) != (cut.tall * side, cut.wide * side):
        g = F.pad(g, (0, 0, 0, cut.wide * side - width, 0, cut.tall * side - height))
    made = _room("places", side, side, cut.tall, cut.wide, cut.pictures, cut.outside)
    g = g.unflatten(2, (cut.wide, side)).unflatten(1, (cut.tall, side))
    return made.copy_(g.permute(2, 4, 1, 3, 0, 5))


def weights_of(weight: Tensor) -> Tensor:
    """Transformed weights: places, then channels outside and inside as they come."""
    made = weight.new_empty(36, *weight.shape[:2])
    _along(_WEIGHTS, weight.permute(2, 3, 0, 1).reshape(9, -1), made.view(36, -1))
    return made


def of_weights(g: Tensor, weight: Tensor) -> Tensor:
    """The gradient of weights from those of transformed weights, the other way round, that are to be added up."""
    many, outside, inside = g.shape[1], *weight.shape[:2]
    found = _room("weights", 9, many * inside * outside)
    _along(_WEIGHTS_T, g.view(36, -1), found)
    made = found.view(9, many, inside * outside).sum(1).view(3, 3, inside, outside)
    return torch.empty_like(weight).copy_(made.permute(3, 2, 0, 1))


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> tuple[Tensor, list[Tensor]]:
    """The result, and what the way back needs."""
    with np.errstate(all="ignore"):  # what has diverged is seen elsewhere
        v = squares_of(x, cut)
        m = _room("results", *cut.matrices, cut.outside)
        _products(v.view(*cut.matrices, -1), weights_of(weight.transpose(0, 1))[:, None], m)
        made, kept = result_of(m, bias, cut)
    return made, [v, *kept]


def backward(
    g: Tensor, weight: Tensor, cut: Cut, kept: list[Tensor], wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of pictures, weights and bias, those that are wanted."""
    (v, *more), (to_x, to_weight, to_bias) = kept, wanted
    dx = dw = None
    with np.errstate(all="ignore"):
        m, bias = of_result(g, cut, more)
        m = m.view(*cut.matrices, -1)
        if to_weight:
            found = _room("found", 36, cut.matrices[1], cut.inside, cut.outside)
            _products(v.view(*cut.matrices, -1).transpose(2, 3), m, found)
            dw = of_weights(found, weight)
        if to_x:
            dv = _room("squares", *cut.matrices, cut.inside)
            _products(m, weights_of(weight)[:, None], dv)
            dx = pictures_of(dv.view(6, 6, cut.tall, cut.wide, -1), cut)
    return dx, dw, bias if to_bias else None


def _products(a: Tensor, b: Tensor, out: Tensor) -> None:
    np.matmul(a.numpy(), b.numpy(), out=out.numpy())


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
        made, kept = forward(x.detach(), weight.detach(), None if bias is None else bias.detach(), cut)
        # x as well, though its squares are there: as with PyTorch's own, nobody may change it in place meanwhile.
        ctx.save_for_backward(x, weight, bias, *kept)
        ctx.cut = cut
        return made

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, bias, *kept), cut = ctx.saved_tensors, ctx.cut
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or not is_plain(g):  # for second derivatives, which are PyTorch's own
            with torch.enable_grad():
                made = plain(x, weight, bias, (cut.above, cut.beside), cut.pool)
            inputs = [t for t, want in zip((x, weight, bias), wanted, strict=True) if want]
            found = iter(torch.autograd.grad(made, inputs, g, create_graph=torch.is_grad_enabled()))
            return *(next(found) if want else None for want in wanted), None
        return *backward(g, weight, cut, kept, wanted), None


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is one that NumPy can read, and nobody wants to see or change what PyTorch does with it."""
    seen = torch._C._len_torch_function_stack() > 0 or torch._C._len_torch_dispatch_stack() > 0
    return not seen and _is_plain(x) and not x.is_neg()


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], pool: bool) -> Tensor:
    """The same in PyTorch's own parts."""
    y = F.conv2d(x, weight, bias, padding=padding)
    return F.max_pool2d(y, 2).relu() if pool else y


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], pool: bool) -> Tensor:
    """A 3x3 convolution of plain tensors; with ``pool``, 2x2 maxima of it, cut off at zero."""
    n, inside, rows, columns = x.shape
    one = Cut(1, inside, len(weight), rows, columns, *padding, pool)
    most = max(1, NUMBERS // (36 * one.tall * one.wide * (inside + len(weight))))
    made = []
    for some in x.split(-(-n // -(-n // most))):
        cut = Cut(len(some), inside, len(weight), rows, columns, *padding, pool)
        if torch.is_grad_enabled():
            made.append(_Convolution.apply(some, weight, bias, cut))
        else:
            made.append(forward(some.detach(), weight.detach(), None if bias is None else bias.detach(), cut)[0])
    return made[0] if len(made) == 1 else torch.cat(made)


class Convolution(nn.Conv2d):
    """``nn.Conv2d`` that does it this way where that is faster."""

    pool = False  # whether the maximum over squares of two by two, and the ReLU behind it, have become parts of it

    @classmethod
    def of(cls, layer: nn.Conv2d) -> Convolution:
        """The same convolution, with the same parameters, and with what stands behind it in one place."""
        made = cls.__new__(cls)
        made.__dict__ = {**vars(layer), "pool": True}
        return made

    def forward(self, input: Tensor) -> Tensor:
        if is_plain(input) and is_plain(self.weight) and self._pays(input):
            return convolution(input, self.weight, self.bias, self.padding, self.pool)  # type: ignore[arg-type]
        return self.behind(super().forward(input))

    def behind(self, y: Tensor) -> Tensor:
        """What stood behind the convolution, in PyTorch's own parts."""
        return F.max_pool2d(y, 2).relu_() if self.pool else y

    def _pays(self, x: Tensor) -> bool:
        return x.dim() == 4 and len(x) > 0 and x.shape[1] == self.in_channels and pays(self, x)


def fits(layer: nn.Conv2d) -> bool:
    """Whether a layer is a convolution of this kind."""
    same = (layer.kernel_size, layer.stride, layer.dilation) == ((3, 3), (1, 1), (1, 1))
    return same and layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def pays(layer: nn.Conv2d, x: Tensor) -> bool:
    """Whether it is faster than PyTorch's own, by what was measured."""
    return min(layer.in_channels, layer.out_channels) >= 16
