"""Your own pictures in folders: ``class/picture``, or ``domain/class/picture``, optionally under train/ and test/."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from isofed.data.base import Dataset, Part, held_out
from isofed.data.sources import Progress, existing
from isofed.errors import UserError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
MOST_PIXELS = 100_000_000  # a larger picture is refused: a small file can claim a size that fills the memory
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")

Item = tuple[Path, str, str]  # picture, class, domain


@dataclass(frozen=True)
class Folder:
    """Your own pictures in class folders (optionally under train/ and test/), resized to size x size."""

    size: int = 32
    channels: Literal["rgb", "grey"] = "rgb"

    def __post_init__(self) -> None:
        _check_size("folder", self.size)

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        path = _folder(root, "folder", "a folder of class folders")
        parts = [[(p, c, "") for c, p in _pictures(part, "folder")] for part in _parts(path)]
        return _dataset(path, parts, self.size, self.channels, progress)


@dataclass(frozen=True)
class DomainFolder:
    """Your own pictures in domain/class folders (optionally under train/ and test/), resized to size x size."""

    size: int = 32
    channels: Literal["rgb", "grey"] = "rgb"

    def __post_init__(self) -> None:
        _check_size("domain-folder", self.size)

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        path = _folder(root, "domain-folder", "a folder of domain folders")
        parts: list[list[Item]] = []
        for part in _parts(path):
            domains = _folders(part)
            if not domains:
                raise UserError(f"'{part}' has no folders in it: 'domain-folder' needs domain/class/picture")
            items = [(p, c, d.name) for d in domains for c, p in _pictures(d, "domain-folder")]
            empty = sorted({d.name for d in domains} - {d for _, _, d in items})
            if empty:
                raise UserError(f"the domain folder '{part / empty[0]}' has no pictures: add some or remove it")
            parts.append(items)
        return _dataset(path, parts, self.size, self.channels, progress)


def recognise(path: Path) -> str:
    """Which of the two sources fits a folder, from the depth at which its pictures lie."""
    top = _parts(path)[0]
    inside = _folders(top)
    if any(_files(folder) for folder in inside):
        return "folder"
    if any(_files(deeper) for folder in inside for deeper in _folders(folder)):
        return "domain-folder"
    if _files(top):
        raise UserError(f"'{top}' holds pictures but no class folders: put the pictures of each class into a folder")
    raise UserError(
        f"there are no pictures in class/ or domain/class/ folders under '{top}': "
        f"isofed reads {', '.join(sorted(SUFFIXES))}"
    )


def _check_size(name: str, size: int) -> None:
    if not 1 <= size <= 4096:
        raise UserError(f"size of data set '{name}' must be from 1 to 4096 pixels, not {size}")


def _folder(root: str | None, name: str, what: str) -> Path:
    path = existing(root, name, what)
    if not path.is_dir():
        raise UserError(f"'{path}' is a file: data set '{name}' needs the path of {what}")
    return path


def _listing(path: Path) -> list[Path]:
    try:
        return sorted((p for p in path.iterdir() if not p.name.startswith(".")), key=lambda p: p.name)
    except OSError as error:
        raise UserError(f"the folder '{path}' cannot be read ({error.strerror}): check who may open it") from None


def _folders(path: Path) -> list[Path]:
    return [p for p in _listing(path) if p.is_dir()]


def _files(path: Path) -> list[Path]:
    return [p for p in _listing(path) if p.suffix.lower() in SUFFIXES and p.is_file()]


def _parts(path: Path) -> list[Path]:
    """The training and the test folder, or the folder itself where it is not divided."""
    train, test = path / "train", path / "test"
    if not train.is_dir() or not _folders(train):
        return [path]  # without folders inside, 'train' is a class, as in CIFAR-100
    if test.is_dir():
        return [train, test]
    if len(_folders(path)) > 1:
        others = ", ".join(p.name for p in _folders(path) if p != train)
        raise UserError(f"'{path}' has train/ but no test/ (there is {others}): name the test part 'test'")
    return [train]


def _pictures(path: Path, name: str) -> Iterator[tuple[str, Path]]:
    """Class and path of every picture one level below."""
    classes = _folders(path)
    if not classes:
        hint = ": put the pictures of each class into a folder" if _files(path) else " with pictures"
        raise UserError(f"'{path}' has no class folders{hint}")
    for folder in classes:
        files = _files(folder)
        if not files and _folders(folder):
            hint = (
                "use 'domain-folder' for domain/class/picture" if name == "folder" else "it needs domain/class/picture"
            )
            raise UserError(f"'{folder}' holds folders, not pictures: {hint}")
        if not files and name == "folder":
            raise UserError(
                f"the class folder '{folder}' has no pictures: "
                f"add some or remove it (isofed reads {', '.join(sorted(SUFFIXES))})"
            )
        for file in files:
            yield folder.name, file


def _dataset(path: Path, parts: list[list[Item]], size: int, channels: str, progress: Progress | None) -> Dataset:
    name = path.resolve().name
    classes = sorted({c for _, c, _ in parts[0]})
    domains = sorted({d for _, _, d in parts[0] if d})
    if not classes:
        raise UserError(f"'{path}' has no pictures: isofed reads {', '.join(sorted(SUFFIXES))}")
    if len(classes) == 1:
        raise UserError(
            f"'{path}' has one class, '{classes[0]}': there is nothing to tell apart, it needs at least two"
        )
    for _, label, domain in parts[-1]:
        if label not in classes or (domain and domain not in domains):
            strange = f"class '{label}'" if label not in classes else f"domain '{domain}'"
            raise UserError(f"the test part of '{path}' has the {strange}, which the training part does not have")
    total = sum(map(len, parts))
    made, done = [], 0
    for items in parts:
        images = _decode([file for file, _, _ in items], size, channels, done, total, progress)
        done += len(items)
        labels = torch.tensor([classes.index(c) for _, c, _ in items], dtype=torch.int64)
        where = torch.tensor([domains.index(d) for _, _, d in items], dtype=torch.int64) if domains else None
        made.append(Part(torch.from_numpy(images), labels, where))
    train, test = made if len(made) == 2 else held_out(name, made[0])
    return Dataset.build(name, classes, train, test, domains=domains)


def _decode(
    files: list[Path], size: int, channels: str, before: int, total: int, progress: Progress | None
) -> npt.NDArray[np.uint8]:
    """Every picture as uint8 [N, size, size, C]; threads, because Pillow decodes outside Python's lock."""
    from PIL import Image

    Image.init()
    formats = [f for f in _FORMATS if f in Image.OPEN]  # only these decoders ever see the bytes
    images = np.empty((len(files), size, size, 3 if channels == "rgb" else 1), dtype=np.uint8)

    def one(place: int) -> None:
        file = files[place]
        try:
            with Image.open(file, formats=formats) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise UserError(
                        f"'{file}' says it is {image.width} x {image.height} pixels, more than the {MOST_PIXELS:,} "
                        "that are read: make it smaller or remove it"
                    )
                images[place] = _pixels(image, size, channels).reshape(images.shape[1:])
        except UserError:
            raise
        except Image.DecompressionBombError:
            raise UserError(f"'{file}' says it is larger than {MOST_PIXELS:,} pixels: remove it") from None
        except Exception as error:  # decoders fail in many ways on broken bytes
            why = "not a picture in a known format" if "cannot identify" in str(error) else str(error)
            raise UserError(f"the picture '{file}' cannot be read ({why}): replace or remove it") from None

    with warnings.catch_warnings(), ThreadPoolExecutor() as pool:
        warnings.simplefilter("ignore")  # of Pillow: the size has its own limit here, odd metadata do no harm
        for done, _ in enumerate(pool.map(one, range(len(files))), before + 1):
            if progress is not None and (done % 64 == 0 or done == total):
                progress(done, total)
    return images


def _pixels(image: Any, size: int, channels: str) -> npt.NDArray[np.uint8]:
    from PIL import Image

    if image.mode.startswith("I"):
        # Pillow would cut sixteen-bit grey at 255; the upper eight bits keep the picture.
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pictures have no fixed range, an .npz file can hold them")
    image = image.convert("RGB" if channels == "rgb" else "L")
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image, dtype=np.uint8)
