"""Flattening that keeps what is before it fast on a processor."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Flatten(nn.Flatten):
    """``nn.Flatten`` whose gradient lies in memory as its input does.

    PyTorch hands a gradient back in the order of the axes; where pictures lie channels-last, the layers before this
    one, a maximum over squares above all, then take several times as long on a processor. The numbers are the same.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and not x.is_cuda and type(x) is Tensor and _channels_last(x):
            x.register_hook(_in_rows)
        return super().forward(x)


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _in_rows(gradient: Tensor) -> Tensor:
    return gradient.contiguous(memory_format=torch.channels_last)
