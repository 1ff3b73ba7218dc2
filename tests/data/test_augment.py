"""Augmentation against a picture-by-picture computation on the same draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from isofed import draws as random
from isofed.data import augment
from isofed.data.augment import Augment, Augmentation
from isofed.errors import UserError

Array = npt.NDArray[Any]


def pictures(batch: int, height: int, width: int, channels: int, dtype: str = "uint8") -> Array:
    values = np.random.default_rng(1).integers(1, 256, (batch, height, width, channels))
    return (values - 128).astype(np.float32) / 7 if dtype == "float32" else values.astype(np.uint8)


def by_hand(text: str, images: Array, drawn: Mapping[str, Array]) -> Array:
    """Pad, cut and mirror one picture after the other, in the order of the text."""
    out = []
    for i, image in enumerate(images):
        for name in text.split("+"):
            if name == "flip":
                image = image[:, ::-1] if drawn["augment.flip"][i] else image
            else:
                by = int(name.split(":")[1].split(",")[0])
                mode: Any = "reflect" if "reflect" in name else "constant"
                padded = np.pad(image, ((by, by), (by, by), (0, 0)), mode=mode)
                y, x = by + int(drawn["augment.dy"][i]), by + int(drawn["augment.dx"][i])
                image = padded[y : y + image.shape[0], x : x + image.shape[1]]
        out.append(image)
    return np.stack(out)


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("shape", [(8, 8, 1), (9, 6, 3)])
@pytest.mark.parametrize("text", ["flip", "crop:4", "crop:4+flip", "flip+crop:2", "crop:5,pad=reflect+flip"])
def test_apply_agrees_with_a_picture_by_picture_computation(text: str, shape: tuple[int, int, int], dtype: str) -> None:
    height, width, channels = shape
    images = pictures(200, height, width, channels, dtype)
    made = augment.parse(text)
    drawn = made.draw(3, 200, random.generator(0, "test"), (channels, height, width))
    for step in range(3):
        here = {key: values[step] for key, values in drawn.items()}
        out = made.apply(torch.from_numpy(images), {k: torch.from_numpy(v) for k, v in here.items()})
        assert out.numpy().dtype == images.dtype
        assert out.is_contiguous()
        np.testing.assert_array_equal(out.numpy(), by_hand(text, images, here))


def test_every_shift_and_both_sides_are_drawn_about_equally_often() -> None:
    drawn = augment.parse("crop:4+flip").draw(50, 200, random.generator(0, "test"), (3, 32, 32))
    assert sorted(drawn) == ["augment.dx", "augment.dy", "augment.flip"]
    for key, values in drawn.items():
        assert values.shape == (50, 200)
        assert values.dtype.itemsize == 1
        seen, counts = np.unique(values, return_counts=True)
        assert seen.tolist() == ([0, 1] if key.endswith("flip") else list(range(-4, 5)))
        assert counts.min() > 0.85 * 10_000 / len(seen)
    assert abs(np.corrcoef(drawn["augment.dy"].ravel(), drawn["augment.dx"].ravel())[0, 1]) < 0.05


def test_draws_depend_on_the_generator_alone() -> None:
    made = augment.parse("crop:4+flip")
    one, two, other = (made.draw(2, 8, random.generator(seed, "a"), (3, 9, 9)) for seed in (0, 0, 1))
    assert all(np.array_equal(one[k], two[k]) for k in one)
    assert any(not np.array_equal(one[k], other[k]) for k in one)


def test_none_draws_nothing_and_changes_nothing() -> None:
    made = augment.parse("none")
    images = torch.from_numpy(pictures(2, 4, 4, 1))
    assert made.draw(2, 2, random.generator(0, "a"), (1, 4, 4)) == {}
    assert made.apply(images, {}) is images


def test_apply_does_not_change_its_input() -> None:
    images = torch.from_numpy(pictures(4, 5, 5, 1))
    before = images.clone()
    made = augment.parse("crop:3")
    drawn = {k: torch.from_numpy(v[0]) for k, v in made.draw(1, 4, random.generator(0, "a"), (1, 5, 5)).items()}
    assert not torch.equal(made.apply(images, drawn), before)
    assert torch.equal(images, before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_apply_reads_no_value_on_the_host(dtype: torch.dtype) -> None:
    made = augment.parse("crop:4,pad=reflect+flip")
    drawn = made.draw(1, 4, random.generator(0, "a"), (3, 8, 8))
    with FakeTensorMode():
        fake = {k: torch.empty(4, dtype=getattr(torch, v.dtype.name)) for k, v in drawn.items()}
        out = made.apply(torch.empty(4, 8, 8, 3, dtype=dtype), fake)
        assert (out.shape, out.dtype) == ((4, 8, 8, 3), dtype)


def test_crop_and_flip_share_one_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = torch.Tensor.index_select

    def counted(self: Tensor, *given: Any) -> Tensor:
        calls.append(given)
        return real(self, *given)

    monkeypatch.setattr(torch.Tensor, "index_select", counted)
    made = augment.parse("crop:2+flip")
    drawn = {k: torch.from_numpy(v[0]) for k, v in made.draw(1, 4, random.generator(0, "a"), (1, 5, 5)).items()}
    made.apply(torch.from_numpy(pictures(4, 5, 5, 1)), drawn)
    assert len(calls) == 1


@dataclass(frozen=True)
class Brighter(Augmentation):
    """A change of values, as a later file might add it."""

    def draw(self, steps: int, batch: int, rng: np.random.Generator, shape: tuple[int, int, int]) -> dict[str, Array]:
        return {"augment.brighter": rng.random((steps, batch), dtype=np.float32)}

    def apply(self, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        return images + draws["augment.brighter"][:, None, None, None]


def test_a_new_kind_of_change_keeps_its_place_in_the_order() -> None:
    """Brighter before the crop leaves the padding black, after it does not."""
    images = torch.zeros(50, 6, 6, 1)
    crop = augment.Crop(3)
    for parts, darkest in (((Brighter(), crop), 0.0), ((crop, Brighter()), None)):
        made = Augment(parts)
        drawn = {k: torch.from_numpy(v[0]) for k, v in made.draw(1, 50, random.generator(0, "a"), (1, 6, 6)).items()}
        out = made.apply(images, drawn)
        assert out.amax((1, 2, 3)).tolist() == drawn["augment.brighter"].tolist()
        assert float(out.min()) == (float(drawn["augment.brighter"].min()) if darkest is None else darkest)


@pytest.mark.parametrize("text", ["none", "flip", "crop+flip", "crop:by=2,pad=reflect", "flip+crop:by=3"])
def test_the_text_form_is_read_and_written(text: str) -> None:
    assert str(augment.parse(text)) == text


def test_wrong_texts_are_refused() -> None:
    cases = {
        "flop": r"no augmentation 'flop': did you mean 'flip'\? Known: crop, flip, none",
        "none+flip": "'none' stands alone",
        "flip+flip": "'flip' is given twice",
        "crop:0": "must be from 1 to 1024 pixels, not 0",
        "crop:-4": "must be from 1 to 1024 pixels",
        "crop:4,pad=grey": "must be one of zero, reflect, not 'grey'",
        "crop:four": "must be a whole number",
        "flip:0.3": "one too many",
    }
    for text, message in cases.items():
        with pytest.raises(UserError, match=message):
            augment.parse(text)


def test_a_shift_as_large_as_the_picture_is_refused() -> None:
    with pytest.raises(UserError, match="'crop:8' shifts pictures of 8 x 9 pixels out of sight: use at most 7 pixels"):
        augment.parse("crop:8").draw(1, 1, random.generator(0, "a"), (1, 8, 9))
