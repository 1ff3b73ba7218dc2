"""Tiny ImageNet (Stanford CS231n): 200 classes of ImageNet at 64x64, 500 training and 50 validation pictures each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isofed.data.base import Dataset
from isofed.data.sources import Progress
from isofed.data.sources.pictures import Listing, dataset, find, numbers, pictures, text
from isofed.errors import UserError


@dataclass(frozen=True)
class TinyImageNet:
    """Tiny ImageNet, 200 classes at 64x64, from tiny-imagenet-200/; its validation part is the test part.

    Classes are in the order of their sorted WordNet numbers and have the first name that words.txt gives them (or the
    number, without words.txt). The publishers' test part has no labels and is not read.
    """

    size: int = 64

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        path = find("tiny-imagenet", root, ("wnids.txt", "train", "val"), ("tiny-imagenet-200",))
        known = text(path / "wnids.txt", "tiny-imagenet").split()
        wnids = sorted(set(known))
        if len(wnids) != len(known) or len(wnids) < 2:
            raise UserError(f"'{path / 'wnids.txt'}' must name every class once, and at least two: it has {len(known)}")
        files: list[Path] = []
        labels: list[int] = []
        for label, wnid in enumerate(wnids):
            found = pictures(path / "train" / wnid / "images", "tiny-imagenet")
            files += found
            labels += [label] * len(found)
        count = len(files)
        for file, wnid in _validation(path / "val", set(wnids)):
            files.append(file)
            labels.append(wnids.index(wnid))
        listing = Listing(files, numbers(labels), _names(path / "words.txt", wnids))
        places = np.arange(count), np.arange(count, len(files))
        return dataset("tiny-imagenet", self, listing, places, progress=progress)


def _validation(folder: Path, wnids: set[str]) -> list[tuple[Path, str]]:
    """Picture and class of every line of the annotations: file, class and a box, with tabs between."""
    table = folder / "val_annotations.txt"
    found: dict[Path, str] = {}
    for number, line in enumerate(text(table, "tiny-imagenet").splitlines(), 1):
        cells = line.split("\t")
        if not line.strip():
            continue
        if len(cells) < 2 or cells[1] not in wnids:
            raise UserError(f"line {number} of '{table}' must be a picture, a tab and a class of wnids.txt: {line!r}")
        file = folder / "images" / Path(cells[0]).name
        if not file.is_file():
            raise UserError(f"line {number} of '{table}' names the picture '{file}', which does not exist")
        if file in found:
            raise UserError(f"line {number} of '{table}' names the picture '{file.name}' a second time")
        found[file] = cells[1]
    if not found:
        raise UserError(f"'{table}' names no pictures: the test part of 'tiny-imagenet' needs them")
    return list(found.items())


def _names(words: Path, wnids: list[str]) -> tuple[str, ...]:
    """A name for each class; two classes of one name, such as crane, keep their numbers beside it."""
    if not words.exists():
        return tuple(wnids)
    lines = (line.split("\t", 1) for line in text(words, "tiny-imagenet").splitlines())
    all_names = {cells[0]: cells[1].split(",")[0].strip() for cells in lines if len(cells) == 2}
    names = [all_names.get(wnid) or wnid for wnid in wnids]
    often = Counter(names)
    return tuple(name if often[name] == 1 else f"{name} ({wnid})" for name, wnid in zip(names, wnids, strict=True))
