"""MNIST and Fashion-MNIST as published, and every state their files may be in."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from isofed import data
from isofed.errors import UserError

RNG = np.random.default_rng(0)
TRAIN, TEST = (RNG.integers(0, 256, (n, 28, 28), np.uint8) for n in (13, 4))
TRAIN_LABELS, TEST_LABELS = [(7 * i + 2) % 10 for i in range(13)], [9, 0, 0, 4]
FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def pictures(images: np.ndarray) -> bytes:
    return struct.pack(">iiii", 2051, len(images), 28, 28) + b"".join(int(v).to_bytes() for v in images.flat)


def labels(values: list[int]) -> bytes:
    return struct.pack(">ii", 2049, len(values)) + bytes(values)


def written(folder: Path, sign: str = "-", packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    contents = (pictures(TRAIN), labels(TRAIN_LABELS), pictures(TEST), labels(TEST_LABELS))
    for name, content in zip(FILES, contents, strict=True):
        name = f"{name.replace('-idx', f'{sign}idx')}-ubyte{'.gz' if packed else ''}"
        (folder / name).write_bytes(gzip.compress(content) if packed else content)
    return folder


def refused(root: Path, message: str, name: str = "mnist") -> None:
    with pytest.raises(UserError, match=message) as error:
        data.load(name, root=str(root))
    assert "\n" not in str(error.value)


def right(found: data.Dataset) -> bool:
    parts = ((found.train, TRAIN, TRAIN_LABELS), (found.test, TEST, TEST_LABELS))
    return all(
        torch.equal(part.images, torch.from_numpy(images[..., None])) and part.labels.tolist() == values
        for part, images, values in parts
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sign", ["-", "."])
@pytest.mark.parametrize("folder", ["", "MNIST/raw", "MNIST", "mnist"])
def test_mnist_is_read_in_every_form(tmp_path: Path, folder: str, sign: str, packed: bool) -> None:
    written(tmp_path / folder, sign, packed)
    for root in (tmp_path, tmp_path / folder):
        found = data.load("mnist", root=str(root))
        assert right(found)
        assert (found.name, found.shape, found.classes) == ("mnist", (1, 28, 28), tuple("0123456789"))
        assert (found.mean, found.std) == ((0.1307,), (0.3081,))


@pytest.mark.parametrize("folder", ["", "FashionMNIST/raw", "fashion-mnist", "data/fashion"])
def test_fashion_mnist_has_names_and_numbers_of_its_own(tmp_path: Path, folder: str) -> None:
    written(tmp_path / folder, packed=True)
    found = data.load("fashion-mnist", root=str(tmp_path))
    assert right(found)
    assert (found.name, found.mean, found.std) == ("fashion-mnist", (0.2860,), (0.3530,))
    assert found.classes[0] == "T-shirt/top" and found.classes[9] == "Ankle boot" and len(found.classes) == 10


def test_the_two_may_share_a_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    other = written(tmp_path / "FashionMNIST" / "raw")
    (other / "t10k-labels-idx1-ubyte").write_bytes(labels([1, 1, 1, 1]))
    monkeypatch.setenv("ISOFED_DATA", str(tmp_path))
    assert data.load("mnist").test.labels.tolist() == TEST_LABELS
    assert data.load("fashion-mnist").test.labels.tolist() == [1, 1, 1, 1]


def test_a_name_may_lie_about_compression(tmp_path: Path) -> None:
    written(tmp_path)
    for name in FILES:
        file = tmp_path / f"{name}-ubyte"
        file.write_bytes(gzip.compress(file.read_bytes()))
    assert right(data.load("mnist", root=str(tmp_path)))


def test_missing_files_are_named(tmp_path: Path) -> None:
    refused(tmp_path, "there is no data set 'mnist' in .*MNIST/raw/ with train-images-idx3-ubyte, train-labels-idx1-")
    refused(tmp_path, "there is no data set 'fashion-mnist' in .*FashionMNIST/raw/ with", "fashion-mnist")
    written(tmp_path)
    for name in FILES:
        kept = (tmp_path / f"{name}-ubyte").rename(tmp_path / "aside")
        refused(tmp_path, f"has no file '{name}-ubyte': data set 'mnist' needs it")
        kept.rename(tmp_path / f"{name}-ubyte")


def head(*numbers: int) -> bytes:
    return struct.pack(f">{len(numbers)}I", *numbers)


IMAGES = {
    "empty": (b"", "has the magic number 0, not 2051: it is no IDX file of pictures"),
    "three bytes": (b"\0\0\x08", "has the magic number 0, not 2051"),
    "only a magic number": (head(2051), r"has pictures of \[\], not \[28, 28\]"),
    "labels": (labels([1, 2, 3, 4]), "has the magic number 2049, not 2051: it is no IDX file of pictures"),
    "little-endian": (struct.pack("<IIII", 2051, 4, 28, 28), "has the magic number 50855936, not 2051"),
    "other sizes": (head(2051, 4, 32, 32), r"has pictures of \[32, 32\], not \[28, 28\]: it is no file of this data"),
    "none": (head(2051, 0, 28, 28), "says that it holds 0 pictures: isofed reads 1 to"),
    "billions": (head(2051, 2**32 - 1, 28, 28), "says that it holds 4,294,967,295 pictures: isofed reads 1 to 1,073,"),
    "very many": (head(2051, 10**6, 28, 28), "says that it holds 1,000,000 pictures, 784,000,000 bytes, but it has le"),
    "truncated": (pictures(TEST)[:-1], "says that it holds 4 pictures, 3,136 bytes, but it has less"),
    "too long": (pictures(TEST) + b"x", "says that it holds 4 pictures, 3,136 bytes, but it has more"),
    "one too few": (pictures(TEST[:3]), "has 3 pictures but 't10k-labels-idx1-ubyte.*' has 4 labels: they must match"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("content", "message"), IMAGES.values(), ids=IMAGES)
def test_wrong_pictures_are_refused(tmp_path: Path, content: bytes, message: str, packed: bool) -> None:
    file = written(tmp_path, packed=packed) / f"t10k-images-idx3-ubyte{'.gz' if packed else ''}"
    file.write_bytes(gzip.compress(content) if packed else content)
    refused(tmp_path, f"'{file}' {message}")


LABELS = {
    "pictures": (pictures(TEST), "has the magic number 2051, not 2049: it is no IDX file of labels"),
    "truncated": (labels([1, 2, 3, 4])[:-1], "says that it holds 4 labels, 4 bytes, but it has less"),
    "no head": (b"\0\0\x08\x01", "says that it holds 0 labels"),
    "eleven": (labels([1, 2, 10, 4]), "has the label 10 at picture 2: it must be 0 to 9"),
    "billions": (head(2049, 2**32 - 1), "says that it holds 4,294,967,295 labels: isofed reads 1 to 1,073,741,824 byt"),
}


@pytest.mark.parametrize(("content", "message"), LABELS.values(), ids=LABELS)
def test_wrong_labels_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = written(tmp_path) / "t10k-labels-idx1-ubyte"
    file.write_bytes(content)
    refused(tmp_path, f"'{file}' {message}")


def test_a_broken_gzip_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, packed=True) / "train-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    summed = whole[:-8] + bytes(4) + whole[-4:]
    for content in (whole[:100], whole[:-3], whole[:2], bytes(flipped), summed, whole + b"garbage", b"\x1f\x8b" * 99):
        file.write_bytes(content)
        refused(tmp_path, rf"'{file}' is broken or not complete \(.*\): get this gzip file again")
    file.write_bytes(b"<html>404</html>")
    refused(tmp_path, "has the magic number 1013478509, not 2051")


def test_a_small_file_cannot_fill_the_memory(tmp_path: Path) -> None:
    file = written(tmp_path, packed=True) / "train-labels-idx1-ubyte.gz"
    file.write_bytes(gzip.compress(labels(TRAIN_LABELS) + bytes(1 << 24)))
    refused(tmp_path, "says that it holds 13 labels, 13 bytes, but it has more")


def test_a_file_that_may_not_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)

    def refuse(path: Path, *_: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    refused(tmp_path, r"train-labels-idx1-ubyte' cannot be read \(Permission denied\)")
