"""3x3 convolutions on a processor with a quarter of the multiplications: Winograd's minimal filtering, F(4x4, 3x3).

They are written in C (``winograd.c``), which says how it is done, and need a C compiler and a processor with AVX-512.
The numbers are those of the definition to rounding, in norm 1e-6 (of 32 channels) to 4e-6 (of 512) away from float64,
where PyTorch's own are 2e-7 to 8e-7. So where all that a number is made of is exactly zero, it may be 1e-8 instead if
there is something else in its square of pixels; with a bias of exactly zero, a ReLU behind it then has the other one of
its two derivatives there.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input, conv2d_weight

from isofed.functional import native

_LANES, _TILES = 16, 24  # of winograd.c: channels, and squares, that are done at once
_PICTURES = ("pictures", "inside", "outside", "rows", "columns", "above", "beside")
_RESULTS = ("height", "width", "tall", "wide", "pool")


def available() -> bool:
    """Whether this machine can do it; ``ISOFED_FUSED=0`` says that it shall not."""
    return native.allowed() and native.wide() and _functions() is not None


class _Shape(ctypes.Structure):
    """As winograd.c has it."""

    _fields_ = [(name, ctypes.c_long) for name in _PICTURES + _RESULTS]


@cache
def _functions() -> Any:
    """What winograd.c has, or nothing where it cannot be compiled."""
    found = native.library(Path(__file__).with_suffix(".c"))
    if found is not None:
        shape, place = ctypes.POINTER(_Shape), ctypes.c_void_p
        found.isofed_room.argtypes, found.isofed_room.restype = [shape], ctypes.c_long
        found.isofed_forward.argtypes = [shape, *[place] * 6]
        found.isofed_backward.argtypes = [shape, *[place] * 8]
        found.isofed_forward.restype = found.isofed_backward.restype = None
    return found


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
        if all(native.reads(t) for t in (input, self.weight, self.bias) if t is not None) and self._pays(input):
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
        right = x.dim() == 4 and x.shape[1] == self.in_channels and self.weight.shape == size and fits(self)
        right = right and (self.bias is None or self.bias.shape == (self.out_channels,))
        # PyTorch's own would share the work among threads, and wants channels that lie otherwise as they are.
        return right and x.stride(1) == 1 and torch.get_num_threads() == 1 and Cut.of(self, x).pays


def fits(layer: nn.Conv2d) -> bool:
    """Whether a layer is a convolution of this kind."""
    same = (layer.kernel_size, layer.stride, layer.dilation) == ((3, 3), (1, 1), (1, 1))
    padded = not isinstance(layer.padding, str) and min(layer.padding) >= 0
    return same and layer.groups == 1 and layer.padding_mode == "zeros" and padded


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

    @property
    def given(self) -> tuple[int, int, int, int]:
        """The shape of the pictures."""
        return self.pictures, self.inside, self.rows, self.columns

    @property
    def filters(self) -> tuple[int, int, int, int]:
        """The shape of the weights."""
        return self.outside, self.inside, 3, 3

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
    def shape(self) -> _Shape:
        """All of this, for C."""
        given = self.pictures, self.inside, self.outside, self.rows, self.columns, self.above, self.beside
        each = 2 if self.pool else 1
        return _Shape(*given, self.height // each, self.width // each, self.tall, self.wide, self.pool)

    @property
    def pays(self) -> bool:
        """Whether PyTorch's own takes longer, as measured on an AMD EPYC and an Intel Xeon (``benchmarks/squares.py``).

        A square is work for 36 numbers of each two channels, also where it sticks out; and weights, which are
        transformed once, are as much work as a square for each 128 pairs of channels.
        """
        if min(self.height, self.width) < 2 or self.inside % _LANES or self.outside % _LANES:
            return False
        squares = -(-self.pictures * self.tall * self.wide // _TILES) * _TILES
        work = squares + self.inside * self.outside / 128
        return self.pictures * self.height * self.width >= 3.6 * work > 0


class _Room(threading.local):
    """Memory for what is needed only for a moment, kept: the system has to clear what is new."""

    here = torch.empty(0, dtype=torch.float32)

    def __call__(self, cut: Cut) -> int:
        size = _functions().isofed_room(cut.shape)
        if len(self.here) < size:
            self.here = torch.empty(size, dtype=torch.float32)
        return self.here.data_ptr()


_room = _Room()


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> tuple[Tensor, Tensor | None]:
    """The result, and of maxima which they were."""
    x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    bias = None if bias is None else bias.contiguous()
    size = (cut.pictures, cut.outside, cut.shape.height, cut.shape.width)
    y = torch.empty(size, dtype=torch.float32, memory_format=torch.channels_last)
    which = torch.empty(size, dtype=torch.uint8, memory_format=torch.channels_last) if cut.pool else None
    places = (None if t is None else t.data_ptr() for t in (x, weight, bias, y, which))
    _functions().isofed_forward(cut.shape, *places, _room(cut))
    return y, which


def _backward(
    g: Tensor, x: Tensor | None, weight: Tensor | None, which: Tensor | None, cut: Cut, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Gradients of pictures and of weights, where they are wanted, and of the bias."""
    *given, which = (
        None if t is None else t.contiguous(memory_format=torch.channels_last) for t in (x, weight, g, which)
    )
    dx, dweight = (
        torch.empty(size, dtype=torch.float32, memory_format=torch.channels_last) if want else None
        for size, want in zip((cut.given, cut.filters), wanted, strict=False)
    )
    dbias = torch.empty(cut.outside, dtype=torch.float32)
    places = (None if t is None else t.data_ptr() for t in (*given, which, dx, dweight, dbias))
    _functions().isofed_backward(cut.shape, *places, _room(cut))
    return dx, dweight, dbias


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
        made, which = _forward(x, weight, bias, cut)
        to_x, to_weight, _, _ = ctx.needs_input_grad
        # As with PyTorch's own, nobody may change in place what a derivative needs, and everybody what none does.
        ctx.save_for_backward(
            x if to_weight or cut.pool else None,
            weight if to_x or cut.pool else None,
            which,
        )
        ctx.cut, ctx.bias = cut, None if bias is None or not cut.pool else bias.detach().clone()
        return made

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, which), cut, wanted = ctx.saved_tensors, ctx.cut, ctx.needs_input_grad
        if torch.is_grad_enabled() or not (native.reads(g) and _is_as_saved(x, weight, which, cut)):
            return *_backward_by_pytorch(g, (x, weight, ctx.bias), cut, wanted), None
        dx, dweight, dbias = _backward(g, x, weight, which, cut, wanted)
        return dx, dweight, dbias if wanted[2] else None, None


