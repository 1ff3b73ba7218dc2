"""Somebody's own pictures, once it is known which there are: divided, decoded or read from the cache, and checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isofed.data.base import Dataset, Part, held_out, moments
from isofed.data.cache import cached, fingerprint
from isofed.data.sources import Progress
from isofed.data.sources.decode import DECODING, SUFFIXES, decode
from isofed.data.sources.unused import LOST, lost, lost_notes
from isofed.errors import UserError

WORTH_KEEPING = 1 << 20  # bytes of picture files; fewer are read again faster than a cache is looked through


class Item(NamedTuple):
    """A picture and what is known of it."""

    file: Path
    label: str
    domain: str = ""
    group: str = ""


class Codes(NamedTuple):
    """Class, domain and group of each picture as numbers; no domains or groups where there are none."""

    labels: Tensor
    domains: Tensor | None
    groups: Tensor | None


def _alike(classes: list[str], table: bool) -> list[str]:
    """A sentence about classes with nearly the same name, which sites may have meant to be one."""
    change = "write them alike in the table" if table else "rename the folders"
    first: dict[str, str] = {}
    pairs = [(first.setdefault(c.strip().casefold(), c), c) for c in classes]
    return [
        f"'{one}' and '{two}' are two classes, though their names differ by case or blanks only: {change} "
        "if they are the same"
        for one, two in pairs
        if one != two
    ]


def _untested(kind: str, names: list[str], tested: Tensor | None) -> list[str]:
    """A sentence about classes or sites of which no picture is in the test part, such as those that have only one."""
    left = [] if tested is None else [names[n] for n in sorted(set(range(len(names))) - set(tested.tolist()))]
    shown = ", ".join(f"'{name}'" for name in left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
    return [f"there is no test picture of {kind} {shown}, so no accuracy tells of it"] if left else []


def made_of(
    path: Path, parts: list[list[Item]], size: int, channels: str, progress: Progress | None, notes: Sequence[str]
) -> Dataset:
    """The data set of a training and a test part, or of a single one, of which a fifth is set aside."""
    name = path.resolve().stem if path.is_file() else path.resolve().name
    classes = sorted({item.label for item in parts[0]})
    domains = sorted({item.domain for item in parts[0]} - {""})
    if not classes:
        raise UserError(f"'{path}' has no pictures: isofed reads {', '.join(sorted(SUFFIXES))}")
    if len(classes) == 1:
        raise UserError(
            f"'{path}' has one class, '{classes[0]}': there is nothing to tell apart, it needs at least two"
        )
    known_labels, known_domains = set(classes), {"", *domains}
    for item in parts[-1]:
        if item.label not in known_labels or item.domain not in known_domains:
            strange = f"domain '{item.domain}'" if item.label in known_labels else f"class '{item.label}'"
            raise UserError(f"the test part of '{path}' has the {strange}, which the training part does not have")
    groups = sorted({item.group for items in parts for item in items} - {""})
    codes = [codes_of(items, classes, domains, groups) for items in parts]
    if len(parts) == 1:
        parts, codes = divided(name, parts[0], codes[0])
    files = [[item.file for item in items] for items in parts]
    arrays = _images(path, files, size, channels, progress)
    notes = [*notes, *lost_notes(arrays["lost"], [file for part in files for file in part])]
    made = [
        Part(torch.from_numpy(arrays[which]), *known) for which, known in zip(("train", "test"), codes, strict=True)
    ]
    mean, std = arrays["mean"].tolist(), arrays["std"].tolist()
    labels, where, _ = codes[1]
    notes = [
        *notes,
        *_alike(classes, path.is_file()),
        *_untested("class", classes, labels),
        *_untested("site", domains, where),
    ]
    return Dataset.build(name, classes, made[0], made[1], mean, std, domains, notes)


def codes_of(items: list[Item], classes: list[str], domains: list[str], groups: list[str]) -> Codes:
    """Class, domain and group of each picture as numbers."""

    def numbers(names: list[str], values: Iterable[str]) -> Tensor:
        place = {name: number for number, name in enumerate(names)}
        return torch.tensor([place[value] for value in values], dtype=torch.int64)

    return Codes(
        numbers(classes, (item.label for item in items)),
        numbers(domains, (item.domain for item in items)) if domains else None,
        numbers(groups, (item.group for item in items)) if groups else None,
    )


def divided(name: str, items: list[Item], codes: Codes) -> tuple[list[list[Item]], list[Codes]]:
    """Training and test pictures before any is decoded, so that each part lies on the disk by itself."""
    # The places, as the bytes of pictures, go through the rule that divides every data set without a test part.
    places = torch.arange(len(items)).view(torch.uint8).view(-1, 1, 1, 8)
    parts = held_out(name, Part(places, *codes))
    chosen = [part.images.view(-1).view(torch.int64).tolist() for part in parts]
    return [[items[i] for i in index] for index in chosen], [Codes(p.labels, p.domains, p.groups) for p in parts]


def _images(
    path: Path, files: list[list[Path]], size: int, channels: str, progress: Progress | None
) -> dict[str, npt.NDArray[Any]]:
    """The pictures of both parts, mean and std of the first, and what was lost, from the cache where it has them."""
    import PIL

    count, parts = 3 if channels == "rgb" else 1, dict(zip(("train", "test"), files, strict=True))
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        which: ((len(part), size, size, count), "uint8") for which, part in parts.items()
    }
    shapes |= {"mean": ((count,), "float64"), "std": ((count,), "float64"), "lost": LOST}

    def fill(arrays: dict[str, npt.NDArray[Any]]) -> None:
        wanted = [(arrays[which][n], file) for which, part in parts.items() for n, file in enumerate(part)]
        arrays["lost"][:] = lost(decode(wanted, channels, progress))
        arrays["mean"][:], arrays["std"][:] = moments(torch.from_numpy(arrays["train"]))

    every = [file for part in files for file in part]
    try:
        known = fingerprint(every)
    except OSError as error:
        raise UserError(f"the picture '{error.filename}' cannot be read ({error.strerror})") from None
    if sum(length for _, length, _ in known[1:]) < WORTH_KEEPING:
        arrays = {which: np.empty(shape, dtype) for which, (shape, dtype) in shapes.items()}
        fill(arrays)
        return arrays
    about = {
        "root": str(path.resolve()),
        "size": size,
        "channels": channels,
        "files": known,
        "version": [DECODING, PIL.__version__],  # another Pillow may decode to other values
    }
    return cached("folder", about, shapes, fill)
