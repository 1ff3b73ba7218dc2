"""Your own pictures in folders: ``class/picture``, or ``domain/class/picture``, optionally under train/ and test/."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isofed.data.base import Dataset
from isofed.data.sources import Progress, existing
from isofed.data.sources.decode import SUFFIXES, check_size, contents, folders_in, pictures_in
from isofed.data.sources.items import Item, made_of
from isofed.data.sources.unused import Unused, strays
from isofed.errors import UserError

_TRAIN, _TEST, _VALID = ("train", "training"), ("test", "testing"), ("val", "valid", "validation")
_FEW = 10  # pictures of what is hardly a class


@dataclass(frozen=True)
class Folder:
    """Your own pictures in class folders (optionally under train/ and test/), resized to size x size."""

    size: int = 32
    channels: Literal["rgb", "grey"] = "rgb"

    def __post_init__(self) -> None:
        check_size("folder", self.size)

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        path = _folder(root, "folder", "a folder of class folders")
        unused, roots = Unused(), parts_of(path)
        parts = [[Item(p, c) for c, p in _pictures(part, "folder", unused)] for part in roots]
        notes = beside(path, roots) + strays(roots, "class") + unused.notes()
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
        unused, roots = Unused(), parts_of(path)
        notes = beside(path, roots)
        for part in roots:
            domains = folders_in(part)
            notes += strays([part], "site") + strays(domains, "class")
            if not domains:
                raise UserError(f"'{part}' has no folders in it: 'domain-folder' needs domain/class/picture")
            items = [Item(p, c, d.name) for d in domains for c, p in _pictures(d, "domain-folder", unused)]
            empty = sorted({d.name for d in domains} - {item.domain for item in items})
            if empty:
                raise UserError(f"the domain folder '{part / empty[0]}' has no pictures: add some or remove it")
            parts.append(items)
        notes += _perhaps_patients(parts[0])
        return made_of(path, parts, self.size, self.channels, progress, notes + unused.notes())


def recognise(path: Path) -> str:
    """Which of the two sources fits a folder, from the depth at which its pictures lie."""
    top = parts_of(path)[0]
    inside = folders_in(top)
    # Where both depths have pictures, those of the rarer kind are strays; a folder of a million files is not sorted.
    with_folders = filter(_has_folders, inside)
    sites = [folder for folder in with_folders if any(pictures_in(deeper) for deeper in folders_in(folder))]
    if len(sites) <= len(inside) / 2 and any(pictures_in(folder) for folder in inside):
        return "folder"
    if sites:
        if top == path:
            _check_no_parts(path, sites)
        _check_sites(path, sites)
        return "domain-folder"
    tables = sorted([*path.glob("*.csv"), *path.glob("*.tsv")])
    hint = f", or name the table that lists them, data={shlex.quote(str(tables[0]))}" if tables else ""
    if pictures_in(top):
        said = f"'{top}' holds pictures but no class folders"
        raise UserError(f"{said}: put the pictures of each class into a folder{hint}")
    raise UserError(
        f"there are no pictures in class/ or domain/class/ folders under '{top}': "
        f"isofed reads {', '.join(sorted(SUFFIXES))}{hint}"
    )


def _check_no_parts(path: Path, sites: list[Path]) -> None:
    """Refuse a test part in place of a site: a client would train on it."""
    for site in sites:
        if site.name.casefold() in (*_TRAIN, *_TEST, *_VALID):
            raise UserError(
                f"'{site}' would be read as a site: where a training and a test part are meant, '{path}' must have the "
                f"folders train and test; if it is a site, say so: data=domain-folder root={shlex.quote(str(path))}"
            )


def _perhaps_patients(items: list[Item]) -> list[str]:
    """A note where what was taken for classes at sites may be patients in classes: each numbered, with few pictures."""
    classes = sorted({item.label for item in items})
    folders = {(item.domain, item.label) for item in items}
    if not all(name[-1:].isdigit() for name in classes) or len(items) >= _FEW * len(folders):
        return []
    sites = sorted({item.domain for item in items})
    some, where = (", ".join(names[:3]) + (", ..." if len(names) > 3 else "") for names in (classes, sites))
    return [f"{some} are read as classes and {where} as sites; if they are patients in classes, list them in a table"]


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


def parts_of(path: Path) -> list[Path]:
    """The training and the test folder, or the folder itself where it is not divided."""
    train, test = _called(path, _TRAIN), _called(path, _TEST)
    if train is None or not folders_in(train):
        return [path]  # without folders inside, 'train' is a class, as in CIFAR-100
    if test is not None:
        return [train, test]
    if others := [folder.name for folder in folders_in(path) if folder != train]:
        there = ", ".join(others)
        raise UserError(f"'{path}' has {train.name}/ but no test/ (there is {there}): name the test part 'test'")
    return [train]


def _called(path: Path, names: Sequence[str]) -> Path | None:
    """The one folder with one of these names, in whatever letters."""
    found = [folder for folder in folders_in(path) if folder.name.casefold() in names]
    if len(found) > 1:
        raise UserError(f"'{path}' has {' and '.join(f.name + '/' for f in found)}: keep the one that is meant")
    return found[0] if found else None


def beside(path: Path, parts: Sequence[Path]) -> list[str]:
    """A sentence about folders beside a training and a test part, which are not used."""
    others = [folder for folder in folders_in(path) if folder not in parts] if parts[0] != path else []
    if not others:
        return []
    shown = ", ".join(f"'{folder.name}'" for folder in others[:5]) + (" and more" if len(others) > 5 else "")
    hint = ""
    if any(folder.name.casefold() in _VALID for folder in others):
        hint = "; validation=0.1 sets a part of the training pictures aside"
    kind, are = ("folder", "is") if len(others) == 1 else ("folders", "are")
    return [f"the {kind} {shown} beside {parts[0].name}/ and {parts[-1].name}/ {are} not used{hint}"]


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
