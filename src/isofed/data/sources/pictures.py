"""What published sets of pictures share: finding their folder, decoding once into the cache, making the data set."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch

from isofed.data.base import Dataset, Index, Part
from isofed.data.cache import cached, fingerprint
from isofed.data.sources import Progress, data_folder
from isofed.data.sources.decode import SUFFIXES, check_size, decode, pictures_in
from isofed.errors import UserError

HALF = (0.5, 0.5, 0.5)
_VERSION = 1  # of the way pictures are decoded: another makes what the cache holds worthless


@dataclass(frozen=True, eq=False)
class Listing:
    """The pictures of a set, in an order that depends on their names alone, and what is known about each."""

    files: list[Path]
    labels: Index
    classes: tuple[str, ...]
    domains: Index | None = None
    domain_names: tuple[str, ...] = ()
    groups: Index | None = None


def find(name: str, root: str | None, marks: Sequence[str], usual: Sequence[str]) -> Path:
    """The folder of a set, which holds some of ``marks``: the one the user names, or a ``usual`` folder inside it.

    Any mark will do, so that a set that is not whole is found and what it lacks can be named.
    """
    base = data_folder(root, name)
    places = [base, *(base / folder for folder in usual)]
    held = [sum((place / mark).exists() for mark in marks) for place in places]
    if not any(held):
        raise UserError(
            f"'{base}' does not hold data set '{name}': there is no {' or '.join(marks)} in it "
            f"or in a sub-folder {' or '.join(usual)}"
        )
    return places[held.index(max(held))]


def pictures(folder: Path, name: str, what: str = "class folder") -> list[Path]:
    """The pictures in a folder that must be there and must have some."""
    if not folder.is_dir():
        raise UserError(f"there is no {what} '{folder}', which data set '{name}' needs")
    files = pictures_in(folder)
    if not files:
        raise UserError(f"the {what} '{folder}' has no pictures: isofed reads {', '.join(sorted(SUFFIXES))}")
    return files


def text(path: Path, name: str) -> str:
    """The content of a list or table that belongs to a set."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"there is no file '{path}', which data set '{name}' needs") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not in UTF-8: save it in that encoding"
        raise UserError(f"the file '{path}' cannot be read as text ({why})") from None


def dataset(
    name: str,
    source: Any,
    listing: Listing,
    places: tuple[Index, Index],
    mean: tuple[float, ...] = HALF,
    std: tuple[float, ...] = HALF,
    progress: Progress | None = None,
) -> Dataset:
    """The data set whose training and test pictures are at these places of a listing.

    ``source`` is the dataclass of the user's options. Only the pictures that are used are decoded, and the parts are
    kept apart, so that a set larger than the memory can stay on the disk.
    """
    size: int = source.size
    check_size(name, size)
    parts = {part: [listing.files[i] for i in index] for part, index in zip(("train", "test"), places, strict=True)}
    for part, files in parts.items():
        if not files:
            raise UserError(f"data set '{name}' has no pictures in its {part} part: it needs at least one")
    for label in np.setdiff1d(np.arange(len(listing.classes)), listing.labels[places[0]]):  # before hours of decoding
        raise UserError(
            f"the training part of data set '{name}' has no picture of class '{listing.classes[label]}': "
            "every class needs at least one"
        )
    try:
        known = fingerprint(file for files in parts.values() for file in files)
    except OSError as error:  # removed since it was listed, or a link to nothing
        raise UserError(f"the picture '{error.filename}' cannot be read ({error.strerror})") from None
    about = {
        "name": name,
        "options": dataclasses.asdict(source),
        "files": known,
        "version": [_VERSION, PIL.__version__],  # another Pillow may decode to other values
    }

    def fill(arrays: dict[str, Any]) -> None:
        wanted = [(arrays[part][i], file) for part, files in parts.items() for i, file in enumerate(files)]
        decode(wanted, "rgb", progress, published=True)

    shapes = {part: ((len(files), size, size, 3), "uint8") for part, files in parts.items()}
    images = cached("pictures", about, shapes, fill)
    made = []
    for part, index in zip(parts, places, strict=True):
        domains, groups = (None if of is None else of[index] for of in (listing.domains, listing.groups))
        made.append(Part(torch.from_numpy(images[part]), listing.labels[index], domains, groups))
    return Dataset.build(name, listing.classes, made[0], made[1], mean, std, listing.domain_names)


def numbers(values: Sequence[int]) -> Index:
    """Labels or places as an array."""
    return np.array(values, dtype=np.int64)
