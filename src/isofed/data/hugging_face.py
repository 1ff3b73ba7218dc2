"""Data sets of the Hugging Face library ``datasets``, or anything with its columns; that library is not imported."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isofed.data.base import Dataset, Index, Part, held_out
from isofed.data.groups import numbered
from isofed.data.sources.decode import FORMATS, MOST_PIXELS, check_size, in_mode, turn_upright
from isofed.errors import UserError

Array = npt.NDArray[Any]

_ROWS = 256  # decoded in one go, so that a column is never in memory as Python objects
_GREY = ("1", "L", "LA", "F", "I")


def from_hugging_face(
    train: Any,
    test: Any = None,
    image: str = "image",
    label: str = "label",
    domain: str | None = None,
    size: int | None = None,
    group: str | None = None,
) -> Dataset:
    """A data set for ``Federation(dataset=...)`` from splits of a Hugging Face data set.

    ``image``, ``label`` and ``domain`` name columns: of Pillow pictures, encoded bytes or arrays; of numbers or names;
    and of what tells sources apart. ``size`` squashes pictures to size x size, and without it they must be alike. A
    fifth of ``train`` is set aside where there is no ``test``. ``group`` names the column of what must not be torn
    apart then, nor for a validation part, such as patients.
    """
    given = [train] if test is None else [train, test]
    wanted = [image, label, *filter(None, (domain, group))]
    for which, part in zip(("train", "test"), given, strict=False):
        _check_columns(which, part, wanted)
    if size is not None:
        check_size("hugging face", size)
    labels, classes = _numbers(given, label)
    domains, domain_names = _numbers(given, domain) if domain else ([None] * len(given), ())
    images = [_images(part, image, size) for part in given]
    channels = max(i.shape[3] for i in images)
    images = [np.repeat(i, channels, axis=3) if i.shape[3] < channels else i for i in images]
    info = getattr(train, "info", None)
    name = str(getattr(info, "dataset_name", None) or getattr(info, "builder_name", None) or "hugging-face")
    groups: list[Index | None] = [None] * len(given)
    if group:
        groups = [*numbered([_ids(part, group) for part in given])]
    parts = [_part(*each) for each in zip(images, labels, domains, groups, strict=True)]
    held = parts if len(parts) == 2 else held_out(name, parts[0])
    return Dataset.build(name, classes, held[0], held[1], domains=domain_names)


def _part(images: Array, labels: Array, domains: Array | None, groups: Array | None) -> Part:
    return Part(torch.from_numpy(np.ascontiguousarray(images)), labels, domains, groups)


def _check_columns(which: str, part: Any, wanted: list[str]) -> None:
    columns = getattr(part, "column_names", None)
    if isinstance(part, Mapping):
        columns = list(part)
    if isinstance(columns, dict) or (isinstance(part, Mapping) and "train" in part):
        raise UserError(
            f"{which} is a data set of several splits ({', '.join(part)}): give one, such as splits['train']"
        )
    if not hasattr(part, "__len__"):
        raise UserError(f"{which} has no length: load it without streaming, since clients are made of numbered samples")
    for name in wanted:
        if columns is not None and name not in columns:
            raise UserError(f"{which} has no column '{name}': it has {', '.join(columns)}; say which to use")


def _length(part: Any, column: str) -> int:
    """How many samples there are."""
    return len(part[column]) if isinstance(part, Mapping) else len(part)


def _column(part: Any, name: str) -> Iterator[Any]:
    """The values of a column; where rows can be cut out, some at a time."""
    if hasattr(part, "select_columns"):
        part = part.select_columns([name])  # or every other column would be decoded too
        for start in range(0, len(part), _ROWS):
            yield from part[start : start + _ROWS][name]
    else:
        yield from part[name]


def _numbers(parts: list[Any], column: str) -> tuple[list[Any], tuple[str, ...]]:
    """A column of all parts as numbers from 0, and what they are called."""
    values = [[v.item() if hasattr(v, "item") else v for v in _column(part, column)] for part in parts]
    feature = (getattr(parts[0], "features", None) or {}).get(column)
    known = getattr(feature, "names", None)
    kinds = {type(v) for part in values for v in part}
    if kinds == {str}:
        names = list(known or sorted({v for v in values[0]}))
        place = {name: number for number, name in enumerate(names)}
        strange = sorted({v for part in values for v in part} - set(place))
        if strange:
            raise UserError(f"'{strange[0]}' in column '{column}' of test is not in train: it cannot be learnt")
        return [np.array([place[v] for v in part], dtype=np.int64) for part in values], tuple(names)
    if not kinds <= {int, bool}:
        found = ", ".join(sorted(k.__name__ for k in kinds))
        raise UserError(f"column '{column}' holds {found}: it needs one whole number or one name for each sample")
    codes = [np.array(part, dtype=np.int64) for part in values]
    low = min((int(part.min()) for part in codes if len(part)), default=0)
    if low < 0:
        raise UserError(
            f"column '{column}' holds {low}, which often means that nothing is known: use a part with labels"
        )
    most = max((int(part.max()) for part in codes if len(part)), default=-1)
    if known is None and most >= max(map(len, codes)):
        raise UserError(f"column '{column}' holds {most}: number its values 0, 1, 2, ... without gaps")
    return codes, tuple(map(str, known if known is not None else range(most + 1)))


def _ids(part: Any, column: str) -> Array:
    """What tells groups apart; samples of nobody would be one large group."""
    values = [*_column(part, column)]
    missing = sum(value is None or value != value or value == "" for value in values)
    if missing:
        raise UserError(
            f"the column '{column}' is empty for {missing:,} of {len(values):,} samples: give each a group, such as "
            "one of its own"
        )
    return np.array([str(value) for value in values])


def _images(part: Any, column: str, size: int | None) -> Array:
    """All pictures as [N, H, W, C]; grey ones become colour where others of the part are."""
    images: Array | None = None
    for place, value in enumerate(_column(part, column)):
        try:
            one = _pixels(value, size)
        except UserError:
            raise
        except Exception as error:  # decoders fail in many ways on broken bytes
            raise UserError(f"picture {place} of column '{column}' cannot be read ({error})") from None
        if images is None:
            images = np.empty((_length(part, column), *one.shape), dtype=one.dtype)
        if one.shape[2] == 3 and images.shape[3] == 1:
            images = np.repeat(images, 3, axis=3)
        first = images[0]
        if one.shape[:2] != first.shape[:2] or one.dtype != first.dtype or one.shape[2] not in (1, first.shape[2]):
            raise UserError(
                f"picture {place} of column '{column}' is {one.dtype} {list(one.shape)} and the first is {first.dtype} "
                f"{list(first.shape)}: they must be alike, size=32 makes them 32 x 32"
            )
        images[place] = one
    if images is None:
        raise UserError(f"column '{column}' is empty: a data set needs pictures")
    return images


def _pixels(value: Any, size: int | None) -> Array:
    """One picture as uint8 or float32 [H, W, C]."""
    from PIL import Image

    turn = False
    if isinstance(value, Mapping):  # an Image(decode=False) column
        data = value.get("bytes")
        value = Image.open(io.BytesIO(data) if data is not None else value["path"], formats=FORMATS)
        turn = True
    if hasattr(value, "convert"):
        if value.width * value.height > MOST_PIXELS:
            raise UserError(
                f"a picture is {value.width} x {value.height} pixels, more than the {MOST_PIXELS:,} that are read"
            )
        if turn:  # what was given decoded is as somebody wants it
            turn_upright(value)
        grey = value.mode in _GREY or value.mode.startswith("I;")
        picture = in_mode(value, "grey" if grey else "rgb")
    else:
        array = _channels_last(np.asarray(value))
        if array.dtype != np.uint8 or size is None:
            if size is not None and array.shape[:2] != (size, size):
                raise UserError(
                    f"floating-point pictures are not resized: make them {size} x {size}, or leave out size"
                )
            return array
        picture = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    if size is not None and picture.size != (size, size):
        picture = picture.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture, dtype=np.uint8)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _channels_last(array: Array) -> Array:
    if array.dtype.kind == "f":
        array = array.astype(np.float32, copy=False)
    elif array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() <= 255:
        array = array.astype(np.uint8, copy=False)  # lists of numbers come as int64
    else:
        raise UserError(f"pictures must be numbers from 0 to 255 or floating point, not {array.dtype}")
    if array.ndim == 2:
        return array[..., None]
    if array.ndim == 3 and array.shape[2] not in (1, 3) and array.shape[0] in (1, 3):
        return array.transpose(1, 2, 0)  # as the torch format gives them
    if array.ndim != 3:
        raise UserError(f"a picture must be [H, W], [H, W, C] or [C, H, W], not {list(array.shape)}")
    return array
