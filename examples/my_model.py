"""A network of one's own: isofed run model=examples/my_model.py:build"""

from torch import nn

from isofed.models import Network


def build(shape: tuple[int, int, int], classes: int) -> Network:
    """A small network for ``shape`` = (channels, height, width): two named stages, a pooling step, a linear head."""
    stages = {
        "stage1": nn.Sequential(nn.Conv2d(shape[0], 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()),
        "stage2": nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(2, 16), nn.ReLU()),
    }
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Network(stages, pool, nn.Linear(16, classes), width=16)
