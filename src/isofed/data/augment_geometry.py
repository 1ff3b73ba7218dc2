"""Augmentations that turn or enlarge pictures: ``rotation:15``, ``resized_crop``.

The results are Pillow's to the last bit on ``uint8`` pictures. Nearest-neighbour positions are whole numbers in units
of 1/65536 pixel, as they are there, so they do not depend on the device either; interpolation is done in float64 or
in whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isofed.data.augment_base import Augmentation, Draws, Shape, need_level
from isofed.errors import UserError

Array = npt.NDArray[Any]

_BITS = 22  # of the weights in Pillow's resize


@dataclass(frozen=True)
class Rotation(Augmentation):
    """Turn by an angle drawn evenly from -degrees to degrees, about the picture's centre."""

    degrees: float = 15.0
    interpolation: Literal["nearest", "bilinear"] = "nearest"
    fill: int = 0  # the level of what comes into sight

    def __post_init__(self) -> None:
        if not 0 < self.degrees <= 180:
            raise UserError(f"degrees of augmentation 'rotation' must be above 0 and at most 180, not {self.degrees:g}")
        need_level(self.fill, "rotation")

    def draw(self, steps: int, batch: int, rng: np.random.Generator, shape: Shape) -> Draws:
        angles = rng.uniform(-self.degrees, self.degrees, (steps, batch))
        matrix = rotation_matrix(angles, shape[2] / 2, shape[1] / 2)
        return {"augment.rotation": fixed_point(matrix) if self.interpolation == "nearest" else matrix}

    def apply(self, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        matrix = draws["augment.rotation"]
        if self.interpolation == "nearest":
            return gather_nearest(images, (matrix,), self.fill)
        return _gather_bilinear(images, matrix, self.fill)


@dataclass(frozen=True)
class ResizedCrop(Augmentation):
    """Cut out a part of random area and shape and enlarge it to the size of the picture."""

    scale: float = 0.08  # the smallest share of the area; the largest is all of it
    ratio: float = 4 / 3  # the widest part's width by its height; the narrowest has one by this

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise UserError(f"scale of augmentation 'resized_crop' must be above 0 and at most 1, not {self.scale:g}")
        if not 1 <= self.ratio < math.inf:
            raise UserError(f"ratio of augmentation 'resized_crop' must be at least 1, not {self.ratio:g}")

    def draw(self, steps: int, batch: int, rng: np.random.Generator, shape: Shape) -> Draws:
        _, height, width = shape
        tries, widest = 10, math.log(self.ratio)
        area = height * width * rng.uniform(self.scale, 1, (steps, batch, tries))
        aspect = np.exp(rng.uniform(-widest, widest, (steps, batch, tries)))
        w, h = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        first = fits.argmax(-1)[..., None]
        found = fits.any(-1)
        w, h = (np.take_along_axis(v, first, -1)[..., 0].astype(np.int64) for v in (w, h))
        # If no try fits, the largest allowed part about the centre.
        last_w = min(width, round(height * self.ratio))
        last_h = min(height, round(width * self.ratio))
        w, h = np.where(found, w, last_w), np.where(found, h, last_h)
        top = np.where(found, rng.integers(0, height - h + 1), (height - last_h) // 2)
        left = np.where(found, rng.integers(0, width - w + 1), (width - last_w) // 2)
        return {"augment.resized_crop": np.stack((top, left, h, w), -1).astype(np.int16)}

    def apply(self, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        batch, height, width, channels = images.shape
        top, left, h, w = draws["augment.resized_crop"].long().unbind(1)
        column, column_weights = _two_taps(left, w, width)
        row, row_weights = _two_taps(top, h, height)
        # Pillow's order: along the rows of pixels first, rounded to levels, then along the columns.
        start = torch.arange(batch * height, device=images.device).view(batch, height, 1) * width
        pixels = images.reshape(-1, channels)
        one, two = (pixels.index_select(0, (start + c[:, None, :]).view(-1)).view(images.shape) for c in column)
        wide = _weighted(one, two, [k[:, None, :, None] for k in column_weights])
        start = torch.arange(batch, device=images.device)[:, None] * height
        lines = wide.reshape(batch * height, width * channels)
        one, two = (lines.index_select(0, (start + r).view(-1)).view(images.shape) for r in row)
        return _weighted(one, two, [k[:, :, None, None] for k in row_weights])


def rotation_matrix(degrees: Array, x: float, y: float) -> Array:
    """The six numbers a pixel's source is found with, for turns counter-clockwise about a point: [..., 6]."""
    angle = -np.deg2rad(degrees)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack((cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y), -1)


def fixed_point(matrix: Array) -> npt.NDArray[np.int32]:
    """A matrix [..., 6] in units of 1/65536, moved so that whole numbers stand for the centres of pixels."""
    a, b, c, d, e, f = np.moveaxis(matrix, -1, 0)
    moved = np.stack((a, b, c + 0.5 * a + 0.5 * b, d, e, f + 0.5 * d + 0.5 * e), -1)
    return np.floor(moved * 65536.0 + 0.5).astype(np.int32)


def gather_nearest(images: Tensor, matrices: Sequence[Tensor], fill: int) -> Tensor:
    """Take each pixel from where these fixed-point matrices [B, 6], made one after the other, say it comes from.

    Several matrices cost one gather, and give what several gathers would: each position is rounded on its way.
    """
    batch, height, width, channels = images.shape
    device = images.device
    columns = torch.arange(width, device=device, dtype=torch.int32).view(1, 1, width)
    rows = torch.arange(height, device=device, dtype=torch.int32).view(1, height, 1)
    inside: Tensor | None = None
    for matrix in reversed(matrices):  # the last one made the result, so it is undone first
        a, b, c, d, e, f = matrix.view(batch, 6, 1, 1).unbind(1)
        columns, rows = (a * columns + b * rows + c) >> 16, (d * columns + e * rows + f) >> 16
        here = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
        inside = here if inside is None else inside & here
    assert inside is not None
    start = torch.arange(batch, device=device, dtype=torch.int32).view(batch, 1, 1) * (height * width)
    place = start + rows.clamp(0, height - 1) * width + columns.clamp(0, width - 1)
    moved = images.reshape(-1, channels).index_select(0, place.reshape(-1)).view(images.shape)
    return _filled(moved, inside, fill)


def _gather_bilinear(images: Tensor, matrix: Tensor, fill: int) -> Tensor:
    batch, height, width, channels = images.shape
    device = images.device
    x = torch.arange(width, device=device, dtype=torch.float64).view(1, 1, width) + 0.5
    y = torch.arange(height, device=device, dtype=torch.float64).view(1, height, 1) + 0.5
    a, b, c, d, e, f = matrix.view(batch, 6, 1, 1).unbind(1)
    columns, rows = a * x + b * y + c, d * x + e * y + f
    inside = (columns >= 0) & (columns < width) & (rows >= 0) & (rows < height)
    columns, rows = columns - 0.5, rows - 0.5
    left, above = columns.floor(), rows.floor()
    right_share, below_share = (columns - left)[..., None], (rows - above)[..., None]
    left, above = left.long(), above.long()
    start = torch.arange(batch, device=device).view(batch, 1, 1) * (height * width)
    pixels = images.reshape(-1, channels)

    def along_row(row: Tensor) -> Tensor:
        begin = start + row.clamp(0, height - 1) * width
        one, two = (
            pixels.index_select(0, (begin + column.clamp(0, width - 1)).view(-1)).view(images.shape).double()
            for column in (left, left + 1)
        )
        return one + (two - one) * right_share

    upper, lower = along_row(above), along_row(above + 1)
    return _filled((upper + (lower - upper) * below_share).to(images.dtype), inside, fill)


def _filled(moved: Tensor, inside: Tensor, fill: int) -> Tensor:
    if fill == 0:
        return moved.mul_(inside[..., None])  # several times faster than a selection
    return torch.where(inside[..., None], moved, torch.full((), fill, dtype=moved.dtype, device=moved.device))


def _two_taps(start: Tensor, length: Tensor, size: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """For each of ``size`` results along an axis: the two places it comes from, and the weights of both, [B, size].

    Triangles of one pixel's reach, cut off at the ends of the part and made to add up to one.
    """
    centre = torch.arange(size, device=start.device, dtype=torch.float64) + 0.5
    centre = centre * (length.double() / size)[:, None]
    last = (length - 1)[:, None]
    lower = (centre - 0.5).long()  # cuts towards zero, so never less
    one = (1 - (lower - centre + 0.5).abs()).clamp(min=0)
    two = (1 - (lower + 1 - centre + 0.5).abs()).clamp(min=0) * (lower < last)
    total = one + two
    upper = torch.minimum(lower + 1, last)
    first = start[:, None]
    return (first + lower, first + upper), (one / total, two / total)


def _weighted(one: Tensor, two: Tensor, weights: Sequence[Tensor]) -> Tensor:
    if one.dtype != torch.uint8:
        return (one * weights[0] + two * weights[1]).to(one.dtype)
    first, second = ((k * (1 << _BITS) + 0.5).int() for k in weights)
    return ((one * first + two * second + (1 << (_BITS - 1))) >> _BITS).to(torch.uint8)
