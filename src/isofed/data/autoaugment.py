"""AutoAugment's policy for CIFAR-10, ``autoaugment``: one of 25 pairs of operations for each picture.

Which pair, whether each of its two operations is made, and how strongly, is drawn on the host. On the device there is
no branch: every picture goes through the same few steps, with settings that leave it alone where it has another
operation. All geometry is one gather. Then, twice, a table of 256 levels for each picture and channel stands for
all operations on single levels, and one blend for colour and sharpness.

Geometry can be made first although the policy has a pair that ends with it, because that pair begins with colour,
which moves no pixel and leaves a grey fill as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isofed.data.augment_base import Augmentation, Draws, Shape, need_bytes, need_grey_or_colour, need_level
from isofed.data.augment_colour import blend, grey_levels, mean_level, per_picture, smooth
from isofed.data.augment_geometry import fixed_point, gather_nearest, rotation_matrix

Array = npt.NDArray[Any]

# name, probability, level from 0 to 9; Cubuk et al. 2019, AutoAugment: Learning Augmentation Strategies from Data.
POLICY = (
    (("invert", 0.1, 7), ("contrast", 0.2, 6)),
    (("rotate", 0.7, 2), ("translate_x", 0.3, 9)),
    (("sharpness", 0.8, 1), ("sharpness", 0.9, 3)),
    (("shear_y", 0.5, 8), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.5, 8), ("equalize", 0.9, 2)),
    (("shear_y", 0.2, 7), ("posterize", 0.3, 7)),
    (("colour", 0.4, 3), ("brightness", 0.6, 7)),
    (("sharpness", 0.3, 9), ("brightness", 0.7, 9)),
    (("equalize", 0.6, 5), ("equalize", 0.5, 1)),
    (("contrast", 0.6, 7), ("sharpness", 0.6, 5)),
    (("colour", 0.7, 7), ("translate_x", 0.5, 8)),
    (("equalize", 0.3, 7), ("autocontrast", 0.4, 8)),
    (("translate_y", 0.4, 3), ("sharpness", 0.2, 6)),
    (("brightness", 0.9, 6), ("colour", 0.2, 8)),
    (("solarize", 0.5, 2), ("invert", 0.0, 3)),
    (("equalize", 0.2, 0), ("autocontrast", 0.6, 0)),
    (("equalize", 0.2, 8), ("equalize", 0.6, 4)),
    (("colour", 0.9, 9), ("equalize", 0.6, 6)),
    (("autocontrast", 0.8, 4), ("solarize", 0.2, 8)),
    (("brightness", 0.1, 3), ("colour", 0.7, 0)),
    (("solarize", 0.4, 5), ("autocontrast", 0.9, 3)),
    (("translate_y", 0.9, 9), ("translate_y", 0.7, 9)),
    (("autocontrast", 0.9, 2), ("solarize", 0.8, 3)),
    (("equalize", 0.8, 8), ("invert", 0.1, 3)),
    (("translate_y", 0.7, 9), ("autocontrast", 0.9, 1)),
)

OPERATIONS = (
    *("nothing", "shear_x", "shear_y", "translate_x", "translate_y", "rotate"),
    *("brightness", "contrast", "colour", "sharpness"),
    *("posterize", "solarize", "invert", "autocontrast", "equalize"),
)
_NUMBER = {name: number for number, name in enumerate(OPERATIONS)}
_BLENDS = ("brightness", "contrast", "colour", "sharpness")
_LARGEST = {"shear_x": 0.3, "shear_y": 0.3, "translate_x": 150 / 331, "translate_y": 150 / 331, "rotate": 30.0}
_LARGEST |= dict.fromkeys(_BLENDS, 0.9)


@dataclass(frozen=True)
class AutoAugment(Augmentation):
    """The CIFAR-10 policy; ``form`` says how a level becomes an amount.

    ``torchvision``: level by level from no change to the largest, in a direction drawn for each picture.
    ``feddecorr``: drawn evenly from a tenth of the range between the largest changes in both directions, as the level
    says. (FedDecorr's code also interpolates with cubic splines, which is not done here.)
    """

    form: Literal["torchvision", "feddecorr"] = "torchvision"
    fill: int = 0  # the level of what comes into sight

    def __post_init__(self) -> None:
        need_level(self.fill, "autoaugment")

    def draw(self, steps: int, batch: int, rng: np.random.Generator, shape: Shape) -> Draws:
        need_grey_or_colour(shape, "autoaugment")
        kinds = np.array([[_NUMBER[name] for name, _, _ in pair] for pair in POLICY], dtype=np.uint8)
        chances = np.array([[chance for _, chance, _ in pair] for pair in POLICY])
        levels = np.array([[level for _, _, level in pair] for pair in POLICY])
        pair = rng.integers(0, len(POLICY), (steps, batch))
        made = rng.random((steps, batch, 2)) < chances[pair]
        kind = np.where(made, kinds[pair], 0).astype(np.uint8)
        if self.form == "torchvision":
            amount = _stepped(kind, levels[pair], rng.integers(0, 2, (steps, batch, 2)) * 2 - 1)
        else:
            amount = _within_tenths(kind, levels[pair] + rng.random((steps, batch, 2)))
        return {
            "augment.auto.kind": kind,
            "augment.auto.amount": amount.astype(np.float32),
            "augment.auto.matrix": fixed_point(_matrices(kind, amount, shape, self.form)),
        }

    def apply(self, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        need_bytes(images, "autoaugment")
        images = gather_nearest(images, draws["augment.auto.matrix"].unbind(1), self.fill)
        levels = images.float()
        settings = _Settings.of(draws["augment.auto.kind"], draws["augment.auto.amount"])
        for place in range(2):
            levels = _operate(levels, _Settings(*(values[:, place] for values in settings)))
        return levels.to(torch.uint8)


def _stepped(kind: Array, level: Array, sign: Array) -> Array:
    """What the operations are made with: a share of the picture, degrees, a factor, a threshold.

    For posterize it is how far apart the levels are that remain, a power of two.
    """
    amount = np.zeros(kind.shape)
    for name, largest in _LARGEST.items():
        chosen = kind == _NUMBER[name]
        amount[chosen] = (int(name in _BLENDS) + sign * level * largest / 9)[chosen]
    chosen = kind == _NUMBER["posterize"]
    amount[chosen] = 2 ** np.rint(level[chosen] * 4 / 9)
    chosen = kind == _NUMBER["solarize"]
    amount[chosen] = 255 - level[chosen] * 255 / 9
    return amount


def _within_tenths(kind: Array, level: Array) -> Array:
    """The same, where levels are not whole and run from 0 for the largest change one way to 10 for the other."""
    amount = np.zeros(kind.shape)
    for name, largest in _LARGEST.items():
        chosen = kind == _NUMBER[name]
        amount[chosen] = int(name in _BLENDS) + largest * (level[chosen] / 5 - 1)
    chosen = kind == _NUMBER["posterize"]
    amount[chosen] = 2 ** (8 - np.rint(4 + level[chosen] * 0.4))
    chosen = kind == _NUMBER["solarize"]
    amount[chosen] = level[chosen] * 25.6
    return amount


def _matrices(kind: Array, amount: Array, shape: Shape, form: str) -> Array:
    """From where pixels come, [..., 6]: x' = a x + b y + c and y' = d x + e y + f."""
    _, height, width = shape
    matrix = np.zeros((*kind.shape, 6))
    matrix[..., (0, 4)] = 1.0
    theirs = form == "feddecorr"
    # FedDecorr's code turns and shears about a point one pixel below and to the right of the centre, has the names of
    # the two shears exchanged, turns and moves the other way, and moves by parts of a pixel.
    x, y = (width / 2 + 1, height / 2 + 1) if theirs else (0.0, 0.0)
    for name in ("shear_x", "shear_y"):
        chosen = kind == _NUMBER[name]
        if (name == "shear_x") != theirs:
            matrix[chosen, 1], matrix[chosen, 2] = amount[chosen], -amount[chosen] * y
        else:
            matrix[chosen, 3], matrix[chosen, 5] = amount[chosen], -amount[chosen] * x
    for name, place, size in (("translate_x", 2, width), ("translate_y", 5, height)):
        chosen = kind == _NUMBER[name]
        matrix[chosen, place] = amount[chosen] * size if theirs else -np.trunc(amount[chosen] * size)
    chosen = kind == _NUMBER["rotate"]
    if theirs:
        matrix[chosen] = rotation_matrix(-amount[chosen], x, y)
    else:
        matrix[chosen] = rotation_matrix(amount[chosen], width / 2, height / 2)
    return matrix


class _Settings(NamedTuple):
    """What makes each operation a part of the same computation, [B, 2] or [B]; most leave a picture alone."""

    contrast: Tensor  # whether the blend of the table starts from the mean, not from black
    factor: Tensor  # of that blend
    threshold: Tensor  # from which on levels are inverted
    apart: Tensor  # the distance of levels that remain
    autocontrast: Tensor  # whether
    equalize: Tensor  # whether
    colour: Tensor  # whether the blend of the picture starts from grey, not from the smoothed picture
    strength: Tensor  # of that blend

    @classmethod
    def of(cls, kind: Tensor, amount: Tensor) -> _Settings:
        is_a = {name: kind == _NUMBER[name] for name in OPERATIONS[_NUMBER["brightness"] :]}
        return cls(
            contrast=is_a["contrast"],
            factor=torch.where(is_a["brightness"] | is_a["contrast"], amount, 1.0),
            threshold=torch.where(is_a["solarize"], amount, 256.0 * ~is_a["invert"]),
            apart=torch.where(is_a["posterize"], amount, 1.0),
            autocontrast=is_a["autocontrast"],
            equalize=is_a["equalize"],
            colour=is_a["colour"],
            strength=torch.where(is_a["colour"] | is_a["sharpness"], amount, 1.0),
        )


def _operate(levels: Tensor, to: _Settings) -> Tensor:
    """One operation a picture, of those that move no pixel."""
    batch, channels = len(levels), levels.shape[-1]
    grey = grey_levels(levels)
    # Where a level of a channel of a picture stands in a row of all tables.
    offset = torch.arange(batch * channels, device=levels.device).view(batch, 1, 1, channels) * 256
    place = levels.long().add_(offset).view(-1)
    counts = torch.zeros(batch * channels * 256, dtype=torch.int32, device=levels.device)
    counts.scatter_add_(0, place, torch.ones((), dtype=torch.int32, device=levels.device).expand_as(place))
    table = _tables(counts.view(batch, channels, 256), mean_level(grey).view(batch, 1, 1), to)
    changed = table.view(-1).index_select(0, place).view(levels.shape)
    base = torch.where(per_picture(to.colour), grey, smooth(levels))
    return blend(base, changed, per_picture(to.strength))


def _tables(counts: Tensor, mean: Tensor, to: _Settings) -> Tensor:
    """What becomes of each level, [B, C, 256], given how often the picture has it."""
    to = _Settings(*(values[:, None, None] for values in to))
    old = torch.arange(256, device=counts.device, dtype=torch.float32)
    new = blend(mean * to.contrast, old, to.factor)
    new = torch.where(new < to.threshold, new, 255 - new)
    new = (new / to.apart).floor_() * to.apart  # a power of two, so exact

    up_to = counts.cumsum(-1, dtype=torch.int32)
    below_highest = up_to < up_to[..., -1:]
    lowest = (up_to == 0).sum(-1, keepdim=True)
    highest = below_highest.sum(-1, keepdim=True)
    # Python computes this in float64 and in this order; whole numbers would round some levels the other way.
    scale = torch.full_like(lowest, 255.0, dtype=torch.float64) / (highest - lowest)  # 255 / tensor would round twice
    stretched = (old * scale + -lowest * scale).clamp_(0, 255).floor_().float()
    new = torch.where(to.autocontrast & (highest > lowest), stretched, new)

    step = (up_to * below_highest).amax(-1, keepdim=True) // 255
    spread = ((step // 2 + up_to - counts) // step.clamp(min=1)).clamp_(max=255).float()
    return torch.where(to.equalize & (step > 0), spread, new)
