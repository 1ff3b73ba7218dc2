"""A site's own folder of pictures. Unlike a data set of its own, a site need not have every class, or more than one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isofed.data import Dataset, Part
from isofed.data.base import held_out
from isofed.data.cache import cached, fingerprint
from isofed.data.sources.decode import DECODING, SUFFIXES, contents, decode, folders_in, pictures_in
from isofed.data.sources.unused import LOST, Unused, lost, lost_notes, strays
from isofed.errors import UserError
from isofed.flower.terms import Refusal

Files = list[tuple[Path, str]]  # picture, class


def read_pictures(folder: Path, shape: tuple[int, int, int]) -> Dataset:
    """Pictures in class folders, optionally under train/ and test/, resized to the federation's shape."""
    channels, height, width = shape
    if height != width or channels not in (1, 3):
        raise Refusal(
            f"makes pictures square, with 1 or 3 channels, which shape {list(shape)} is not; "
            "federation/data.py can read them in another way"
        )
    train, test = folder / "train", folder / "test"
    divided = train.is_dir() and test.is_dir() and bool(folders_in(train))
    unused, roots = Unused(), [train, test] if divided else [folder]
    parts = [_files(part, unused) for part in roots]
    notes = strays(roots, "class") + unused.notes()
    classes = sorted({name for files in parts for _, name in files})
    number = {name: place for place, name in enumerate(classes)}
    labels = [torch.tensor([number[name] for _, name in files]) for files in parts]
    if not divided:
        parts, labels = _divided(folder.name, parts[0], labels[0])
    paths = [[file for file, _ in files] for files in parts]
    *images, missed = _images(folder, paths, (height, width, channels))
    notes += lost_notes(missed, [file for files in paths for file in files])
    made = [Part(torch.from_numpy(array), label) for array, label in zip(images, labels, strict=True)]
    half = (0.5,) * channels
    return Dataset(folder.name, tuple(classes), made[0], made[1], half, half, notes=tuple(notes))


def _files(folder: Path, unused: Unused) -> Files:
    """The pictures of all class folders; an empty one does no harm."""
    found: Files = []
    for inside in folders_in(folder):
        held = contents(inside)
        found += [(file, inside.name) for file in held.pictures]
        unused.add(held)
    if not found:
        hint = "" if pictures_in(folder) else f" (isofed reads {', '.join(sorted(SUFFIXES))})"
        raise UserError(f"'{folder}' has no folders with pictures{hint}: put those of each class into one")
    return found


def _divided(name: str, files: Files, labels: Tensor) -> tuple[list[Files], list[Tensor]]:
    """Training and test pictures, by the rule that divides every data set without a test part, before any is read."""
    places = torch.arange(len(files)).view(torch.uint8).view(-1, 1, 1, 8)  # in the place of pictures
    parts = held_out(name, Part(places, labels))
    chosen = [part.images.view(-1).view(torch.int64).tolist() for part in parts]
    return [[files[i] for i in index] for index in chosen], [part.labels for part in parts]


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
