"""MNIST and Fashion-MNIST as their publishers pack them: IDX files, plain or compressed with gzip."""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np

from isofed.data.base import Dataset, Part
from isofed.data.sources import Progress
from isofed.data.sources.published import MOST_BYTES, Bytes, Layout, class_numbers, locate, part, unreadable
from isofed.errors import UserError

SIDE = 28
PICTURES, LABELS = 2051, 2049  # the magic numbers: bytes in three dimensions, and in one

FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def _spellings(stem: str, kind: str) -> tuple[str, ...]:
    """The names a file may have: some programs that unpack it turn the hyphen into a full stop."""
    return tuple(f"{stem}{sign}{kind}-ubyte{gz}" for gz in ("", ".gz") for sign in "-.")


_FILES = tuple(
    _spellings(f"{which}-{what}", kind)
    for which in ("train", "t10k")
    for what, kind in (("images", "idx3"), ("labels", "idx1"))
)


@dataclass(frozen=True)
class Mnist:
    """MNIST, handwritten digits, 28x28 grey, 10 classes, 70,000 pictures; root: the folder of its IDX files."""

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        folders = ("MNIST/raw", "MNIST", "mnist")
        return _load(root, "mnist", folders, tuple("0123456789"), 0.1307, 0.3081)


@dataclass(frozen=True)
class FashionMnist:
    """Fashion-MNIST, clothes, 28x28 grey, 10 classes, 70,000 pictures; root: the folder of its IDX files."""

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        folders = ("FashionMNIST/raw", "FashionMNIST", "fashion-mnist", "fashion-mnist/data/fashion", "data/fashion")
        return _load(root, "fashion-mnist", folders, FASHION, 0.2860, 0.3530)


def _load(
    root: str | None, name: str, folders: tuple[str, ...], classes: tuple[str, ...], mean: float, std: float
) -> Dataset:
    _, files = locate(root, name, [Layout(folders, _FILES)])
    train, test = _part(files[0], files[1]), _part(files[2], files[3])
    return Dataset.build(name, classes, train, test, mean=[mean], std=[std])


def _part(images: Path, labels: Path) -> Part:
    numbers, pixels = _idx(labels, LABELS, ()), _idx(images, PICTURES, (SIDE, SIDE))
    if len(pixels) != len(numbers):
        raise UserError(
            f"'{images}' has {len(pixels):,} pictures but '{labels.name}' has {len(numbers):,} labels: they must match"
        )
    return part(pixels[..., None], class_numbers(labels, numbers, 10))


def _idx(path: Path, magic: int, shape: tuple[int, ...]) -> Bytes:
    """The items of an IDX file, each of this shape."""
    try:
        with path.open("rb") as stream:
            packed = stream.read(2) == b"\x1f\x8b"  # by what is in it, since names are changed on the way
            stream.seek(0)
            if not packed:
                return _items(stream, path, magic, shape)
            with gzip.GzipFile(fileobj=stream) as unpacked:
                return _items(cast(IO[bytes], unpacked), path, magic, shape)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"'{path}' is broken or not complete ({error}): get this gzip file again") from None
    except OSError as error:
        raise unreadable(path, error) from None


def _items(stream: IO[bytes], path: Path, magic: int, shape: tuple[int, ...]) -> Bytes:
    head = stream.read(8 + 4 * len(shape))
    found, count, *sizes = np.frombuffer(head[: len(head) // 4 * 4], ">u4").tolist() + [0] * (2 - len(head) // 4)
    what = "pictures" if shape else "labels"
    if found != magic:
        raise UserError(f"'{path}' has the magic number {found}, not {magic}: it is no IDX file of {what}")
    if tuple(sizes) != shape:
        raise UserError(f"'{path}' has {what} of {sizes}, not {list(shape)}: it is no file of this data set")
    size = count * math.prod(shape)
    if not 0 < size <= MOST_BYTES:
        raise UserError(f"'{path}' says that it holds {count:,} {what}: isofed reads 1 to {MOST_BYTES:,} bytes of them")
    body = stream.read(size + 1)  # one more, to see whether it ends there
    if len(body) != size:
        than = "less" if len(body) < size else "more"
        raise UserError(f"'{path}' says that it holds {count:,} {what}, {size:,} bytes, but it has {than}")
    return np.frombuffer(body, np.uint8).reshape(count, *shape).copy()
