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

LANES = 16  # numbers of the largest registers; with as many channels all is well


class Pointwise(nn.Conv2d):
    """``nn.Conv2d`` that skips pixels before it multiplies, where it is such a one."""

    def forward(self, input: Tensor) -> Tensor:
        pixels = None if isinstance(self.padding, str) else seen(input, self.weight, self.stride, self.padding)
        if pixels is None:
            return super().forward(input)
        made: Tensor = nn.functional.conv2d(pixels, self.weight, self.bias, groups=self.groups)
        return made


def seen(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor | None:
    """The pixels that a convolution looks at, if it is such a one."""
    fits = weight.shape[1] < LANES and all(n == 1 for n in weight.shape[2:]) and max(stride) > 1 and not any(padding)
    if not fits or x.device.type != "cpu":
        return None
    every: tuple[Any, ...] = (..., *(slice(None, None, n) for n in stride))
    return x[every]
