"""A user's own .npz files: every form they may have, and what is said of those that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from isofed import data
from isofed.errors import UserError
from tests.data.picture_tools import rows

Array = npt.NDArray[Any]


def arrays(count: int = 20, shape: tuple[int, ...] = (6, 5, 3), dtype: str = "uint8") -> tuple[Array, Array]:
    rng = np.random.default_rng(count)
    return rng.integers(0, 256, (count, *shape)).astype(dtype), np.arange(count) % 2


def save(path: Path, **values: Any) -> str:
    np.savez(path, **values)
    return str(path)


def test_npz_with_both_parts(tmp_path: Path) -> None:
    (x, y), (a, b) = arrays(20), arrays(8)
    path = save(tmp_path / "mine.npz", x_train=x, y_train=y[:, None], x_test=a, y_test=b.astype(np.uint8))
    for made in (data.load(path), data.load("npz", root=path), data.load(Path(path))):
        assert made.name == "mine"
        assert made.classes == ("0", "1")
        np.testing.assert_array_equal(made.train.images.numpy(), x)
        np.testing.assert_array_equal(made.test.images.numpy(), a)
        assert made.train.labels.tolist() == y.tolist()
        assert made.test.labels.tolist() == b.tolist()


@pytest.mark.parametrize("keys", [("images", "labels"), ("x_train", "y_train")])
def test_npz_without_a_test_part_is_divided_the_same_way_every_time(tmp_path: Path, keys: tuple[str, str]) -> None:
    x, y = arrays(50)
    path = save(tmp_path / "mine.npz", **dict(zip(keys, (x, y), strict=True)))
    made = data.load(path)
    assert (len(made.train), len(made.test)) == (40, 10)
    assert torch.bincount(made.test.labels).tolist() == [5, 5]
    assert sorted(rows(made.train) + rows(made.test)) == sorted(image.tobytes() for image in x)
    assert made.fingerprint == data.load(path).fingerprint


@pytest.mark.parametrize(
    ("shape", "options", "channels_last"),
    [
        ((6, 5), "", lambda x: x[..., None]),
        ((6, 5, 1), "", lambda x: x),
        ((3, 6, 5), "", lambda x: x.transpose(0, 2, 3, 1)),
        ((3, 5, 3), ":layout=nchw", lambda x: x.transpose(0, 2, 3, 1)),
        ((3, 5, 3), ":nhwc", lambda x: x),
        ((6, 5, 12), ":nhwc", lambda x: x),
    ],
)
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64", "float16"])
def test_npz_layouts(tmp_path: Path, shape: tuple[int, ...], options: str, channels_last: Any, dtype: str) -> None:
    (x, y), (a, b) = arrays(20, shape, dtype), arrays(8, shape, dtype)
    path = save(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=a, y_test=b)
    made = data.load(path + options)
    assert made.train.images.dtype == (torch.uint8 if dtype == "uint8" else torch.float32)
    np.testing.assert_array_equal(made.train.images.numpy(), channels_last(x))
    assert made.train.images.is_contiguous()


def test_npz_arrays_that_are_not_used_are_told(tmp_path: Path) -> None:
    x, y = arrays()
    made = data.load(save(tmp_path / "a.npz", images=x, labels=y, Patients=y, age=y, hospital=y))
    assert made.notes == (
        "'Patients', 'age', 'hospital' of 'a.npz' are not used; call 'Patients' groups if it says that; "
        "call 'hospital' domains if it says that",
    )
    assert data.load(save(tmp_path / "a.npz", images=x, labels=y, age=y)).notes == ("'age' of 'a.npz' is not used",)


def test_npz_groups_stay_whole(tmp_path: Path) -> None:
    x, y = arrays(40)
    patients = np.array([f"patient {n // 4}" for n in range(40)])
    made = data.load(save(tmp_path / "a.npz", images=x, labels=y, groups=patients))
    assert made.train.groups is not None and made.test.groups is not None and len(made.test) == 8
    assert not set(made.train.groups.tolist()) & set(made.test.groups.tolist())
    given = {"x_train": x, "y_train": y, "groups_train": np.arange(40) // 4}
    assert len(data.load(save(tmp_path / "b.npz", **given)).test) == 8
    made = data.load(
        save(tmp_path / "c.npz", **given, x_test=x[:4], y_test=y[:4], groups_test=np.array([9, 9, 70, 70]))
    )
    assert made.test.groups is not None and made.test.groups.tolist() == [9, 9, 10, 10]
    assert made.notes[0].startswith("1 group has samples in both parts")


def test_npz_names_and_domains(tmp_path: Path) -> None:
    x, y = arrays(40)
    text = np.array(["dog", "cat"])[y]
    place = np.array(["north", "south"])[np.arange(40) // 20]
    made = data.load(save(tmp_path / "a.npz", images=x, labels=text, domains=place))
    assert made.classes == ("cat", "dog")
    assert made.domains == ("north", "south")
    assert made.test.domains is not None
    assert torch.bincount(made.test.domains * 2 + made.test.labels).tolist() == [2, 2, 2, 2]
    named = {"classes": np.array(["dog", "cat"]), "domain_names": np.array(["up", "down"])}
    numbers = {"domains_train": np.arange(40) % 2, "domains_test": np.arange(40) // 20}
    path = save(tmp_path / "b.npz", x_train=x, y_train=y, x_test=x, y_test=y, **numbers, **named)
    made = data.load(path)
    assert (made.classes, made.domains) == (("dog", "cat"), ("up", "down"))
    assert made.test.domains is not None
    assert made.test.domains.tolist() == numbers["domains_test"].tolist()
    made = data.load(save(tmp_path / "c.npz", images=x, labels=text, classes=np.array(["dog", "cat"])))
    assert made.classes == ("dog", "cat")


def test_npz_that_is_wrong_is_refused(tmp_path: Path) -> None:
    x, y = arrays(20)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"pictures": x}, "holds pictures: it needs the keys x_train, y_train, x_test, y_test, or images"),
        ({"images": x}, "has no 'labels'"),
        ({"classes": np.array(["a"])}, "has no 'images'"),
        ({"x_train": x, "y_train": y, "x_test": x}, "has no 'y_test'"),
        ({"x_train": x, "labels": y}, "mixes two forms"),
        ({"images": x, "labels": y[:3]}, r"shapes \[20, 6, 5, 3\] and \[3\]: there must be one label a picture"),
        ({"images": x.astype(np.int64), "labels": y}, "'images' in 'mine.npz' is int64: pictures must be uint8"),
        ({"images": x[:, 0, 0], "labels": y}, r"has the shape \[20, 3\]: pictures must be \[N, H, W\]"),
        ({"images": x[:, :3, :3], "labels": y}, "both the second and the last number could count channels"),
        (
            {"images": np.repeat(x, 3, 3), "labels": y},
            "neither the second nor the last .* say which with 'data=mine.npz:layout=nhwc'",
        ),
        ({"images": x, "labels": y + 0.5}, r"'labels' in 'mine.npz' is float64 \[20\]"),
        ({"images": x, "labels": np.stack([y, y], 1)}, r"is int64 \[20, 2\]"),
        ({"images": x, "labels": y + 1}, r"no training sample of class '0' \(number 0\)"),
        ({"images": x, "labels": y - 1}, "has the label -1"),
        ({"images": x, "labels": y * 10**9}, "has the label 1000000000 but only 20 training samples"),
        ({"images": x, "labels": y * 0}, "has 1 class: there is nothing to tell apart"),
        ({"images": x[:0], "labels": y[:0]}, "has no test part and only 0 samples"),
        ({"images": x, "labels": np.array([None] * 20)}, "cannot be read as an .npz file of plain arrays .*pickle"),
        (
            {"images": x, "labels": y, "classes": np.arange(2)},
            "names of the labels in 'mine.npz' must be a list of texts",
        ),
        (
            {"images": x, "labels": np.array(list("ab"))[y], "classes": np.array(["a"])},
            "'b' in .* is not among the names",
        ),
        ({"images": x, "labels": y, "domains": y[:4]}, "20 images but 4 domains"),
        ({"images": x, "labels": y, "groups": y[:4]}, "20 images but 4 groups"),
        ({"images": x, "labels": y, "groups": np.array(["a", ""] * 10)}, "has no group for 10 samples: give each one"),
        ({"images": x, "labels": y, "groups": y / 2}, "'groups' in .* needs one whole number or one name per sample"),
        (
            {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "groups_train": y},
            "has 'groups_train' but not 'groups_test'",
        ),
        ({"images": np.where(x > 9, x, np.nan), "labels": y}, "images with NaN or infinite"),
        (
            {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "domains_test": y},
            "has 'domains_test' but not 'domains_train'",
        ),
        (
            {"x_train": x, "y_train": y, "x_test": x, "y_test": y.astype(str)},
            "numbers in one part and names in the other",
        ),
        ({"x_train": x, "y_train": y, "x_test": x[:, :5], "y_test": y}, "test images uint8 .*: they must be alike"),
    ]
    for values, message in cases:
        with pytest.raises(UserError, match=message):
            data.load(save(tmp_path / "mine.npz", **values))


def test_npz_paths_that_are_wrong_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'npz' needs the path of an .npz file: give it as root=PATH"):
        data.load("npz")
    with pytest.raises(UserError, match="there is no file or folder '/nowhere/at.npz'"):
        data.load("npz", root="/nowhere/at.npz")
    with pytest.raises(UserError, match="is a folder: data set 'npz' needs an .npz file"):
        data.load("npz", root=str(tmp_path))
    (tmp_path / "bad.npz").write_bytes(b"no zip file at all")
    with pytest.raises(UserError, match=r"'bad.npz' cannot be read as an .npz file of plain arrays"):
        data.load(str(tmp_path / "bad.npz"))
    good = save(tmp_path / "good.npz", images=arrays()[0], labels=arrays()[1])
    (tmp_path / "cut.npz").write_bytes(Path(good).read_bytes()[:500])
    with pytest.raises(UserError, match="'cut.npz' cannot be read"):
        data.load(str(tmp_path / "cut.npz"))
    np.save(tmp_path / "one.npy", arrays()[0])
    with pytest.raises(UserError, match="'one.npy' holds one array, not several"):
        data.load("npz", root=str(tmp_path / "one.npy"))
    with pytest.raises(
        UserError, match=r"is a file isofed does not read: data can be an \.npz or \.csv file or a folder"
    ):
        data.load(str(tmp_path / "one.npy"))
    with pytest.raises(UserError, match="are a path already: leave out root"):
        data.load(good, root=good)
    with pytest.raises(UserError, match="layout of data set 'npz' must be one of auto, nhwc, nchw"):
        data.load(good + ":layout=hw")
