"""Changes of brightness, contrast and saturation, ``jitter:0.4``, and what they are made of.

All of them are blends, ``base + factor * (value - base)``, computed as Pillow does: in float32, each operation rounded
by itself, and the result cut to whole levels. Levels are held as float32 here, in which every sum below is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isofed.data.augment_base import Augmentation, Draws, Shape, need_bytes, need_grey_or_colour
from isofed.errors import UserError

_BRIGHTNESS, _CONTRAST, _SATURATION = range(3)


@dataclass(frozen=True)
class Jitter(Augmentation):
    """Change brightness, contrast and saturation, each by a factor of its own, in an order drawn for each picture."""

    amount: float = 0.4  # factors are drawn evenly from 1 - amount to 1 + amount, and are never negative
    brightness: float | None = None  # an amount of its own
    contrast: float | None = None
    saturation: float | None = None

    def __post_init__(self) -> None:
        for name in ("amount", "brightness", "contrast", "saturation"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 10:
                raise UserError(f"{name} of augmentation 'jitter' must be from 0 to 10, not {value:g}")

    def draw(self, steps: int, batch: int, rng: np.random.Generator, shape: Shape) -> Draws:
        need_grey_or_colour(shape, "jitter")
        own = (self.brightness, self.contrast, self.saturation)
        most = np.array([self.amount if v is None else v for v in own])
        factors = rng.uniform(np.maximum(0, 1 - most), 1 + most, (steps, batch, 3))
        order = rng.permuted(np.broadcast_to(np.arange(3, dtype=np.uint8), (steps, batch, 3)), axis=-1)
        return {
            "augment.jitter.order": order,
            "augment.jitter.factor": np.take_along_axis(factors, order.astype(np.int64), -1).astype(np.float32),
        }

    def apply(self, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        need_bytes(images, "jitter")
        levels = images.float()
        order, factors = draws["augment.jitter.order"], draws["augment.jitter.factor"]
        for place in range(3):
            kind, factor = per_picture(order[:, place]), per_picture(factors[:, place])
            grey = grey_levels(levels)
            base = torch.where(kind == _SATURATION, grey, mean_level(grey) * (kind == _CONTRAST))
            levels = blend(base, levels, factor)
        return levels.to(torch.uint8)


def per_picture(values: Tensor) -> Tensor:
    """Values [B] so that they meet pictures [B, H, W, C]."""
    return values[:, None, None, None]


def blend(base: Tensor, levels: Tensor, factor: Tensor) -> Tensor:
    """From the base (0) through the levels themselves (1) and beyond, as whole levels."""
    return (levels - base).mul_(factor).add_(base).clamp_(0, 255).floor_()


def grey_levels(levels: Tensor) -> Tensor:
    """The grey picture [B, H, W, 1]: ITU-R 601 weights in units of 1/65536, rounded."""
    if levels.shape[-1] == 1:
        return levels
    red, green, blue = levels.unbind(-1)
    total = (red * 19595).add_(green * 38470).add_(blue * 7471).add_(32768)  # below 2**24, so exact
    return total.mul_(1 / 65536).floor_()[..., None]


def mean_level(grey: Tensor) -> Tensor:
    """The mean of each grey picture, rounded to a whole level: [B, 1, 1, 1]."""
    count = grey.shape[1] * grey.shape[2]
    return grey.sum((1, 2, 3), keepdim=True, dtype=torch.float64).div_(count).add_(0.5).floor_().float()


def smooth(levels: Tensor) -> Tensor:
    """Each level's mean with its eight neighbours, itself five times; the pixels on the border stay."""
    height, width = levels.shape[1:3]
    if min(height, width) < 3:
        return levels
    three = levels[:, :-2] + levels[:, 1:-1] + levels[:, 2:]
    total = three[:, :, :-2] + three[:, :, 1:-1] + three[:, :, 2:]
    out = levels.clone()
    inner = out[:, 1:-1, 1:-1]
    # Thirteenths are never a half, so the error of the division cannot change the rounding.
    inner.copy_(total.add_(inner, alpha=4).div_(13).add_(0.5).floor_())
    return out
