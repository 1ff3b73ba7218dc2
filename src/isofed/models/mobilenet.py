"""MobileNetV2 for small pictures, as FedDecorr and SphereFed use it."""

from __future__ import annotations

from torch import nn

from isofed.models.base import Network, norm_layer
from isofed.models.residual import Residual
from isofed.models.resnet import Norm, Shape, average_pool, conv

# Expansion, channels, blocks, stride of the first: small pictures are not shrunk in the stem and the second row.
ROWS = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def mobilenetv2(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """Inverted bottlenecks with depthwise convolutions; features of 1,280."""
    make_norm = norm_layer(norm)
    stages: dict[str, nn.Module] = {"stem": nn.Sequential(conv(shape[0], 32, 3), make_norm(32), nn.ReLU())}
    inside = 32
    for row, (expansion, outside, blocks, stride) in enumerate(ROWS, 1):
        made = []
        for block in range(blocks):
            made.append(_block(inside, outside, expansion, stride if block == 0 else 1, make_norm))
            inside = outside
        stages[f"stage{row}"] = nn.Sequential(*made)
    stages["last"] = nn.Sequential(conv(320, 1280, 1), make_norm(1280), nn.ReLU())
    return Network(stages, average_pool(), nn.Linear(1280, classes), width=1280)


def _block(inside: int, outside: int, expansion: int, stride: int, make_norm: Norm) -> nn.Module:
    planes = expansion * inside
    depthwise = nn.Conv2d(planes, planes, 3, stride, padding=1, groups=planes, bias=False)
    branch = nn.Sequential(
        *(conv(inside, planes, 1), make_norm(planes), nn.ReLU()),
        *(depthwise, make_norm(planes), nn.ReLU()),
        *(conv(planes, outside, 1), make_norm(outside)),
    )
    if stride > 1:
        return branch
    shortcut = None if inside == outside else nn.Sequential(conv(inside, outside, 1), make_norm(outside))
    return Residual(branch, shortcut, relu=False)