def _is_as_saved(x: Tensor | None, weight: Tensor | None, which: Tensor | None, cut: Cut) -> bool:
    """Whether C can read what was kept: in its place may be a tensor of a hook, or of ``parameter.data = ...``."""
    for kept, size in ((x, cut.given), (weight, cut.filters)):
        if kept is not None and not (native.reads(kept) and kept.shape == size):
            return False
    return which is None or (which.dtype == torch.uint8 and which.device.type == "cpu")


def _backward_by_pytorch(
    g: Tensor, given: tuple[Tensor, Tensor, Tensor | None], cut: Cut, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The same gradients in PyTorch's own operations, which can be differentiated again."""
    (x, weight, bias), padding, again = given, (cut.above, cut.beside), torch.is_grad_enabled()
    if cut.pool:
        with torch.enable_grad():
            x, weight = x.view_as(x), weight.view_as(weight)  # one may have been made of the other
            bias = None if bias is None else bias.detach().requires_grad_()  # what is found does not depend on it
            y = F.max_pool2d(F.conv2d(x, weight, bias, padding=padding), 2).relu()
            inputs = [t for t, want in zip((x, weight, bias), wanted, strict=False) if want and t is not None]
            found = iter(torch.autograd.grad(y, inputs, g, create_graph=again))
        return [next(found) if want else None for want in wanted[:3]]
    to_x, to_weight, to_bias, _ = wanted
    return [
        conv2d_input(cut.given, weight, g, padding=padding) if to_x else None,
        conv2d_weight(x, cut.filters, g, padding=padding) if to_weight else None,
        g.sum((0, 2, 3)) if to_bias else None,
    ]


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], pool: bool) -> Tensor:
    """A 3x3 convolution of plain tensors; with ``pool``, the largest of two by two numbers of it, cut off at zero."""
    (n, inside, rows, columns), outside = x.shape, len(weight)
    cut = Cut(n, inside, outside, rows, columns, *padding, pool)
    if not torch.is_grad_enabled():
        return _forward(x, weight, bias, cut)[0]
    made: Tensor = _Convolution.apply(x, weight, bias, cut)
    return made
