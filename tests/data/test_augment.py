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
from isofed.engine.workers import Pool
from isofed.errors import UserError
from isofed.models import Network
from tests.engine.plain import small
from tests.engine.test_contract import take_fake_steps

Array = npt.NDArray[Any]

EVERY = [
    *("rotation", "rotation:15,bilinear,fill=7", "resized_crop", "jitter", "autoaugment", "autoaugment:feddecorr"),
    *("crop:4+flip+autoaugment", "resized_crop+jitter+flip", "crop:2,pad=reflect+flip+rotation:15"),
]
COLOURED = "synthetic:samples=100,test=20,classes=4,size=12,channels=3"


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


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("text", ["crop:4,pad=reflect+flip", *EVERY])
def test_apply_reads_no_value_on_the_host(text: str, dtype: torch.dtype, channels: int) -> None:
    made = augment.parse(text)
    drawn = made.draw(1, 4, random.generator(0, "a"), (channels, 8, 8))
    with FakeTensorMode():
        fake = {k: torch.empty(v.shape[1:], dtype=getattr(torch, v.dtype.name)) for k, v in drawn.items()}
        images = torch.empty(4, 8, 8, channels, dtype=dtype)
        if dtype == torch.float32 and ("auto" in text or "jitter" in text):
            with pytest.raises(UserError, match="needs uint8 pictures"):
                made.apply(images, fake)
        else:
            out = made.apply(images, fake)
            assert (out.shape, out.dtype) == ((4, 8, 8, channels), dtype)


@pytest.mark.parametrize("text", EVERY)
def test_the_last_batch_may_be_smaller(text: str) -> None:
    """A step takes the first so many draws; what becomes of a picture does not depend on its neighbours."""
    images = torch.from_numpy(pictures(8, 12, 12, 3))
    made = augment.parse(text)
    drawn = {k: torch.from_numpy(v[0]) for k, v in made.draw(1, 8, random.generator(0, "a"), (3, 12, 12)).items()}
    whole = made.apply(images, drawn)
    for size in (1, 5):
        assert torch.equal(made.apply(images[:size], {k: v[:size] for k, v in drawn.items()}), whole[:size])


@pytest.mark.parametrize("text", EVERY)
def test_serial_and_workers_train_on_the_same_pictures(text: str, two_workers: Pool) -> None:
    settings: dict[str, Any] = {"data": COLOURED, "model": "cnn", "rounds": 1, "augment": text}
    before = torch.random.get_rng_state()
    serial, again = small(**settings), small(**settings)
    workers = small(**settings, executor="workers", pool=two_workers)
    plain = small(**(settings | {"augment": "none"}))
    for run in (serial, again, workers, plain):
        run.fit()
    assert torch.equal(serial.state.weights, workers.state.weights)
    assert torch.equal(serial.state.weights, again.state.weights)
    assert not torch.equal(serial.state.weights, plain.state.weights)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("text", ["crop:4+flip", *EVERY])
def test_a_replayed_graph_gives_the_bytes_of_the_cpu(text: str, channels: int) -> None:
    images = torch.from_numpy(pictures(64, 32, 32, channels))
    made = augment.parse(text)
    drawn = made.draw(3, 64, random.generator(0, "a"), (channels, 32, 32))
    on_device = images.cuda()
    given = {k: torch.from_numpy(v[0]).cuda() for k, v in drawn.items()}
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        made.apply(on_device, given)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made.apply(on_device, given)
    for step in range(3):
        here = {k: torch.from_numpy(v[step]) for k, v in drawn.items()}
        for key, values in here.items():
            given[key].copy_(values)
        graph.replay()
        assert torch.equal(out.cpu(), made.apply(images, here))


@pytest.mark.parametrize("text", EVERY)
def test_a_step_keeps_the_rules_of_a_capture(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Network, "to", lambda self, device: self)
    assert take_fake_steps(small(data=COLOURED, model="cnn", augment=text).world).step.size == 5


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


@pytest.mark.parametrize(
    "text",
    [
        *("none", "flip", "crop+flip", "crop:by=2,pad=reflect", "flip+crop:by=3", "crop+flip+autoaugment"),
        *("rotation", "rotation:degrees=30,interpolation=bilinear,fill=128", "resized_crop:scale=0.5,ratio=2"),
        *("jitter", "jitter:amount=0.2,contrast=0", "resized_crop+jitter+flip", "autoaugment:form=feddecorr,fill=128"),
    ],
)
def test_the_text_form_is_read_and_written(text: str) -> None:
    assert str(augment.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("crop", "crop:by=4,pad=zero"),
        ("rotation", "rotation:degrees=15,interpolation=nearest,fill=0"),  # MOON's on CIFAR-100
        ("resized_crop", "resized_crop:scale=0.08"),  # ImageNet's, with the next
        ("jitter", "jitter:amount=0.4"),
        ("autoaugment", "autoaugment:form=torchvision,fill=0"),
    ],
)
def test_what_is_not_said_is_what_papers_use(text: str, whole: str) -> None:
    assert augment.parse(text) == augment.parse(whole)


def test_wrong_texts_are_refused() -> None:
    cases = {
        "flop": r"did you mean 'flip'\? Known: autoaugment, crop, flip, jitter, none, resized_crop, rotation",
        "none+flip": "'none' stands alone",
        "flip+flip": "'flip' is given twice",
        "crop:0": "must be from 1 to 1024 pixels, not 0",
        "crop:-4": "must be from 1 to 1024 pixels",
        "crop:4,pad=grey": "must be one of zero, reflect, not 'grey'",
        "crop:four": "must be a whole number",
        "flip:0.3": "one too many",
        "rotation:0": "degrees of augmentation 'rotation' must be above 0 and at most 180, not 0",
        "rotation:nan": "must be a number",
        "rotation:15,cubic": "must be one of nearest, bilinear, not 'cubic'",
        "rotation:15,fill=256": "fill of augmentation 'rotation' must be from 0 to 255, not 256",
        "resized_crop:0": "scale of augmentation 'resized_crop' must be above 0 and at most 1, not 0",
        "resized_crop:ratio=0.5": "ratio of augmentation 'resized_crop' must be at least 1, not 0.5",
        "jitter:-1": "amount of augmentation 'jitter' must be from 0 to 10, not -1",
        "jitter:hue=0.1": "no option of augmentation 'jitter' called 'hue'",
        "jitter:0.4,contrast=inf": "contrast of augmentation 'jitter' must be from 0 to 10, not inf",
        "autoaugment:paper": "form of augmentation 'autoaugment' must be one of torchvision, feddecorr, not 'paper'",
        "autoaugment:fill=-1": "fill of augmentation 'autoaugment' must be from 0 to 255, not -1",
    }
    for text, message in cases.items():
        with pytest.raises(UserError, match=message):
            augment.parse(text)


def test_a_shift_as_large_as_the_picture_is_refused() -> None:
    with pytest.raises(UserError, match="'crop:8' shifts pictures of 8 x 9 pixels out of sight: use at most 7 pixels"):
        augment.parse("crop:8").draw(1, 1, random.generator(0, "a"), (1, 8, 9))
