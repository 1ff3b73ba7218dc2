"""Plain convolutional networks of the papers: FedUV's, MOON's, FedBN's, SphereFed's, and pfl-research's benchmark."""

from __future__ import annotations

from torch import nn

from isofed.errors import UserError
from isofed.models.base import Network, norm_layer, vector_norm
from isofed.models.dropout import Dropout
from isofed.models.flatten import Flatten
from isofed.models.resnet import Shape, average_pool, projection_head, projector


def _at_least(name: str, side: int, shape: Shape) -> None:
    if min(shape[1:]) < side:
        raise UserError(f"{name} needs pictures of at least {side}x{side} pixels, not {shape[1]}x{shape[2]}")


def feduv_cnn(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """FedUV's small CNN: eight convolutions without padding, 16, 32 and 64 channels, and a projector of 256."""
    _at_least("feduv-cnn", 21, shape)

    def layer(inside: int, outside: int, size: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, size, stride, bias=False), norm_layer(norm)(outside), nn.ReLU()]

    stages = {
        "stage1": nn.Sequential(*layer(shape[0], 16, 3, 1), *layer(16, 16, 1, 1)),
        "stage2": nn.Sequential(*layer(16, 32, 3, 2), *layer(32, 32, 3, 1), *layer(32, 32, 1, 1)),
        "stage3": nn.Sequential(*layer(32, 64, 3, 2), *layer(64, 64, 3, 1), *layer(64, 64, 1, 1)),
    }
    return Network(stages, average_pool(), nn.Linear(256, classes), 256, projector=projector(64, 256, norm))


def convnet7(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """Seven layers: pairs of 3x3 convolutions with 32, 64 and 128 channels, each pair pooled, and a linear head."""
    _at_least("convnet7", 8, shape)

    def pair(inside: int, outside: int) -> nn.Module:
        layers: list[nn.Module] = []
        for channels in (inside, outside):
            layers += [nn.Conv2d(channels, outside, 3, padding=1, bias=False), norm_layer(norm)(outside), nn.ReLU()]
        return nn.Sequential(*layers, nn.MaxPool2d(2))

    stages = {"stage1": pair(shape[0], 32), "stage2": pair(32, 64), "stage3": pair(64, 128)}
    return Network(stages, average_pool(), nn.Linear(128, classes), width=128)


def vgg13(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """VGG13 for small pictures: five pairs of 3x3 convolutions, each pooled, and one linear layer."""
    _at_least("vgg13", 32, shape)
    stages, inside = {}, shape[0]
    for stage, outside in enumerate((64, 128, 256, 512, 512), 1):
        layers: list[nn.Module] = []
        for channels in (inside, outside):
            layers += [nn.Conv2d(channels, outside, 3, padding=1), norm_layer(norm)(outside), nn.ReLU()]
        stages[f"stage{stage}"] = nn.Sequential(*layers, nn.MaxPool2d(2))
        inside = outside
    return Network(stages, average_pool(), nn.Linear(512, classes), width=512)


def alexnet_bn(shape: Shape, classes: int, norm: str = "batch") -> Network:
    """FedBN's AlexNet with batch norm, for pictures of 64 pixels and more; features of 4,096."""
    _at_least("alexnet-bn", 64, shape)

    def layer(inside: int, outside: int, size: int, stride: int = 1, padding: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, size, stride, padding), norm_layer(norm)(outside), nn.ReLU()]

    pool, make = nn.MaxPool2d(3, 2), vector_norm(norm)
    stages = {
        "stage1": nn.Sequential(*layer(shape[0], 64, 11, 4, 2), pool),
        "stage2": nn.Sequential(*layer(64, 192, 5, padding=2), pool),
        "stage3": nn.Sequential(*layer(192, 384, 3), *layer(384, 256, 3), *layer(256, 256, 3), pool),
    }
    dense = [
        *(nn.Linear(256 * 36, 4096), make(4096), nn.ReLU()),
        *(nn.Linear(4096, 4096), make(4096), nn.ReLU()),
    ]
    flat = nn.Sequential(nn.AdaptiveAvgPool2d(6), Flatten(), *dense)
    return Network(stages, flat, nn.Linear(4096, classes), width=4096)


def moon_cnn(shape: Shape, classes: int) -> Network:
    """MOON's for CIFAR-10: two 5x5 convolutions and two linear layers, then its projection head from 84 to 256."""
    _at_least("moon-cnn", 16, shape)
    stages = {
        "stage1": nn.Sequential(nn.Conv2d(shape[0], 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        "stage2": nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
    }
    dense = nn.Sequential(
        *(nn.AdaptiveAvgPool2d(5), Flatten()),  # at 32 pixels there are 5x5 already
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()),
    )
    return Network(stages, dense, nn.Linear(256, classes), 256, projector=projection_head(84))


def pfl_cnn(shape: Shape, classes: int) -> Network:
    """The two convolutions of pfl-research's CIFAR-10 benchmark, with dropout; for pictures of 32 pixels only."""
    if shape[1:] != (32, 32):
        raise UserError(f"pfl-cnn takes pictures of 32x32 pixels, not {shape[1]}x{shape[2]}")
    stages = {
        "stage1": nn.Sequential(nn.Conv2d(shape[0], 32, 3), nn.ReLU()),
        "stage2": nn.Sequential(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), Dropout(0.25)),
    }
    dense = nn.Sequential(Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), Dropout(0.5))
    return Network(stages, dense, nn.Linear(128, classes), width=128)
