"""STL-10 as its publisher packs it: planes stored column by column, and labels from 1."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isofed.data.base import Dataset, Part
from isofed.data.sources import Progress
from isofed.data.sources.published import Layout, class_names, class_numbers, locate, part, pictures, records
from isofed.errors import UserError

SIDE = 96
FILES = Layout(
    ("stl10_binary",), (("train_X.bin",), ("train_y.bin",), ("test_X.bin",), ("test_y.bin",), ("class_names.txt",))
)


@dataclass(frozen=True)
class Stl10:
    """STL-10's labelled part, 96x96 colour, 10 classes, 13,000 pictures; root: the folder of its binary files."""

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        _, files = locate(root, "stl10", [FILES])
        train, test = _part(files[0], files[1]), _part(files[2], files[3])
        return Dataset.build("stl10", class_names(files[4], 10), train, test, mean=(0.5,) * 3, std=(0.5,) * 3)


def _part(images: Path, labels: Path) -> Part:
    numbers = np.concatenate([block[:, 0].copy() for block in records(labels, 1, "label")])
    _, pixels = pictures(images, 0, SIDE, by_column=True)
    if len(pixels) != len(numbers):
        raise UserError(
            f"'{images}' has {len(pixels):,} pictures but '{labels.name}' has {len(numbers):,} labels: they must match"
        )
    return part(pixels, class_numbers(labels, numbers, 10, first=1))
