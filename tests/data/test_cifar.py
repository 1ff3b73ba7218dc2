"""CIFAR-10 and CIFAR-100 in both published forms, and every state their files may be in."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from isofed import data
from isofed.data.sources import published
from isofed.errors import UserError
from tests.data.test_pickled import Hostile, python2

Array = npt.NDArray[Any]
Write = Callable[[Any], bytes]

TEN = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FINE = tuple(f"fine {i}" for i in range(100))
COARSE = tuple(f"coarse {i}" for i in range(20))
WRITERS: dict[str, Write] = {
    "python2": python2,
    **{f"protocol{p}": partial(pickle.dumps, protocol=p) for p in (2, 3, 4)},
}


def drawn(count: int, seed: int) -> Array:
    """Pictures [N, H, W, C], each pixel a number of its own."""
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), np.uint8)


def rows(images: Array) -> Array:
    """What the publisher says of a row: 1024 red values, row by row, then green, then blue."""
    return np.stack([np.concatenate([i[:, :, c].reshape(-1) for c in range(3)]) for i in images])


TRAIN, TEST = drawn(15, 1), drawn(4, 2)
TRAIN_LABELS, TEST_LABELS = [(7 * i + 3) % 10 for i in range(15)], [9, 0, 5, 5]
TRAIN100, TEST100 = drawn(120, 3), drawn(5, 4)
FINE_TRAIN, FINE_TEST = [(13 * i + 1) % 100 for i in range(120)], [99, 0, 50, 19, 20]


def coarse(fine: list[int]) -> list[int]:
    return [f % 20 for f in fine]


def ten_binary(parent: Path) -> Path:
    folder = parent / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for i in range(5):
        records = zip(TRAIN_LABELS[3 * i : 3 * i + 3], rows(TRAIN[3 * i : 3 * i + 3]), strict=True)
        (folder / f"data_batch_{i + 1}.bin").write_bytes(b"".join(bytes([y]) + x.tobytes() for y, x in records))
    test = zip(TEST_LABELS, rows(TEST), strict=True)
    (folder / "test_batch.bin").write_bytes(b"".join(bytes([y]) + x.tobytes() for y, x in test))
    (folder / "batches.meta.txt").write_text("\n".join(TEN) + "\n\n")  # the published file ends in an empty line
    return folder


def ten_python(parent: Path, write: Write = python2) -> Path:
    folder = parent / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for i in range(5):
        part = slice(3 * i, 3 * i + 3)
        batch = {"batch_label": f"training batch {i + 1} of 5", "labels": TRAIN_LABELS[part], "data": rows(TRAIN[part])}
        (folder / f"data_batch_{i + 1}").write_bytes(write(batch | {"filenames": ["a.png", "b.png", "c.png"]}))
    (folder / "test_batch").write_bytes(write({"labels": TEST_LABELS, "data": rows(TEST)}))
    (folder / "batches.meta").write_bytes(write({"num_cases_per_batch": 3, "label_names": list(TEN), "num_vis": 3072}))
    return folder


def hundred_binary(parent: Path) -> Path:
    folder = parent / "cifar-100-binary"
    folder.mkdir(parents=True)
    for name, images, fine in (("train", TRAIN100, FINE_TRAIN), ("test", TEST100, FINE_TEST)):
        records = zip(coarse(fine), fine, rows(images), strict=True)
        (folder / f"{name}.bin").write_bytes(b"".join(bytes([c, f]) + x.tobytes() for c, f, x in records))
    (folder / "fine_label_names.txt").write_text("\n".join(FINE))
    (folder / "coarse_label_names.txt").write_text("\n".join(COARSE))
    return folder


def hundred_python(parent: Path, write: Write = python2) -> Path:
    folder = parent / "cifar-100-python"
    folder.mkdir(parents=True)
    for name, images, fine in (("train", TRAIN100, FINE_TRAIN), ("test", TEST100, FINE_TEST)):
        batch = {"fine_labels": fine, "coarse_labels": coarse(fine), "data": rows(images)}
        (folder / name).write_bytes(write(batch))
    (folder / "meta").write_bytes(write({"fine_label_names": list(FINE), "coarse_label_names": list(COARSE)}))
    return folder


def holds(part: data.Part, images: Array, labels: list[int]) -> bool:
    return np.array_equal(part.images.numpy(), images) and part.labels.tolist() == labels


# What is read


@pytest.mark.parametrize("form", ["binary", *WRITERS])
def test_cifar10_is_read_in_every_form(tmp_path: Path, form: str) -> None:
    folder = ten_binary(tmp_path) if form == "binary" else ten_python(tmp_path, WRITERS[form])
    for root in (folder, tmp_path):
        found = data.load("cifar10", root=str(root))
        assert found.name == "cifar10" and found.classes == TEN and found.shape == (3, 32, 32)
        assert found.train.images.dtype == torch.uint8
        assert holds(found.train, TRAIN, TRAIN_LABELS) and holds(found.test, TEST, TEST_LABELS)


@pytest.mark.parametrize("form", ["binary", *WRITERS])
def test_cifar100_is_read_in_every_form_with_both_labels(tmp_path: Path, form: str) -> None:
    folder = hundred_binary(tmp_path) if form == "binary" else hundred_python(tmp_path, WRITERS[form])
    for root in (folder, tmp_path):
        fine = data.load("cifar100", root=str(root))
        assert (fine.name, fine.classes, fine.shape) == ("cifar100", FINE, (3, 32, 32))
        assert holds(fine.train, TRAIN100, FINE_TRAIN) and holds(fine.test, TEST100, FINE_TEST)
        wide = data.load("cifar100:labels=coarse", root=str(root))
        assert (wide.name, wide.classes) == ("cifar100-coarse", COARSE)
        assert holds(wide.train, TRAIN100, coarse(FINE_TRAIN)) and holds(wide.test, TEST100, coarse(FINE_TEST))


def test_both_forms_are_the_same_data_set(tmp_path: Path) -> None:
    for name, *makers in (("cifar10", ten_binary, ten_python), ("cifar100", hundred_binary, hundred_python)):
        marks = {data.load(name, root=str(make(tmp_path / "alone" / make.__name__))).fingerprint for make in makers}
        assert len(marks) == 1


def test_many_records_are_read_a_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hundred_binary(tmp_path)
    whole = data.load("cifar100", root=str(tmp_path)).fingerprint
    for block in (1, 3074 * 7, 3074 * 120):
        monkeypatch.setattr(published, "_BLOCK", block)
        assert data.load("cifar100", root=str(tmp_path)).fingerprint == whole


def test_coarse_names_are_known_where_the_file_is_left_out(tmp_path: Path) -> None:
    (hundred_binary(tmp_path) / "coarse_label_names.txt").unlink()
    names = data.load("cifar100:coarse", root=str(tmp_path)).classes
    assert len(set(names)) == 20 and list(names) == sorted(names)
    assert names[0] == "aquatic_mammals" and names[-1] == "vehicles_2"


def test_normalisation_is_the_data_sets_own_or_that_of_feddecorr(tmp_path: Path) -> None:
    ten_binary(tmp_path)
    hundred_binary(tmp_path)
    cases = {
        "cifar10": ((0.49139968, 0.48215827, 0.44653124), (0.24703233, 0.24348505, 0.26158768)),
        "cifar10:norm=feddecorr": ((0.491373, 0.482353, 0.446667), (0.247059, 0.243529, 0.261569)),
        "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        "cifar100:norm=feddecorr": ((0.50708, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615)),
    }
    for text, (mean, std) in cases.items():
        found = data.load(text, root=str(tmp_path))
        assert found.mean == pytest.approx(mean, abs=5e-7) and found.std == pytest.approx(std, abs=5e-7)


def test_isofed_data_names_the_folder_when_root_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ten_binary(tmp_path / "a")
    for value in (folder, folder.parent):
        monkeypatch.setenv("ISOFED_DATA", str(value))
        assert len(data.load("cifar10").train) == 15
    with pytest.raises(UserError, match="there is no data set 'cifar10' in"):
        data.load("cifar10", root=str(tmp_path))
    monkeypatch.setenv("ISOFED_DATA", str(tmp_path / "none"))
    with pytest.raises(UserError, match="none' does not exist: ISOFED_DATA must be the folder that data set 'cifar10'"):
        data.load("cifar10")
    for unset in (True, False):
        monkeypatch.setenv("ISOFED_DATA", "")
        if unset:
            monkeypatch.delenv("ISOFED_DATA")
        with pytest.raises(UserError, match="'cifar10' needs the folder it was unpacked into: give root=PATH or set"):
            data.load("cifar10")


def test_the_complete_form_is_taken_where_the_other_lacks_a_file(tmp_path: Path) -> None:
    (ten_binary(tmp_path) / "data_batch_3.bin").unlink()
    ten_python(tmp_path)
    assert len(data.load("cifar10", root=str(tmp_path)).train) == 15


# What is refused


def refused(text: str, root: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        data.load(text, root=str(root))
    assert "\n" not in str(error.value)


def test_missing_folders_and_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "archive.tar.gz").write_bytes(b"x")
    refused("cifar10", tmp_path / "none", "none' does not exist: root must be the folder that data set 'cifar10'")
    refused("cifar10", tmp_path / "archive.tar.gz", "gz' is a file: root must be the folder that data set 'cifar10'")
    refused("cifar100", tmp_path, "no data set 'cifar100' in .*cifar-100-binary/ with train.bin, test.bin, fine_label_")
    for make, name in ((ten_binary, "cifar10"), (ten_python, "cifar10"), (hundred_binary, "cifar100")):
        base = tmp_path / make.__name__
        folder = make(base)
        files = [f for f in folder.iterdir() if f.name != "coarse_label_names.txt"]
        for file in files:
            kept = file.rename(tmp_path / "aside")
            refused(name, base, f"'{folder}' has no file '{file.name}': data set '{name}' needs it")
            kept.rename(file)
        assert len(files) in (3, 7) and data.load(name, root=str(base))


def test_a_truncated_binary_file_is_refused(tmp_path: Path) -> None:
    file = ten_binary(tmp_path) / "data_batch_4.bin"
    file.write_bytes(file.read_bytes()[:-1])
    refused("cifar10", tmp_path, r"data_batch_4.bin' has 9,218 bytes: it must be 3,073 for each picture, so it is not")
    file.write_bytes(b"")
    refused("cifar10", tmp_path, r"data_batch_4.bin' has 0 bytes: it must be 3,073 for each picture")
    os.truncate(file, 3073 * 10**9 // 2)  # sparse: it takes no room, but seems to hold 500 million pictures
    refused("cifar10", tmp_path, r"data_batch_4.bin' has 1,536,500,000,000 bytes: isofed reads at most 1,073,741,824")


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = hundred_binary(tmp_path) / "train.bin"
    monkeypatch.setattr(published, "record_count", lambda *_: 121)  # as it was a moment before
    with pytest.raises(UserError, match="train.bin' became shorter while it was read"):
        list(published.records(file, 3074))


def test_wrong_labels_are_refused(tmp_path: Path) -> None:
    file = ten_binary(tmp_path) / "test_batch.bin"
    content = bytearray(file.read_bytes())
    content[2 * 3073] = 10
    file.write_bytes(content)
    refused("cifar10", tmp_path, "test_batch.bin' has the label 10 at picture 2: it must be 0 to 9")
    file = hundred_binary(tmp_path) / "train.bin"
    content = bytearray(file.read_bytes())
    content[3074] = 20
    file.write_bytes(content)
    assert data.load("cifar100", root=str(tmp_path))
    refused("cifar100:coarse", tmp_path, "train.bin' has the label 20 at picture 1: it must be 0 to 19")


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    names = ten_binary(tmp_path) / "batches.meta.txt"
    names.write_text("cat\ndog\n")
    refused("cifar10", tmp_path, "meta.txt' has 2 lines with a name: it must hold 10 class names, one a line")
    names.write_bytes(b"\xff\xfe\x00")
    refused("cifar10", tmp_path, "meta.txt' is not a text file: it must hold 10 class names")
    meta = hundred_python(tmp_path) / "meta"
    for wrong in ({"fine_label_names": ["a"]}, {}, {"fine_label_names": "a"}, {"fine_label_names": [1] * 100}):
        meta.write_bytes(python2(wrong))
        refused("cifar100", tmp_path, "meta' must hold 'fine_label_names', a list of 100 class names")


def test_a_wrong_python_version_is_refused(tmp_path: Path) -> None:
    file = hundred_python(tmp_path) / "test"
    good = {"fine_labels": FINE_TEST, "data": rows(TEST100)}
    picture = r"test' must hold 'data', an array of uint8 \[N, 3072\]"
    labels = "test' must hold 'fine_labels', a list of 5 whole numbers, one for each picture"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"data": rows(TEST100)[:, :-1].copy()}, picture),
        ({"data": [1, 2]}, picture),
        ({"fine_labels": FINE_TEST[:-1]}, labels),
        ({"fine_labels": [1, 2, 3, 4, "x"]}, labels),
        ({"fine_labels": [1, 2, 3, 4, True]}, labels),
        ({"fine_labels": "abcde"}, labels),
        ({"fine_labels": [1, 2, 3, 100, 4]}, "test' has the label 100 at picture 3: it must be 0 to 99"),
        ({"fine_labels": [-1, 2, 3, 1, 4]}, "test' has the label -1 at picture 0: it must be 0 to 99"),
    ]
    for change, message in cases:
        file.write_bytes(python2(good | change))
        refused("cifar100", tmp_path, message)
    file.write_bytes(pickle.dumps(good | {"fine_labels": [2**200, 0, 0, 0, 0]}, protocol=2))
    refused("cifar100", tmp_path, f"has the label {2**200} at picture 0")
    file.write_bytes(python2(good)[:-2000])
    refused("cifar100", tmp_path, "test' ends too early")
    proof = tmp_path / "proof"
    file.write_bytes(pickle.dumps(good | {"x": Hostile(os.system, f"touch {proof}")}, protocol=2))
    refused("cifar100", tmp_path, "test' asks for 'posix.system', which data have no need of.*nothing in it was run")
    assert not proof.exists()


def test_options_are_checked(tmp_path: Path) -> None:
    refused("cifar100:labels=rough", tmp_path, "labels of data set 'cifar100' must be one of fine, coarse, not 'rough'")
    refused("cifar10:norm=mine", tmp_path, "norm of data set 'cifar10' must be one of own, feddecorr, not 'mine'")


def test_a_file_that_may_not_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ten_binary(tmp_path)

    def refuse(path: Path, *_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    for method, place in (("open", "data_batch_1.bin"), ("is_file", "")):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, refuse)
            refused("cifar10", tmp_path, rf"{place}' cannot be read \(Permission denied\)")
