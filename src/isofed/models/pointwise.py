"""1x1 convolutions with a stride, of few channels, on a processor.

oneDNN, which PyTorch leaves them to where channels lie last, finds the gradient of their weights in memory that is too
small for it when there are fewer channels than its registers have numbers: wrong gradients, or the end of the process
(oneDNN issue 6035; seen with PyTorch 2.13). The pixels that such a convolution looks at can be taken out before it,
which is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

LANES = 16  # numbers of the largest registers; with as many channels all is well


class Pointwise(nn.Conv2d):
    """``nn.Conv2d`` that skips pixels before it multiplies, where it is such a one."""

    def forward(self, input: Tensor) -> Tensor:
        if self.padding_mode != "zeros":
            return super().forward(input)
        return convolution(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...] | str,
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """``conv2d`` that does so."""
    if (pixels := seen(x, weight, stride, padding)) is not None:
        return F.conv2d(pixels, weight, bias, groups=groups)
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)


def seen(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int] | str) -> Tensor | None:
    """The pixels that a convolution looks at, if it is such a one."""
    if x.device.type != "cpu" or not fits(weight, stride, padding):
        return None
    every: tuple[Any, ...] = (..., *(slice(None, None, n) for n in stride))
    return x[every]


def fits(weight: Tensor, stride: Sequence[int], padding: Sequence[int] | str) -> bool:
    """Whether a convolution is such a one."""
    few, bare = weight.shape[1] < LANES, padding == "valid" or not any(padding)
    return few and bare and all(n == 1 for n in weight.shape[2:]) and max(stride) > 1
