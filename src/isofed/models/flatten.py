"""Flattening that keeps what is before it fast on a processor."""

from __future__ import annotations

from torch import Tensor, nn

from isofed.models.tiles import in_rows, rows_of


class Flatten(nn.Flatten):
    """``nn.Flatten`` whose gradient lies in memory as its input does.

    PyTorch hands a gradient back in the order of the axes; where pictures lie channels-last, the layers before this
    one, a maximum over squares above all, then take several times as long on a processor. The numbers are the same.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and not x.is_cuda and type(x) is Tensor and x.dim() == 4 and in_rows(x):
            x.register_hook(rows_of)
        return super().forward(x)
