"""ResNets for small pictures: option-A ResNet-8/20/32/56, and the bottleneck ResNet-56 of FedML and FedAlign."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from isofed.models.base import Network, norm_layer
from isofed.models.residual import PadShortcut, Residual

Shape = tuple[int, int, int]
Norm = Callable[[int], nn.Module]


def resnet8(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """Three stages of one basic block with 16, 32 and 64 channels: small, with all that a method can ask for."""
    return _basic(shape, classes, norm, blocks=1)


def resnet20(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """Three stages of three basic blocks with 16, 32 and 64 channels; shortcuts without weights. 0.27 M parameters."""
    return _basic(shape, classes, norm, blocks=3)


def resnet32(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """As resnet20 with five blocks a stage: 0.46 M parameters."""
    return _basic(shape, classes, norm, blocks=5)


def resnet56_basic(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """As resnet20 with nine blocks a stage: 0.85 M parameters. Not the ResNet-56 of FedAlign, which is resnet56."""
    return _basic(shape, classes, norm, blocks=9)


def resnet56(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """FedML's and FedAlign's: three stages of six bottlenecks, 64, 128 and 256 channels. 0.6 M parameters."""
    make_norm = norm_layer(norm)
    stages: dict[str, nn.Module] = {"stem": _stem(shape[0], 16, make_norm)}
    inside = 16
    for stage, planes in enumerate((16, 32, 64), 1):
        blocks = []
        for block in range(6):
            stride = 2 if stage > 1 and block == 0 else 1
            blocks.append(_bottleneck(inside, planes, stride, make_norm))
            inside = 4 * planes
        stages[f"stage{stage}"] = nn.Sequential(*blocks)
    network = Network(stages, average_pool(), nn.Linear(256, classes), width=256)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return network


def average_pool() -> nn.Module:
    """The mean over all pixels, one number a channel."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())


def conv(inside: int, outside: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the picture's size, but for its stride."""
    return nn.Conv2d(inside, outside, size, stride, padding=size // 2, bias=False)


def _stem(inside: int, outside: int, make_norm: Norm) -> nn.Module:
    return nn.Sequential(conv(inside, outside, 3), make_norm(outside), nn.ReLU())


def _basic(shape: Shape, classes: int, norm: str, blocks: int) -> Network:
    make_norm = norm_layer(norm)
    stages: dict[str, nn.Module] = {"stem": _stem(shape[0], 16, make_norm)}
    inside = 16
    for stage, outside in enumerate((16, 32, 64), 1):
        made = []
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            branch = nn.Sequential(
                *(conv(inside, outside, 3, stride), make_norm(outside), nn.ReLU()),
                *(conv(outside, outside, 3), make_norm(outside)),
            )
            made.append(Residual(branch, None if inside == outside else PadShortcut(stride)))
            inside = outside
        stages[f"stage{stage}"] = nn.Sequential(*made)
    network = Network(stages, average_pool(), nn.Linear(64, classes), width=64)
    for module in network.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight)
    return network


def _bottleneck(inside: int, planes: int, stride: int, make_norm: Norm) -> Residual:
    outside = 4 * planes
    branch = nn.Sequential(
        *(conv(inside, planes, 1), make_norm(planes), nn.ReLU()),
        *(conv(planes, planes, 3, stride), make_norm(planes), nn.ReLU()),
        *(conv(planes, outside, 1), make_norm(outside)),
    )
    same = stride == 1 and inside == outside
    shortcut = None if same else nn.Sequential(conv(inside, outside, 1, stride), make_norm(outside))
    return Residual(branch, shortcut)
