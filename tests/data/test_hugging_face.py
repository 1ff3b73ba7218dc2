"""Data sets of Hugging Face: with a small stand-in for the library, and with the library where it is installed."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from isofed.data import from_hugging_face
from isofed.errors import UserError


@dataclass
class Names:
    """What a ClassLabel has."""

    names: list[str] | None = None


@dataclass
class Table:
    """The small interface that is used: columns, features, a length, and cutting out rows and columns."""

    columns: dict[str, list[Any]]
    features: dict[str, Any] = field(default_factory=dict)
    most_rows: list[int] = field(default_factory=list)

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def select_columns(self, names: list[str]) -> Table:
        return Table({n: self.columns[n] for n in names}, self.features, self.most_rows)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        self.most_rows.append(len(range(*key.indices(len(self)))))
        return {name: values[key] for name, values in self.columns.items()}


def pictures(count: int, mode: str = "RGB", size: tuple[int, int] = (6, 4)) -> list[Any]:
    return [Image.new(mode, size, i if mode == "L" else (i, 2 * i, 0)) for i in range(count)]


def table(count: int = 12, mode: str = "RGB", **more: Any) -> Table:
    columns = {"image": pictures(count, mode), "label": [i % 3 for i in range(count)], **more}
    return Table(columns, {"label": Names(["cat", "dog", "emu"]), "image": object()})


def encoded(picture: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


def test_pictures_and_names_are_taken_over() -> None:
    train = table(600)
    made = from_hugging_face(train, table(6))
    assert (made.name, made.classes, made.domains) == ("hugging-face", ("cat", "dog", "emu"), ())
    assert (made.shape, len(made.train), len(made.test)) == ((3, 4, 6), 600, 6)
    assert made.train.images[5, 0, 0].tolist() == [5, 10, 0] and made.train.labels[:4].tolist() == [0, 1, 2, 0]
    assert max(train.most_rows) == 256, "never a whole column of pictures at once"


def test_without_a_test_part_a_fifth_is_set_aside() -> None:
    made = from_hugging_face(table(30))
    assert (len(made.train), len(made.test)) == (24, 6)


def test_columns_of_other_names_and_domains() -> None:
    train = Table(
        {"img": pictures(6, "L"), "fine": [0, 1] * 3, "site": ["b", "a", "a", "b", "a", "b"]}, {"fine": Names(None)}
    )
    made = from_hugging_face(train, train, image="img", label="fine", domain="site", size=5)
    assert (made.classes, made.domains, made.shape) == (("0", "1"), ("a", "b"), (1, 5, 5))
    assert made.train.domains is not None and made.train.domains.tolist() == [1, 0, 0, 1, 0, 1]


def test_a_column_says_what_is_set_aside_together() -> None:
    patients = [f"p{n // 4}" for n in range(40)]
    whole = Table({"image": pictures(40), "label": [0, 1] * 20, "who": patients}, {"label": Names(None)})
    made = from_hugging_face(whole, group="who")
    assert made.train.groups is not None and made.test.groups is not None
    assert len(made.test) == 8 and not set(made.train.groups.tolist()) & set(made.test.groups.tolist())


def test_samples_without_a_group_are_no_group() -> None:
    for nothing in (None, "", float("nan")):
        column = ["a", "b", nothing, "a"] * 10
        whole = Table({"image": pictures(40), "label": [0, 1] * 20, "who": column}, {"label": Names(None)})
        with pytest.raises(UserError, match="the column 'who' is empty for 10 of 40 samples: give each a group"):
            from_hugging_face(whole, group="who")


def test_a_plain_dict_of_columns_will_do() -> None:
    made = from_hugging_face({"image": pictures(40), "label": [0, 1] * 20})
    assert len(made.train) == 32 and len(made.test) == 8


def test_encoded_pictures_are_turned_as_their_exif_data_say() -> None:
    lying, exif, file = Image.new("RGB", (6, 4), (200, 0, 0)), Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    lying.save(file, format="PNG", exif=exif)
    given = {"image": [{"bytes": file.getvalue()}] * 10, "label": [0, 1] * 5}
    assert from_hugging_face(given).shape == (3, 6, 4)


def test_labels_may_be_names_and_columns_a_plain_dict_in_a_class_of_its_own() -> None:
    class Columns:
        def __init__(self, **columns: Any) -> None:
            self.columns = columns

        def __len__(self) -> int:
            return len(self.columns["image"])

        def __getitem__(self, name: str) -> Any:
            return self.columns[name]

    train = Columns(image=pictures(4), label=["dog", "cat", "cat", "dog"])
    assert from_hugging_face(train, train).train.labels.tolist() == [1, 0, 0, 1]
    with pytest.raises(UserError, match="'emu' in column 'label' of test is not in train"):
        from_hugging_face(train, Columns(image=pictures(1), label=["emu"]))


def test_every_form_of_a_picture_gives_the_same() -> None:
    plain = pictures(3)
    expected = np.stack([np.asarray(p) for p in plain])
    forms: dict[str, list[Any]] = {
        "arrays": list(expected),
        "lists": [value.tolist() for value in expected],
        "channels first": [torch.from_numpy(value).permute(2, 0, 1) for value in expected],
        "bytes": [{"bytes": encoded(p), "path": None} for p in plain],
        "palette": [p.quantize() for p in plain],
        "transparent": [p.convert("RGBA") for p in plain],
    }
    for name, values in forms.items():
        part = Table({"image": values, "label": [0, 1, 0]})
        made = from_hugging_face(part, part)
        np.testing.assert_array_equal(made.train.images.numpy(), expected, err_msg=name)
    part = Table({"image": list(expected), "label": [0, 1, 0]})
    small = plain[2].resize((3, 3), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(from_hugging_face(part, part, size=3).train.images[2].numpy(), np.asarray(small))


def test_grey_among_colour_becomes_colour() -> None:
    for values in ([*pictures(2, "L"), *pictures(2)], [*pictures(2), *pictures(2, "L")]):
        part = Table({"image": values, "label": [0, 1, 0, 1]})
        made = from_hugging_face(part, part)
        assert made.shape[0] == 3
        grey = next(i for i, value in enumerate(values) if value.mode == "L") + 1
        assert made.train.images[grey, 0, 0].tolist() == [1, 1, 1]
    assert from_hugging_face(table(6, "L"), table(6)).train.images.shape == (6, 4, 6, 3)


def test_floating_point_arrays_stay_as_they_are() -> None:
    values = [np.full((4, 4), i, dtype=np.float64) for i in range(4)]
    part = Table({"image": values, "label": [0, 1, 0, 1]})
    made = from_hugging_face(part, part)
    assert made.train.images.dtype == torch.float32 and made.shape == (1, 4, 4)
    with pytest.raises(UserError, match="floating-point pictures are not resized"):
        from_hugging_face(part, part, size=2)


def test_what_is_wrong_is_named() -> None:
    class Stream:
        column_names = ("image", "label")

    good, labels = table(3), [0, 1, 2]
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ({"train": good, "test": good}, {}, r"train is a data set of several splits \(train, test\)"),
        (Stream(), {}, "train has no length: load it without streaming"),
        (good, {"image": "img"}, "train has no column 'img': it has image, label; say which to use"),
        (good, {"domain": "site"}, "train has no column 'site'"),
        (good, {"size": 0}, "must be from 1 to 4096 pixels, not 0"),
        (Table({"image": pictures(3), "label": [0, -1, 1]}), {}, "holds -1, which often means that nothing is known"),
        (Table({"image": pictures(3), "label": [0, None, 1]}), {}, "holds NoneType, int: it needs one whole number"),
        (Table({"image": pictures(3), "label": [0, 1.5, 1]}), {}, "holds float, int"),
        (Table({"image": pictures(3), "label": [0, 10**12, 1]}), {}, "number its values 0, 1, 2"),
        (
            Table({"image": [*pictures(2), *pictures(1, size=(9, 9))], "label": labels}),
            {},
            "picture 2 .* must be alike",
        ),
        (Table({"image": ["a", "b", "c"], "label": labels}), {}, "must be numbers from 0 to 255 or floating point"),
        (Table({"image": [{"bytes": b"text"}] * 3, "label": labels}), {}, "picture 0 of column 'image' cannot be read"),
        (Table({"image": [[300]] * 3, "label": labels}), {}, "must be numbers from 0 to 255"),
        (Table({"image": [[1], [2], [3]], "label": labels}), {}, r"must be \[H, W\], .*not \[1\]"),
        (Table({"image": [], "label": []}), {}, "column 'image' is empty"),
    ]
    for train, options, message in cases:
        with pytest.raises(UserError, match=message):
            from_hugging_face(train, None, **options)


def test_a_federation_trains_on_it() -> None:
    from isofed import Federation

    made = from_hugging_face(table(60), table(12))
    result = Federation(dataset=made, model="mlp", partition="iid", clients=2, rounds=1, executor="serial").fit()
    assert result.rounds == 1


@pytest.mark.filterwarnings("ignore")  # of the library and what it needs
def test_the_real_library() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "site": datasets.Value("string"),
        }
    )
    columns = {"image": pictures(10), "label": [0, 1] * 5, "site": ["a", "b", "b", "a", "a"] * 2}
    whole = datasets.Dataset.from_dict(columns, features=features)
    expected = np.stack([np.asarray(p) for p in columns["image"]])
    for form in (None, "numpy", "torch"):
        made = from_hugging_face(whole.with_format(form), whole.with_format(form), domain="site")
        assert (made.classes, made.domains) == (("cat", "dog"), ("a", "b"))
        np.testing.assert_array_equal(made.train.images.numpy(), expected)
        assert made.train.labels.tolist() == columns["label"]
    undecoded = whole.cast_column("image", datasets.Image(decode=False))
    np.testing.assert_array_equal(from_hugging_face(undecoded, whole).train.images.numpy(), expected)
    splits = datasets.DatasetDict({"train": whole, "test": whole})
    with pytest.raises(UserError, match="several splits"):
        from_hugging_face(splits)
