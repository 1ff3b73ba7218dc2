"""STL-10 as published, and every state its files may be in."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from isofed import data
from isofed.errors import UserError

NAMES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
TRAIN_LABELS, TEST_LABELS = [(3 * i) % 10 + 1 for i in range(12)], [10, 1, 4]
RNG = np.random.default_rng(0)
TRAIN, TEST = (RNG.integers(0, 256, (n, 96, 96, 3), np.uint8) for n in (12, 3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "stl10_binary"
    made.mkdir()
    for name, images, labels in (("train", TRAIN, TRAIN_LABELS), ("test", TEST, TEST_LABELS)):
        # As the publisher says: red, green, blue planes, the pixels of a plane one column after the other.
        columns = [i[:, x, c].tobytes() for i in images for c in range(3) for x in range(96)]
        (made / f"{name}_X.bin").write_bytes(b"".join(columns))
        (made / f"{name}_y.bin").write_bytes(bytes(labels))
    (made / "class_names.txt").write_text("\n".join(NAMES))
    return made


def refused(root: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        data.load("stl10", root=str(root))
    assert "\n" not in str(error.value)


def test_pictures_stand_upright_and_labels_start_at_0(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOFED_DATA", str(folder.parent))
    for root in (str(folder), str(folder.parent), None):
        found = data.load("stl10", root=root)
        assert (found.name, found.classes, found.shape) == ("stl10", NAMES, (3, 96, 96))
        assert (found.mean, found.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        assert torch.equal(found.train.images, torch.from_numpy(TRAIN))
        assert torch.equal(found.test.images, torch.from_numpy(TEST))
        assert found.train.labels.tolist() == [label - 1 for label in TRAIN_LABELS]
        assert found.test.labels.tolist() == [9, 0, 3]


def test_missing_files_are_named(folder: Path) -> None:
    for file in sorted(folder.iterdir()):
        kept = file.rename(folder.parent / "aside")
        refused(folder.parent, f"'{folder}' has no file '{file.name}': data set 'stl10' needs it")
        kept.rename(file)
    empty = folder.parent / "empty"
    empty.mkdir()
    refused(empty, "there is no data set 'stl10' in '.*empty': it needs stl10_binary/ with train_X.bin, train_y.bin, ")


def test_wrong_sizes_are_refused(folder: Path) -> None:
    images, labels = folder / "test_X.bin", folder / "test_y.bin"
    os.truncate(images, 3 * 27648 - 5)
    refused(folder, "test_X.bin' has 82,939 bytes: it must be 27,648 for each picture, so it is not complete")
    os.truncate(images, 2 * 27648)
    refused(folder, "test_X.bin' has 2 pictures but 'test_y.bin' has 3 labels: they must match")
    os.truncate(images, 27648 * 10**7)
    refused(folder, "test_X.bin' has 276,480,000,000 bytes: isofed reads at most 1,073,741,824")
    os.truncate(labels, 0)
    refused(folder, "test_y.bin' has 0 bytes: it must be 1 for each label")


@pytest.mark.parametrize("wrong", [0, 11, 255])
def test_wrong_labels_are_refused(folder: Path, wrong: int) -> None:
    (folder / "train_y.bin").write_bytes(bytes([*TRAIN_LABELS[:7], wrong, *TRAIN_LABELS[8:]]))
    refused(folder, f"train_y.bin' has the label {wrong} at picture 7: it must be 1 to 10")


def test_wrong_names_are_refused(folder: Path) -> None:
    (folder / "class_names.txt").write_text("cat\n" * 9)
    refused(folder, "class_names.txt' has 9 lines with a name: it must hold 10 class names, one a line")
