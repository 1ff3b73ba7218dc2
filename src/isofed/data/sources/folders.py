"""Your own pictures in folders: ``class/picture``, or ``domain/class/picture``, optionally under train/ and test/."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isofed.data.base import Dataset
from isofed.data.sources import Progress, existing
from isofed.data.sources.decode import SUFFIXES, check_size, contents, folders_in, pictures_in
from isofed.data.sources.items import Item, made_of
from isofed.data.sources.unused import Unused, strays
from isofed.errors import UserError


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
        parts = [[Item(p, c) for c, p in _pictures(part, "folder", unused)] for part in _parts(path)]
        notes = strays(_parts(path), "class") + unused.notes()
        return made_of(path, parts, self.size, self.channels, progress, notes)


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
            items = [Item(p, c, d.name) for d in domains for c, p in _pictures(d, "domain-folder", unused)]
            empty = sorted({d.name for d in domains} - {item.domain for item in items})
            if empty:
                raise UserError(f"the domain folder '{part / empty[0]}' has no pictures: add some or remove it")
            parts.append(items)
        return made_of(path, parts, self.size, self.channels, progress, notes + unused.notes())


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
