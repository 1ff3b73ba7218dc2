"""Rotation, resized crops and jitter: every picture is what Pillow makes of it with the same random choices.

Equality is exact, interpolated pictures included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageEnhance

from isofed import draws as random
from isofed.data import augment
from isofed.data.augment import Shape
from isofed.errors import UserError

Array = npt.NDArray[Any]

SHAPES: list[Shape] = [(3, 32, 32), (1, 20, 27), (3, 9, 6), (3, 2, 5), (1, 1, 1)]


def pictures(count: int, shape: Shape, seed: int = 1) -> Array:
    """Noise over all levels, noise over few levels, smooth pictures and pictures of one level, in turn."""
    channels, height, width = shape
    rng = np.random.default_rng(seed)
    out = rng.integers(0, 256, (count, height, width, channels))
    low = rng.integers(0, 250, (count, 1, 1, channels))
    narrow = low + out * rng.integers(0, 256 - low) // 255
    slope = np.add.outer(np.arange(height) * 5, np.arange(width) * 3)[None, :, :, None] + low
    for kind, values in ((1, narrow), (2, np.minimum(slope, 255)), (3, np.broadcast_to(low, out.shape))):
        out[kind::4] = values[kind::4]
    return out.astype(np.uint8)


def to_pillow(picture: Array) -> Image.Image:
    return Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture)


def from_pillow(picture: Image.Image) -> Array:
    values = np.asarray(picture)
    return values[:, :, None] if values.ndim == 2 else values


def grey_fill(picture: Image.Image, level: int) -> Any:
    return level if picture.mode == "L" else (level,) * 3


def apply(text: str, images: Array, drawn: Mapping[str, Array], step: int = 0) -> Array:
    here = {k: torch.from_numpy(v[step]) for k, v in drawn.items()}
    before = images.copy()
    out = augment.parse(text).apply(torch.from_numpy(images), here)
    assert out.dtype == torch.from_numpy(images).dtype and out.is_contiguous()
    np.testing.assert_array_equal(images, before)  # the pictures of the data set are not touched
    made: Array = out.numpy()
    return made


def draw(text: str, steps: int, batch: int, shape: Shape, seed: int = 0) -> dict[str, Array]:
    return augment.parse(text).draw(steps, batch, random.generator(seed, "test"), shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fill", [0, 77])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("degrees", [15, 180])
def test_rotation_is_pillows(shape: Shape, fill: int, interpolation: str, degrees: int) -> None:
    images = pictures(60, shape)
    text = f"rotation:{degrees},{interpolation},fill={fill}"
    found = apply(text, images, draw(text, 1, 60, shape))
    angles = random.generator(0, "test").uniform(-degrees, degrees, (1, 60))[0]
    assert angles.min() < 0 < angles.max()
    for picture, angle, out in zip(map(to_pillow, images), angles.tolist(), found, strict=True):
        filter = Image.Resampling[interpolation.upper()]
        np.testing.assert_array_equal(
            out, from_pillow(picture.rotate(angle, filter, fillcolor=grey_fill(picture, fill)))
        )


def test_a_rotation_of_floats_rounds_nothing() -> None:
    levels = pictures(40, (3, 16, 16))
    values = levels.astype(np.float32)
    drawn = draw("rotation:30", 1, 40, (3, 16, 16))
    np.testing.assert_array_equal(apply("rotation:30", values, drawn), apply("rotation:30", levels, drawn))
    text = "rotation:30,bilinear"
    drawn = draw(text, 1, 40, (3, 16, 16))
    smooth, whole = apply(text, values, drawn), apply(text, levels, drawn)
    assert np.abs(smooth - np.floor(smooth)).max() > 0.5
    over = smooth.astype(np.float64) - whole  # what Pillow cuts off
    assert over.min() >= -1e-4 and over.max() < 1 + 1e-4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("text", ["resized_crop", "resized_crop:0.5,ratio=1", "resized_crop:scale=1,ratio=3"])
def test_a_resized_crop_is_pillows(text: str, shape: Shape) -> None:
    _, height, width = shape
    images = pictures(100, shape)
    drawn = draw(text, 1, 100, shape)
    found = apply(text, images, drawn)
    for picture, out, place in zip(images, found, drawn["augment.resized_crop"][0].tolist(), strict=True):
        top, left, h, w = place
        part = to_pillow(picture).crop((left, top, left + w, top + h))
        np.testing.assert_array_equal(out, from_pillow(part.resize((width, height), Image.Resampling.BILINEAR)))


def test_a_resized_crop_of_floats_is_between_its_pixels() -> None:
    levels = pictures(50, (1, 16, 12))
    drawn = draw("resized_crop", 1, 50, (1, 16, 12))
    found = apply("resized_crop", levels.astype(np.float32), drawn)
    whole = apply("resized_crop", levels, drawn).astype(np.float64)
    assert 0 < np.abs(found - whole).max() <= 1.0 + 1e-4  # two roundings to whole levels, of half a level each


@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 60, 20), (3, 20, 60)], ids=str)
def test_resized_crops_have_the_areas_and_shapes_asked_for(shape: Shape) -> None:
    _, height, width = shape
    top, left, h, w = draw("resized_crop", 100, 100, shape)["augment.resized_crop"].reshape(-1, 4).T.astype(int)
    assert (top >= 0).all() and (left >= 0).all() and (top + h <= height).all() and (left + w <= width).all()
    area, ratio = h * w / (height * width), w / h
    slack = 1.2  # of rounding to whole pixels
    assert 0.08 / slack < area.min() < 0.1 and 0.75 / slack < ratio.min() < 0.8
    assert 1.28 < ratio.max() < slack * 4 / 3
    if height == width:
        assert area.max() > 0.95
        assert abs(area.mean() - 0.5) < 0.05  # a little less than the middle: large parts fit less often
        assert abs(np.log(ratio).mean()) < 0.01
        assert abs((top - (height - h) / 2).mean()) < 0.2 and abs((left - (width - w) / 2).mean()) < 0.2


@pytest.mark.parametrize(
    ("shape", "part"), [((1, 10, 100), (10, 13)), ((1, 100, 10), (13, 10)), ((1, 30, 30), (30, 30))]
)
def test_where_no_try_fits_the_largest_part_about_the_centre_is_taken(shape: Shape, part: tuple[int, int]) -> None:
    _, height, width = shape
    text = "resized_crop:1"  # the whole area in a shape of at most 4 to 3, which only a square picture can give
    places = draw(text, 20, 50, shape)["augment.resized_crop"].reshape(-1, 4)
    wanted = [(height - part[0]) // 2, (width - part[1]) // 2, *part]
    share = (places == wanted).all(-1).mean()
    assert share == 1.0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("text", ["jitter", "jitter:0.4,saturation=2", "jitter:0,contrast=0.9", "jitter:5"])
def test_jitter_is_pillows(text: str, shape: Shape) -> None:
    images = pictures(100, shape)
    drawn = draw(text, 1, 100, shape)
    found = apply(text, images, drawn)
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for i, out in enumerate(found):
        picture = to_pillow(images[i])
        for kind, factor in zip(drawn["augment.jitter.order"][0, i], drawn["augment.jitter.factor"][0, i], strict=True):
            picture = enhancers[kind](picture).enhance(float(factor))
        np.testing.assert_array_equal(out, from_pillow(picture))


def test_jitter_draws_every_order_and_factors_evenly() -> None:
    drawn = draw("jitter:0.4,contrast=1.5,saturation=0", 100, 100, (3, 8, 8))
    order, factor = (drawn[f"augment.jitter.{k}"].reshape(-1, 3) for k in ("order", "factor"))
    orders, counts = np.unique(order, axis=0, return_counts=True)
    assert len(orders) == 6 and counts.min() > 0.9 * 10_000 / 6
    for kind, (low, high) in enumerate([(0.6, 1.4), (0.0, 2.5), (1.0, 1.0)]):
        values = factor[order == kind]
        assert len(values) == 10_000
        assert values.min() >= np.float32(low) and values.max() <= np.float32(high)
        assert math.isclose(values.mean(), (low + high) / 2, abs_tol=0.03)
        assert math.isclose(values.std(), (high - low) / 12**0.5, abs_tol=0.02)


def test_saturation_changes_no_grey_picture() -> None:
    images = pictures(20, (1, 8, 8))
    text = "jitter:0,saturation=1"
    np.testing.assert_array_equal(apply(text, images, draw(text, 1, 20, (1, 8, 8))), images)


def test_what_cannot_be_changed_is_refused() -> None:
    for name in ("jitter", "autoaugment"):
        with pytest.raises(UserError, match=f"'{name}' changes grey or RGB pictures, and these have 4 channels"):
            draw(name, 1, 1, (4, 8, 8))
        drawn = draw(name, 1, 2, (3, 8, 8))
        with pytest.raises(UserError, match=f"'{name}' needs uint8 pictures"):
            apply(name, np.zeros((2, 8, 8, 3), np.float32), drawn)
