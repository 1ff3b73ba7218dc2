"""Your own pictures in folders: ``class/picture``, or ``domain/class/picture``, optionally under train/ and test/."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isofed.data.base import Dataset, Part, held_out, moments
from isofed.data.cache import cached, fingerprint
from isofed.data.sources import Progress, existing
from isofed.data.sources.decode import DECODING, SUFFIXES, check_size, contents, decode, folders_in, pictures_in
from isofed.data.sources.unused import LOST, Unused, lost, lost_notes, strays
from isofed.errors import UserError

WORTH_KEEPING = 1 << 20  # bytes of picture files; fewer are read again faster than a cache is looked through

Item = tuple[Path, str, str]  # picture, class, domain
Codes = tuple[Tensor, Tensor | None]  # labels, domains


@dataclass(frozen=True)
class Folder:
    """Your own pictures in class folders (optionally under train/ and test/), resized to size x size."""

    size: int = 32
    channels: Literal["rgb", "grey"] = "rgb"

    def __post_init__(self) -> None:
        check_size("folder", self.size)

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        path = _folder(root, "folder", "a folder of class folders")
        unused = Unused()
        parts = [[(p, c, "") for c, p in _pictures(part, "folder", unused)] for part in _parts(path)]
        notes = strays(_parts(path), "class") + unused.notes()
        return _dataset(path, parts, self.size, self.channels, progress, notes)


@dataclass(frozen=True)
class DomainFolder:
    """Your own pictures in domain/class folders (optionally under train/ and test/), resized to size x size."""

    size: int = 32
    channels: Literal["rgb", "grey"] = "rgb"

    def __post_init__(self) -> None:
        check_size("domain-folder", self.size)

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        path = _folder(root, "domain-folder", "a folder of domain folders")
        parts: list[list[Item]] = []
        notes, unused = list[str](), Unused()
        for part in _parts(path):
            domains = folders_in(part)
            notes += strays([part], "site") + strays(domains, "class")
            if not domains:
                raise UserError(f"'{part}' has no folders in it: 'domain-folder' needs domain/class/picture")
            items = [(p, c, d.name) for d in domains for c, p in _pictures(d, "domain-folder", unused)]
            empty = sorted({d.name for d in domains} - {d for _, _, d in items})
            if empty:
                raise UserError(f"the domain folder '{part / empty[0]}' has no pictures: add some or remove it")
            parts.append(items)
        return _dataset(path, parts, self.size, self.channels, progress, notes + unused.notes())


def recognise(path: Path) -> str:
    """Which of the two sources fits a folder, from the depth at which its pictures lie."""
    top = _parts(path)[0]
    inside = folders_in(top)
    # Where both depths have pictures, those of the rarer kind are strays; a folder of a million files is not sorted.
    with_folders = filter(_has_folders, inside)
    sites = [folder for folder in with_folders if any(pictures_in(deeper) for deeper in folders_in(folder))]
    if len(sites) <= len(inside) / 2 and any(pictures_in(folder) for folder in inside):
        return "folder"
    if sites:
        _check_sites(path, sites)
        return "domain-folder"
    if pictures_in(top):
        raise UserError(f"'{top}' holds pictures but no class folders: put the pictures of each class into a folder")
    raise UserError(
        f"there are no pictures in class/ or domain/class/ folders under '{top}': "
        f"isofed reads {', '.join(sorted(SUFFIXES))}"
    )


def _check_sites(path: Path, sites: list[Path]) -> None:
    """Refuse class/patient/picture, which has the depth of site/class/picture: then no class is at two sites."""
    classes = [[folder.name for folder in folders_in(site)] for site in sites]
    every = [name.strip().casefold() for names in classes for name in names]
    if len(sites) < 2 or len(set(every)) < len(every):
        return
    held = " and ".join(
        f"'{site.name}' has {', '.join(names[:2])}{', ...' if len(names) > 2 else ''}"
        for site, names in zip(sites[:2], classes, strict=False)
    )
    raise UserError(
        f"'{path}' would be read as site/class/picture, but no class is at two sites: {held}. If '{sites[0].name}' and "
        f"'{sites[1].name}' are classes, put their pictures into them directly, as class/picture; if they are sites, "
        f"say so: data=domain-folder root={shlex.quote(str(path))}"
    )


def _has_folders(path: Path) -> bool:
    try:
        with os.scandir(path) as entries:
            return any(entry.is_dir() for entry in entries)
    except OSError:
        return True  # whoever lists it says what is wrong


def _folder(root: str | None, name: str, what: str) -> Path:
    path = existing(root, name, what)
    if not path.is_dir():
        raise UserError(f"'{path}' is a file: data set '{name}' needs the path of {what}")
    return path


def _parts(path: Path) -> list[Path]:
    """The training and the test folder, or the folder itself where it is not divided."""
    train, test = path / "train", path / "test"
    if not train.is_dir() or not folders_in(train):
        return [path]  # without folders inside, 'train' is a class, as in CIFAR-100
    if test.is_dir():
        return [train, test]
    if len(folders_in(path)) > 1:
        others = ", ".join(p.name for p in folders_in(path) if p != train)
        raise UserError(f"'{path}' has train/ but no test/ (there is {others}): name the test part 'test'")
    return [train]


def _pictures(path: Path, name: str, unused: Unused) -> Iterator[tuple[str, Path]]:
    """Class and path of every picture one level below; what else is there is put down in ``unused``."""
    classes = folders_in(path)
    if not classes:
        hint = ": put the pictures of each class into a folder" if pictures_in(path) else " with pictures"
        raise UserError(f"'{path}' has no class folders{hint}")
    for folder in classes:
        found = contents(folder)
        if not found.pictures and found.folders:
            hint = "it needs domain/class/picture"
            if name == "folder":
                hint = "use 'domain-folder' for domain/class/picture, or put its pictures into it directly"
            raise UserError(f"'{folder}' holds folders, not pictures: {hint}")
        if not found.pictures and name == "folder":
            raise UserError(
                f"the class folder '{folder}' has no pictures: "
                f"add some or remove it (isofed reads {', '.join(sorted(SUFFIXES))})"
            )
        unused.add(found)
        for file in found.pictures:
            yield folder.name, file


def _alike(classes: list[str]) -> list[str]:
    """A sentence about classes with nearly the same name, which sites may have meant to be one."""
    first: dict[str, str] = {}
    pairs = [(first.setdefault(c.strip().casefold(), c), c) for c in classes]
    return [
        f"'{one}' and '{two}' are two classes, though their names differ by case or blanks only: rename the folders "
        "if they are the same"
        for one, two in pairs
        if one != two
    ]


def _untested(kind: str, names: list[str], tested: Tensor | None) -> list[str]:
    """A sentence about classes or sites of which no picture is in the test part, such as those that have only one."""
    left = [] if tested is None else [names[n] for n in sorted(set(range(len(names))) - set(tested.tolist()))]
    shown = ", ".join(f"'{name}'" for name in left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
    return [f"there is no test picture of {kind} {shown}, so no accuracy tells of it"] if left else []


def _dataset(
    path: Path,
    parts: list[list[Item]],
    size: int,
    channels: str,
    progress: Progress | None,
    notes: list[str],
) -> Dataset:
    name = path.resolve().name
    classes = sorted({c for _, c, _ in parts[0]})
    domains = sorted({d for _, _, d in parts[0] if d})
    if not classes:
        raise UserError(f"'{path}' has no pictures: isofed reads {', '.join(sorted(SUFFIXES))}")
    if len(classes) == 1:
        raise UserError(
            f"'{path}' has one class, '{classes[0]}': there is nothing to tell apart, it needs at least two"
        )
    for _, label, domain in parts[-1]:
        if label not in classes or (domain and domain not in domains):
            strange = f"class '{label}'" if label not in classes else f"domain '{domain}'"
            raise UserError(f"the test part of '{path}' has the {strange}, which the training part does not have")
    codes = [_codes(items, classes, domains) for items in parts]
    if len(parts) == 1:
        parts, codes = _divided(name, parts[0], codes[0])
    files = [[file for file, _, _ in items] for items in parts]
    arrays = _images(path, files, size, channels, progress)
    notes = [*notes, *lost_notes(arrays["lost"], [file for part in files for file in part])]
    made = [
        Part(torch.from_numpy(arrays[which]), labels, where)
        for which, (labels, where) in zip(("train", "test"), codes, strict=True)
    ]
    mean, std = arrays["mean"].tolist(), arrays["std"].tolist()
    labels, where = codes[1]
    notes = [*notes, *_alike(classes), *_untested("class", classes, labels), *_untested("site", domains, where)]
    return Dataset.build(name, classes, made[0], made[1], mean, std, domains, notes)


def _codes(items: list[Item], classes: list[str], domains: list[str]) -> Codes:
    """Class and domain of each picture as numbers."""
    of_class, of_domain = ({n: i for i, n in enumerate(names)} for names in (classes, domains))
    labels = torch.tensor([of_class[c] for _, c, _ in items], dtype=torch.int64)
    where = torch.tensor([of_domain[d] for _, _, d in items], dtype=torch.int64) if domains else None
    return labels, where


def _divided(name: str, items: list[Item], codes: Codes) -> tuple[list[list[Item]], list[Codes]]:
    """Training and test pictures before any is decoded, so that each part lies on the disk by itself."""
    # The places, as the bytes of pictures, go through the rule that divides every data set without a test part.
    places = torch.arange(len(items)).view(torch.uint8).view(-1, 1, 1, 8)
    parts = held_out(name, Part(places, *codes))
    chosen = [part.images.view(-1).view(torch.int64).tolist() for part in parts]
    return [[items[i] for i in index] for index in chosen], [(part.labels, part.domains) for part in parts]


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
