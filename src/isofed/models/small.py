"""Two networks for small pictures: what the demo, the tests and a first try use."""

from __future__ import annotations

from torch import nn

from isofed.errors import UserError
from isofed.models.base import Network, norm_layer


def cnn(shape: tuple[int, int, int], classes: int, norm: str = "batch") -> Network:
    """Three 3x3 convolutions (16, 32, 64 channels, the last two with stride 2), average pool, linear head.

    24,000 parameters on grey pictures with ten classes; any picture of at least 4x4 pixels.
    """
    make_norm = norm_layer(norm)

    def stage(inside: int, outside: int, stride: int) -> nn.Module:
        convolution = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=norm == "none")
        return nn.Sequential(convolution, make_norm(outside), nn.ReLU())

    stages = {"stage1": stage(shape[0], 16, 1), "stage2": stage(16, 32, 2), "stage3": stage(32, 64, 2)}
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Network(stages, pool, nn.Linear(64, classes), width=64)


def mlp(shape: tuple[int, int, int], classes: int, norm: str = "none") -> Network:
    """Two hidden layers of 64 units on the flattened picture; no normalisation."""
    if norm != "none":
        raise UserError(f"the mlp has no normalisation, so norm={norm} is not possible; use norm=none or model=cnn")
    inputs = shape[0] * shape[1] * shape[2]
    stages = {
        "stage1": nn.Sequential(nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU()),
        "stage2": nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
    }
    return Network(stages, nn.Flatten(), nn.Linear(64, classes), width=64)
