"""ImageNet-200: which classes and pictures are chosen, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from isofed import data, draws
from isofed.errors import UserError
from tests.data.picture_tools import Painter, numbered

ALL = [f"n{number:08}" for number in range(10, 30)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ISOFED_DATA", raising=False)


@pytest.fixture
def painter(tmp_path: Path) -> Painter:
    painter = Painter(tmp_path / "imagenet")
    for wnid in reversed(ALL):
        painter.paint(f"train/{wnid}", [f"{wnid}_{n}.JPEG" for n in range(6)])
        painter.paint(f"val/{wnid}", [f"ILSVRC2012_val_{wnid}_{n}.JPEG" for n in range(2)])
    return painter


def test_the_classes_are_those_of_seed_1993_and_the_pictures_those_of_the_split_seed(painter: Painter) -> None:
    made = data.load("imagenet-200:classes=7,per_class=4,size=8", root=str(painter.root))
    state = np.random.get_state()
    np.random.seed(1993)
    chosen = np.random.choice(ALL, 7, replace=False)
    np.random.set_state(state)
    assert made.classes == tuple(sorted(chosen))
    assert torch.bincount(made.train.labels).tolist() == [4] * 7
    expected = []
    for label, wnid in enumerate(made.classes):
        order = draws.generator(0, "data/imagenet-200/train", label).permutation(6)
        expected += [Path("train") / wnid / f"{wnid}_{n}.JPEG" for n in sorted(order[:4])]
    assert painter.find(made.train) == expected
    tested = [Path("val") / wnid / f"ILSVRC2012_val_{wnid}_{n}.JPEG" for wnid in made.classes for n in range(2)]
    assert painter.find(made.test) == tested
    assert made.test.labels.tolist() == [label for label in range(7) for _ in range(2)]
    assert (made.mean, made.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert made.domains == ()


def test_the_split_seed_changes_pictures_not_classes(painter: Painter) -> None:
    one, two, again = (
        data.load(f"imagenet-200:classes=7,per_class=4,size=8,split_seed={seed}", root=str(painter.root))
        for seed in (0, 1, 0)
    )
    assert one.classes == two.classes
    assert painter.find(one.train) != painter.find(two.train)
    assert painter.find(one.test) == painter.find(two.test)
    assert one.fingerprint == again.fingerprint


def test_the_default_is_200_classes_at_224_pixels(painter: Painter) -> None:
    with pytest.raises(UserError, match="train' has 20 class folders, fewer than the 200 to choose: add the others or"):
        data.load("imagenet-200", root=str(painter.root))
    made = data.load("imagenet-200:20,2", root=str(painter.root))
    assert made.shape == (3, 224, 224)
    assert (len(made.train), len(made.test), len(made.classes)) == (40, 40, 20)


def test_what_is_missing_is_named(painter: Painter, tmp_path: Path) -> None:
    root, choice = painter.root, "imagenet-200:classes=20,per_class=6,size=8"
    with pytest.raises(
        UserError, match="has 6 pictures, not 500: add the others or ask for fewer, like 'imagenet-200:p"
    ):
        data.load("imagenet-200:classes=20", root=str(root))
    for option, message in (
        ("classes=1", "classes .* must be at least 2, not 1"),
        ("per_class=0", "per_class .* 1, not 0"),
    ):
        with pytest.raises(UserError, match=message):
            data.load(f"imagenet-200:{option}", root=str(root))
    (root / "val" / ALL[3]).rename(tmp_path / "away")
    with pytest.raises(
        UserError, match=f"there is no class folder '.*val/{ALL[3]}', which data set 'imagenet-200' needs"
    ):
        data.load(choice, root=str(root))
    (root / "val" / ALL[3]).mkdir()
    with pytest.raises(UserError, match=f"the class folder '.*val/{ALL[3]}' has no pictures"):
        data.load(choice, root=str(root))
    Painter(root).paint("val", numbered(1))
    with pytest.raises(UserError, match="val' holds pictures: 'imagenet-200' needs them in class folders val/<wnid>/"):
        data.load(choice, root=str(root))
    (root / "train").rename(tmp_path / "gone")
    with pytest.raises(UserError, match="there is no folder '.*train', which data set 'imagenet-200' needs"):
        data.load(choice, root=str(root))
