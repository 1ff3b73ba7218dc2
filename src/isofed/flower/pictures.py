"""A site's own folder of pictures. Unlike a data set of its own, a site need not have every class, or more than one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isofed.data import Dataset, Part
from isofed.data.base import torn
from isofed.data.cache import cached, fingerprint
from isofed.data.sources.decode import DECODING, SUFFIXES, contents, decode, folders_in, pictures_in
from isofed.data.sources.folders import beside, parts_of
from isofed.data.sources.items import Item, codes_of, divided
from isofed.data.sources.table import Table
from isofed.data.sources.unused import LOST, Unused, lost, lost_notes, strays
from isofed.errors import UserError
from isofed.flower.terms import Refusal


def read_pictures(place: Path, shape: tuple[int, int, int], table: Table | None = None, apart: bool = True) -> Dataset:
    """Pictures in class folders, optionally under train/ and test/, or in a table, of the federation's shape.

    ``apart=False`` leaves pictures together that come without a test part; then they are all for training.
    """
    channels, height, width = shape
    if height != width or channels not in (1, 3):
        raise Refusal(
            f"makes pictures square, with 1 or 3 channels, which shape {list(shape)} is not; "
            "federation/data.py can read them in another way"
        )
    parts, notes = _in_folders(place) if place.is_dir() else (table or Table()).items(place, _naming)
    classes = sorted({item.label for items in parts for item in items})
    groups = sorted({item.group for items in parts for item in items} - {""})
    codes = [codes_of(items, classes, [], groups) for items in parts]
    if len(parts) == 1 and apart:
        parts, codes = divided(place.stem, parts[0], codes[0])
    elif len(parts) == 1:
        parts, codes = [*parts, []], [*codes, codes_of([], classes, [], groups)]
    paths = [[item.file for item in items] for items in parts]
    *images, missed = _images(place, paths, (height, width, channels))
    notes += lost_notes(missed, [file for files in paths for file in files])
    made = [Part(torch.from_numpy(array), *known) for array, known in zip(images, codes, strict=True)]
    notes += torn(made[0], made[1])
    half = (0.5,) * channels
    return Dataset(place.stem, tuple(classes), made[0], made[1], half, half, notes=tuple(notes))


def _naming(column: str) -> str:
    """How to say at a site which column something is."""
    return f"read_folder(folder, shape, {column}='NAME') in federation/data.py"


def _in_folders(folder: Path) -> tuple[list[list[Item]], list[str]]:
    """The pictures of the training and the test part, or of a single one, and what is not used."""
    unused, roots = Unused(), parts_of(folder)
    parts = [_items(part, unused) for part in roots]
    return parts, beside(folder, roots) + strays(roots, "class") + unused.notes()


def _items(folder: Path, unused: Unused) -> list[Item]:
    """The pictures of all class folders; an empty one does no harm."""
    found: list[Item] = []
    for inside in folders_in(folder):
        held = contents(inside)
        found += [Item(file, inside.name) for file in held.pictures]
        unused.add(held)
    if not found:
        hint = "" if pictures_in(folder) else f" (isofed reads {', '.join(sorted(SUFFIXES))})"
        raise UserError(f"'{folder}' has no folders with pictures{hint}: put those of each class into one")
    return found


def _images(folder: Path, parts: list[list[Path]], shape: tuple[int, int, int]) -> list[npt.NDArray[Any]]:
    """The pictures, and what was lost, from the cache where they were read before: each visit is a new process."""
    import PIL

    try:
        known = fingerprint(file for files in parts for file in files)
    except OSError as error:
        raise UserError(f"the picture '{error.filename}' cannot be read ({error.strerror})") from None
    names = [f"part{number}" for number in range(len(parts))]

    def fill(arrays: dict[str, npt.NDArray[Any]]) -> None:
        wanted = [(arrays[name][n], f) for name, files in zip(names, parts, strict=True) for n, f in enumerate(files)]
        arrays["lost"][:] = lost(decode(wanted, "grey" if shape[2] == 1 else "rgb"))

    version = [DECODING, PIL.__version__]
    about = {"root": str(folder.resolve()), "shape": list(shape), "files": known, "version": version}
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        name: ((len(files), *shape), np.dtype(np.uint8).name) for name, files in zip(names, parts, strict=True)
    }
    arrays = cached("site", about, shapes | {"lost": LOST}, fill)
    return [arrays[name] for name in (*names, "lost")]
