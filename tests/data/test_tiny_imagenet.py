"""Tiny ImageNet in its publishers' layout, and in broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from isofed import data
from isofed.errors import UserError
from tests.data.picture_tools import Painter

WNIDS = ("n03", "n01", "n02")  # wnids.txt is not sorted


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ISOFED_DATA", raising=False)


@pytest.fixture
def painter(tmp_path: Path) -> Painter:
    painter = Painter(tmp_path / "tiny-imagenet-200")
    for count, wnid in enumerate(WNIDS, 2):
        painter.paint(f"train/{wnid}/images", [f"{wnid}_{n}.JPEG" for n in range(count)])
        (painter.root / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
    painter.paint("val/images", [f"val_{n}.JPEG" for n in range(4)])
    painter.paint("test/images", ["test_0.JPEG"])
    (painter.root / "wnids.txt").write_text("\n".join(WNIDS))
    (painter.root / "words.txt").write_text("n00\tentity\nn01\tcrane, bird\nn02\tcrane\nn03\tgoldfish, Carassius\n")
    lines = [f"val_{n}.JPEG\t{wnid}\t0\t0\t62\t62\n" for n, wnid in enumerate(("n02", "n03", "n01", "n02"))]
    (painter.root / "val" / "val_annotations.txt").write_text("".join(lines))
    return painter


def test_the_parts_and_their_labels(painter: Painter) -> None:
    made = data.load("tiny-imagenet:size=8", root=str(painter.root.parent))
    assert made.classes == ("crane (n01)", "crane (n02)", "goldfish")
    assert [str(f) for f in painter.find(made.train)] == [
        f"train/{wnid}/images/{wnid}_{n}.JPEG"
        for wnid, count in (("n01", 3), ("n02", 4), ("n03", 2))
        for n in range(count)
    ]
    assert made.train.labels.tolist() == [0] * 3 + [1] * 4 + [2] * 2
    assert [f.name for f in painter.find(made.test)] == [f"val_{n}.JPEG" for n in range(4)]
    assert made.test.labels.tolist() == [1, 2, 0, 1]
    assert (made.mean, made.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert data.load("tiny-imagenet", root=str(painter.root)).shape == (3, 64, 64)


def test_without_words_the_numbers_are_the_names(painter: Painter) -> None:
    (painter.root / "words.txt").unlink()
    assert data.load("tiny-imagenet:8", root=str(painter.root)).classes == ("n01", "n02", "n03")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("wnids.txt", None, "there is no file '.*wnids.txt', which data set 'tiny-imagenet' needs"),
        ("wnids.txt", b"", "wnids.txt' must name every class once, and at least two: it has 0"),
        ("wnids.txt", b"n01\nn02\nn01", "must name every class once, and at least two: it has 3"),
        ("wnids.txt", b"n01\nn02\nn09", "there is no class folder '.*train/n09/images'"),
        ("wnids.txt", b"\xff\xfe\xfa", "wnids.txt' cannot be read as text"),
        ("val/val_annotations.txt", None, "there is no file '.*val_annotations.txt'"),
        ("val/val_annotations.txt", b"\n\n", "val_annotations.txt' names no pictures"),
        (
            "val/val_annotations.txt",
            b"val_0.JPEG\tn01\nval_9.JPEG\tn01\n",
            "line 2 of .* names the picture '.*val_9.JPEG'",
        ),
        ("val/val_annotations.txt", b"val_0.JPEG\tn99\n", "line 1 of .* must be a picture, a tab and a class of wnids"),
        ("val/val_annotations.txt", b"val_0.JPEG n01\n", "line 1 of .* must be a picture, a tab and a class"),
        ("val/val_annotations.txt", b"val_0.JPEG\tn01\nval_0.JPEG\tn02\n", "line 2 .* 'val_0.JPEG' a second time"),
    ],
)
def test_lists_that_are_wrong_are_refused(painter: Painter, file: str, content: bytes | None, message: str) -> None:
    if content is None:
        (painter.root / file).unlink()
    else:
        (painter.root / file).write_bytes(content)
    with pytest.raises(UserError, match=message):
        data.load("tiny-imagenet:size=8", root=str(painter.root))


def test_a_class_without_pictures_is_named(painter: Painter) -> None:
    for file in (painter.root / "train" / "n02" / "images").iterdir():
        file.unlink()
    with pytest.raises(UserError, match="the class folder '.*train/n02/images' has no pictures: isofed reads .bmp"):
        data.load("tiny-imagenet:size=8", root=str(painter.root))
