"""Data handed over in Python: arrays of either library are taken, and what is none is refused in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import isofed
from isofed.config import read_yaml, settings
from isofed.data import Dataset, Part, load
from isofed.errors import UserError

PICTURES = np.arange(20 * 6 * 5 * 3, dtype=np.uint8).reshape(20, 6, 5, 3)
LABELS = np.arange(20) % 4


def build(**changed: Any) -> Dataset:
    parts = {"train": Part(PICTURES, LABELS), "test": Part(PICTURES[:4], LABELS[:4])}
    return Dataset.build(**{"name": "mine", "classes": list("abcd"), **parts, **changed})


def test_numpy_arrays_are_taken_as_tensors_are() -> None:
    own = build()
    same = Part(torch.from_numpy(PICTURES), torch.from_numpy(LABELS))
    assert own.fingerprint == build(train=same).fingerprint
    assert own.train.images.dtype == torch.uint8 and own.train.labels.dtype == torch.int64
    small = Part(PICTURES, LABELS.astype(np.uint8), domains=LABELS.astype(np.int32))
    assert small.labels.tolist() == LABELS.tolist() and small.domains is not None
    assert small.domains.dtype == torch.int64
    swapped = PICTURES.astype(">f4")
    assert torch.equal(Part(swapped, LABELS).images, torch.from_numpy(PICTURES).float())


def test_the_outcome_does_not_depend_on_the_library(tmp_path: Path) -> None:
    words: dict[str, Any] = {"partition": "iid", "clients": 2, "rounds": 1, "model": "mlp"}
    one = isofed.Federation(dataset=build(), **words).fit()
    other = build(train=Part(torch.from_numpy(PICTURES), torch.from_numpy(LABELS)))
    assert one.loss == isofed.Federation(dataset=other, **words).fit().loss


def test_a_name_beside_the_data_must_be_theirs(tmp_path: Path) -> None:
    words: dict[str, Any] = {"partition": "iid", "clients": 2, "rounds": 1, "model": "mlp", "executor": "serial"}
    name = "synthetic:samples=40,test=20"
    said = f"data={name} and the data set 'mine' in dataset= are not the same: give one of them"
    with pytest.raises(UserError, match=said):
        isofed.Federation(dataset=build(), data=name, out=tmp_path / "both", **words)
    with pytest.raises(UserError, match=said):
        isofed.compare(["fedavg"], dataset=build(), data=name, out=tmp_path / "both", **words)
    with pytest.raises(UserError, match=said):
        isofed.tune("fedavg", {"data": [name]}, dataset=build(), out=tmp_path / "both", **words)
    assert not (tmp_path / "both").exists()
    isofed.Federation(dataset=load(name), data=name, out=tmp_path / "run", **words).fit()
    assert isofed.Federation.resume(tmp_path / "run", rounds=2).fit().rounds == 2
    isofed.compare(["fedavg"], dataset=load(name), data=name, out=tmp_path / "table", **words)
    assert read_yaml(tmp_path / "table" / "fedavg" / "seed-0")["data"] == name


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        ([[1]], LABELS, "images must be a PyTorch tensor or a NumPy array of uint8 or float32, .* not a list"),
        (PICTURES, None, "labels must be a PyTorch tensor or a NumPy array of whole numbers, .* not None"),
        (PICTURES, np.array(["a"] * 20), "labels must be .* not a NumPy array of <U1"),
        (PICTURES, LABELS.astype(float), "labels must be int64 .*, not float64"),
        (PICTURES.astype(np.int64), LABELS, "images must be uint8 or float32, not int64"),
    ],
)
def test_other_things_are_refused_in_a_sentence(images: Any, labels: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Part(images, labels)


def test_pictures_in_the_layout_of_pytorch_are_refused() -> None:
    turned = PICTURES.transpose(0, 3, 1, 2)
    with pytest.raises(
        UserError, match=r"\[20, 3, 6, 5\], which look like \[N, C, H, W\].*images.permute\(0, 2, 3, 1\)"
    ):
        build(train=Part(turned, LABELS), test=Part(turned[:4], LABELS[:4]))
    back = torch.from_numpy(np.ascontiguousarray(turned)).permute(0, 2, 3, 1)
    assert build(train=Part(back, LABELS)).fingerprint == build().fingerprint
    many = np.zeros((20, 4, 4, 2), dtype=np.float32)  # two channels, and not more rows than a picture may have
    assert build(train=Part(many, LABELS), test=Part(many[:4], LABELS[:4])).shape == (2, 4, 4)


def test_classes_may_be_a_number() -> None:
    assert build(classes=4).classes == ("0", "1", "2", "3")
    with pytest.raises(UserError, match="the classes of data set 'mine' must be a list of names, not 'abcd'"):
        build(classes="abcd")
    with pytest.raises(UserError, match=r"must be a list of names, not \[0, 1, 2, 3\]"):
        build(classes=[0, 1, 2, 3])


def test_a_torch_dataset_is_refused_with_what_to_make_of_it() -> None:
    theirs: Any = TensorDataset(torch.zeros(4, 3, 6, 5), torch.arange(4))
    how = r"Dataset.build\(NAME, classes=NAMES, train=Part\(images, labels\).*permute\(0, 2, 3, 1\)"
    for wrong in ({"dataset": theirs}, {"data": theirs}):
        with pytest.raises(UserError, match=f"TensorDataset: make one with isofed.data.{how}"):
            isofed.Federation(**wrong)
    with pytest.raises(UserError, match="train of data set 'mine' is a TensorDataset: it must be Part"):
        build(train=theirs)
    with pytest.raises(UserError, match="one that you have made is given as dataset="):
        settings({"data": build()})
    assert settings({"data": Path("digits")}).data == "digits"


def test_a_data_set_shows_itself_in_one_line() -> None:
    assert repr(build()) == "Dataset('mine': 20 train, 4 test, pictures 6x5x3, 4 classes)"
    assert repr(build().train) == "Part(20 pictures, uint8 [6, 5, 3])"
    of_two = Part(PICTURES, LABELS, LABELS % 2)
    assert repr(build(train=of_two, test=of_two, domains=["x", "y"])).endswith("4 classes, 2 domains)")
