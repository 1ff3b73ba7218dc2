"""SENet-18 for small pictures: pre-activation blocks with squeeze and excitation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isofed.models.base import Network, norm_layer
from isofed.models.residual import Residual
from isofed.models.resnet import Norm, Shape, average_pool, conv


class Excite(nn.Module):
    """Scales each channel by what a small network makes of all channels' means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 16, 1), nn.Conv2d(channels // 16, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.up(torch.relu(self.down(means))))


def senet18(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """A 3x3 stem, then four stages of two pre-activation blocks with squeeze and excitation (SphereFed)."""
    make_norm = norm_layer(norm)
    stages: dict[str, nn.Module] = {"stem": nn.Sequential(conv(shape[0], 64, 3), make_norm(64), nn.ReLU())}
    inside = 64
    for stage, outside in enumerate((64, 128, 256, 512), 1):
        blocks = []
        for block in range(2):
            blocks.append(_block(inside, outside, 2 if stage > 1 and block == 0 else 1, make_norm))
            inside = outside
        stages[f"stage{stage}"] = nn.Sequential(*blocks)
    return Network(stages, average_pool(), nn.Linear(512, classes), width=512)


def _block(inside: int, outside: int, stride: int, make_norm: Norm) -> Residual:
    before = nn.Sequential(make_norm(inside), nn.ReLU())
    first = (conv(inside, outside, 3, stride), make_norm(outside), nn.ReLU())
    branch = nn.Sequential(*first, conv(outside, outside, 3), Excite(outside))
    shortcut = None if stride == 1 and inside == outside else conv(inside, outside, 1, stride)
    return Residual(branch, shortcut, before=before, relu=False)
