"""CIFAR-10 and CIFAR-100 as their publisher packs them: the binary version and the Python version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from isofed.data.base import Dataset, Part
from isofed.data.sources import Progress, pickled
from isofed.data.sources.published import Bytes, Layout, class_names, class_numbers, fill, locate, part, pictures
from isofed.errors import UserError

SIDE = 32
Norm = tuple[tuple[float, ...], tuple[float, ...]]

_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
TEN_BINARY = Layout(
    ("cifar-10-batches-bin",), (*((f"{n}.bin",) for n in (*_BATCHES, "test_batch")), ("batches.meta.txt",))
)
TEN_PYTHON = Layout(("cifar-10-batches-py",), tuple((n,) for n in (*_BATCHES, "test_batch", "batches.meta")))
HUNDRED_BINARY = Layout(("cifar-100-binary",), (("train.bin",), ("test.bin",), ("fine_label_names.txt",)))
HUNDRED_PYTHON = Layout(("cifar-100-python",), (("train",), ("test",), ("meta",)))

TEN_NORMS: dict[str, Norm] = {
    "own": ((0.49139968, 0.48215827, 0.44653124), (0.24703233, 0.24348505, 0.26158768)),
    "feddecorr": ((125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)),
}
HUNDRED_NORMS: dict[str, Norm] = {
    "own": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "feddecorr": ((0.50708, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615)),
}

# For the copies of the binary version that leave out coarse_label_names.txt.
COARSE = (
    "aquatic_mammals", "fish", "flowers", "food_containers", "fruit_and_vegetables", "household_electrical_devices",
    "household_furniture", "insects", "large_carnivores", "large_man-made_outdoor_things",
    "large_natural_outdoor_scenes", "large_omnivores_and_herbivores", "medium_mammals", "non-insect_invertebrates",
    "people", "reptiles", "small_mammals", "trees", "vehicles_1", "vehicles_2",
)  # fmt: skip


@dataclass(frozen=True)
class Cifar10:
    """CIFAR-10, 32x32 colour, 10 classes, 60,000 pictures; root: the folder of its binary or Python version."""

    norm: Literal["own", "feddecorr"] = "own"

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        layout, (*batches, last, meta) = locate(root, "cifar10", (TEN_BINARY, TEN_PYTHON))
        if layout is TEN_BINARY:
            train, test = (_binary(files, 1, 0, 10) for files in (batches, [last]))
            classes = class_names(meta, 10)
        else:
            train, test = (_python(files, "labels", 10) for files in (batches, [last]))
            classes = _python_names(meta, "label_names", 10)
        return Dataset.build("cifar10", classes, train, test, *TEN_NORMS[self.norm])


@dataclass(frozen=True)
class Cifar100:
    """CIFAR-100, 32x32 colour, 100 or 20 classes, 60,000 pictures; root: the folder of its binary or Python version."""

    labels: Literal["fine", "coarse"] = "fine"
    norm: Literal["own", "feddecorr"] = "own"

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        layout, (first, last, meta) = locate(root, "cifar100", (HUNDRED_BINARY, HUNDRED_PYTHON))
        count = 100 if self.labels == "fine" else 20
        if layout is HUNDRED_BINARY:
            train, test = (_binary([file], 2, int(self.labels == "fine"), count) for file in (first, last))
            names = meta.with_name(f"{self.labels}_label_names.txt")
            classes = COARSE if count == 20 and not names.exists() else class_names(names, count)
        else:
            train, test = (_python([file], f"{self.labels}_labels", count) for file in (first, last))
            classes = _python_names(meta, f"{self.labels}_label_names", count)
        name = "cifar100" if self.labels == "fine" else "cifar100-coarse"
        return Dataset.build(name, classes, train, test, *HUNDRED_NORMS[self.norm])


def _joined(parts: Sequence[Part]) -> Part:
    if len(parts) == 1:
        return parts[0]
    return Part(torch.cat([p.images for p in parts]), torch.cat([p.labels for p in parts]))


def _binary(files: Sequence[Path], head: int, column: int, classes: int) -> Part:
    """The records of these files; the label is one of the bytes before each picture."""
    parts = []
    for file in files:
        heads, images = pictures(file, head, SIDE)
        parts.append(part(images, class_numbers(file, heads[:, column], classes)))
    return _joined(parts)


def _python(files: Sequence[Path], key: str, classes: int) -> Part:
    parts = []
    for file in files:
        found = pickled.read(file)
        rows, labels = found.get("data"), found.get(key)
        size = 3 * SIDE * SIDE
        if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.shape[1] != size:
            raise UserError(f"'{file}' must hold 'data', an array of uint8 [N, {size}]: is it a file of this data set?")
        if not isinstance(labels, list) or {*map(type, labels)} != {int} or len(labels) != len(rows):
            raise UserError(f"'{file}' must hold '{key}', a list of {len(rows):,} whole numbers, one for each picture")
        # As objects, because a number in a pickle may be too large for any type of NumPy's.
        numbers = class_numbers(file, np.array(labels, dtype=object), classes)
        images: Bytes = np.empty((len(rows), SIDE, SIDE, 3), np.uint8)
        fill(images, rows.reshape(-1, 3, SIDE, SIDE))
        parts.append(part(images, numbers))
    return _joined(parts)


def _python_names(file: Path, key: str, count: int) -> tuple[str, ...]:
    names: Any = pickled.read(file).get(key)
    if not isinstance(names, list) or len(names) != count or not {*map(type, names)} <= {str, bytes}:
        raise UserError(f"'{file}' must hold '{key}', a list of {count} class names: is it a file of this data set?")
    return tuple(map(pickled.text, names))
