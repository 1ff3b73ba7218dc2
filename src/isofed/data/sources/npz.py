"""Your own arrays in one NumPy ``.npz`` file; nothing in it is ever unpickled."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from isofed.data.base import Dataset, Index, Part, held_out
from isofed.data.groups import numbered
from isofed.data.sources import Progress, existing
from isofed.errors import UserError

Array = npt.NDArray[Any]

_KEYS = "x_train, y_train, x_test, y_test, or images, labels and optionally domains and groups"
_PARTED = tuple(f"{what}_{part}" for part in ("train", "test") for what in ("x", "y", "domains", "groups"))
_WHOLE = ("images", "labels", "domains", "groups")
_MEANT = {"groups": ("patient", "subject", "group"), "domains": ("site", "hospital", "domain")}  # beginnings of words
_NAMES = ("classes", "domain_names")
_CHANNELS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Npz:
    """Your own .npz file: x_train, y_train, x_test, y_test, or images, labels and optionally domains and groups."""

    layout: Literal["auto", "nhwc", "nchw"] = "auto"

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        path = existing(root, "npz", "an .npz file")
        arrays, notes = _read(path)
        keys = _keys(path, arrays)
        images = [self._images(path, part.images, arrays[part.images]) for part in keys]
        labels, classes = _codes(path, [(p.labels, arrays[p.labels]) for p in keys], arrays.get("classes"), "label")
        domains: list[Index | None] = [None] * len(keys)
        groups = [*domains]
        names: tuple[str, ...] = ()
        if of_domains := _given(path, arrays, [part.domains for part in keys]):
            codes, names = _codes(path, of_domains, arrays.get("domain_names"), "domain")
            domains = [*codes]
        if of_groups := _given(path, arrays, [part.groups for part in keys]):
            flat = _flat(path, of_groups, "group")
            if missing := sum(int((values == "").sum()) for values in flat if values.dtype.kind == "U"):
                raise UserError(
                    f"'{path.name}' has no group for {missing:,} samples: give each one, such as one of its own"
                )
            groups = [*numbered(flat)]
        arranged = zip(map(np.ascontiguousarray, images), labels, domains, groups, strict=True)
        parts = [Part(*each) for each in arranged]
        train, test = parts if len(parts) == 2 else held_out(path.stem, parts[0])
        return Dataset.build(path.stem, classes, train, test, domains=names, notes=notes)

    def _images(self, path: Path, key: str, images: Array) -> Array:
        """The pictures as uint8 or float32 [N, H, W, C]."""
        where = f"'{key}' in '{path.name}'"
        if images.dtype.kind == "f":
            images = images.astype(np.float32, copy=False)
        elif images.dtype != np.uint8:
            raise UserError(f"{where} is {images.dtype}: pictures must be uint8 (0 to 255) or floating point")
        if images.ndim == 3:
            return images[..., None]
        if images.ndim != 4:
            raise UserError(
                f"{where} has the shape {list(images.shape)}: pictures must be [N, H, W], [N, H, W, C] or [N, C, H, W]"
            )
        layout = self.layout
        if layout == "auto":
            last, first = images.shape[3] in _CHANNELS, images.shape[1] in _CHANNELS
            if last == first:
                why = "both the second and the last" if last else "neither the second nor the last"
                raise UserError(
                    f"{where} has the shape {list(images.shape)}, where {why} number could count channels: "
                    f"say which with 'data={path.name}:layout=nhwc' or 'data={path.name}:layout=nchw'"
                )
            layout = "nhwc" if last else "nchw"
        return images if layout == "nhwc" else images.transpose(0, 2, 3, 1)


def _read(path: Path) -> tuple[dict[str, Array], list[str]]:
    """The arrays that count, and a note about others."""
    if path.is_dir():
        raise UserError(
            f"'{path}' is a folder: data set 'npz' needs an .npz file (for pictures in folders use 'folder')"
        )
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise UserError(
                    f"'{path.name}' holds one array, not several: save with numpy.savez and the keys {_KEYS}"
                )
            arrays = {key: file[key] for key in file.files if key in (*_PARTED, *_WHOLE, *_NAMES)}
            found, unused = ", ".join(file.files) or "nothing", [key for key in file.files if key not in arrays]
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"'{path.name}' cannot be read as an .npz file of plain arrays ({error}): "
            f"save it with numpy.savez and the keys {_KEYS}, without Python objects"
        ) from None
    if not arrays:
        raise UserError(f"'{path.name}' holds {found}: it needs the keys {_KEYS}")
    return arrays, [_unused(path, unused)] if unused else []


def _unused(path: Path, keys: list[str]) -> str:
    """A note about arrays that nobody reads, some of which may only be called otherwise."""
    which = ", ".join(f"'{key}'" for key in keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
    meant = [
        (key, next((ours for ours, kind in _MEANT.items() if key.casefold().startswith(kind)), "")) for key in keys
    ]
    hint = "".join(f"; call '{key}' {ours} if it says that" for key, ours in meant if ours)
    return f"{which} of '{path.name}' {'is' if len(keys) == 1 else 'are'} not used{hint}"


class _Keys(NamedTuple):
    """What the arrays of a part are called."""

    images: str
    labels: str
    domains: str
    groups: str


def _keys(path: Path, arrays: dict[str, Array]) -> list[_Keys]:
    """The keys of each part there is."""
    parted, whole = any(k in arrays for k in _PARTED), any(k in arrays for k in _WHOLE)
    if parted and whole:
        raise UserError(f"'{path.name}' mixes two forms: it needs the keys {_KEYS}, not some of both")
    train, test = _Keys(*_PARTED[:4]), _Keys(*_PARTED[4:])
    keys = [train, *([test] if any(k in arrays for k in test) else [])] if parted else [_Keys(*_WHOLE)]
    for part in keys:
        for key in part[:2]:
            if key not in arrays:
                raise UserError(f"'{path.name}' has no '{key}': it needs the keys {_KEYS}")
        images, labels = arrays[part.images], arrays[part.labels]
        if images.shape[:1] != labels.shape[:1]:
            raise UserError(
                f"'{part.images}' and '{part.labels}' in '{path.name}' have the shapes {list(images.shape)} and "
                f"{list(labels.shape)}: there must be one label a picture"
            )
    return keys


def _given(path: Path, arrays: dict[str, Array], keys: list[str]) -> list[tuple[str, Array]]:
    """An optional array of each part, which all parts have or none."""
    there, missing = [k for k in keys if k in arrays], [k for k in keys if k not in arrays]
    if there and missing:
        raise UserError(f"'{path.name}' has '{there[0]}' but not '{missing[0]}': give both or neither")
    return [(key, arrays[key]) for key in there]


def _flat(path: Path, given: list[tuple[str, Array]], kind: str) -> list[Array]:
    """One whole number or one name for each sample, in the same form in all parts."""
    flat = []
    for key, values in given:
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.ndim != 1 or values.dtype.kind not in "iuU":
            raise UserError(
                f"'{key}' in '{path.name}' is {values.dtype} {list(values.shape)}: "
                f"it needs one whole number or one name per sample, [N]"
            )
        flat.append(values)
    if len({v.dtype.kind == "U" for v in flat}) == 2:
        raise UserError(f"the {kind}s in '{path.name}' are numbers in one part and names in the other: use one form")
    return flat


def _codes(
    path: Path, given: list[tuple[str, Array]], names: Array | None, kind: str
) -> tuple[list[Index], tuple[str, ...]]:
    """Labels (or domains) as numbers from 0, with their names; texts are numbered in alphabetical order."""
    flat = _flat(path, given, kind)
    if names is not None and (names.ndim != 1 or names.dtype.kind != "U"):
        raise UserError(f"the names of the {kind}s in '{path.name}' must be a list of texts, not {names.dtype}")
    if flat[0].dtype.kind == "U":
        known = np.unique(np.concatenate(flat)) if names is None else names
        place = {str(name): i for i, name in enumerate(known)}
        strange = sorted(set(map(str, np.unique(np.concatenate(flat)))) - set(place))
        if strange:
            raise UserError(f"the {kind} '{strange[0]}' in '{path.name}' is not among the names given for it")
        codes = [np.array([place[str(v)] for v in values], dtype=np.int64) for values in flat]
        return codes, tuple(place)
    codes = [values.astype(np.int64) for values in flat]
    lowest = min((int(values.min()) for values in codes if len(values)), default=0)
    if lowest < 0:
        raise UserError(f"'{path.name}' has the {kind} {lowest}: number the {kind}s 0, 1, 2, ... without gaps")
    if names is not None:
        return codes, tuple(map(str, names))
    count = 1 + max((int(values.max()) for values in codes if len(values)), default=-1)
    if count > len(codes[0]):
        # Refused here, because a list of that many names may not even fit in memory.
        raise UserError(
            f"'{path.name}' has the {kind} {count - 1} but only {len(codes[0])} training samples: "
            f"number the {kind}s 0, 1, 2, ... without gaps"
        )
    return codes, tuple(map(str, range(count)))
