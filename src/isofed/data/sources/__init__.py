"""Where data come from: one file a family, one frozen dataclass a source, its fields the options a user may write."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from isofed.data.base import Dataset
from isofed.errors import UserError, unknown

Progress = Callable[[int, int], None]  # called with (files done, files in all)


class Source(Protocol):
    """Options of one way to get a data set."""

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset: ...


# Modules are named, not imported, so that the list costs nothing and an optional package is needed only when used.
SOURCES: dict[str, str] = {
    "digits": "isofed.data.sources.digits:Digits",
    "digits-domains": "isofed.data.sources.digits:DigitsDomains",
    "synthetic": "isofed.data.sources.synthetic:Synthetic",
    "cifar10": "isofed.data.sources.cifar:Cifar10",
    "cifar100": "isofed.data.sources.cifar:Cifar100",
    "stl10": "isofed.data.sources.stl10:Stl10",
    "mnist": "isofed.data.sources.mnist:Mnist",
    "fashion-mnist": "isofed.data.sources.mnist:FashionMnist",
    "tiny-imagenet": "isofed.data.sources.tiny_imagenet:TinyImageNet",
    "imagenet-200": "isofed.data.sources.imagenet_200:ImageNet200",
    "pacs": "isofed.data.sources.pacs:Pacs",
    "office-home": "isofed.data.sources.office_home:OfficeHome",
    "office-caltech10": "isofed.data.sources.office_caltech10:OfficeCaltech10",
    "domainnet": "isofed.data.sources.domainnet:DomainNet",
    "ham10000": "isofed.data.sources.ham10000:Ham10000",
    "npz": "isofed.data.sources.npz:Npz",
    "table": "isofed.data.sources.table:Table",
    "folder": "isofed.data.sources.folders:Folder",
    "domain-folder": "isofed.data.sources.folders:DomainFolder",
}


def source(name: str) -> type[Source]:
    """The class of a source by its name."""
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    module, _, cls = SOURCES[name].partition(":")
    found: type[Source] = getattr(importlib.import_module(module), cls)
    return found


def existing(root: str | None, name: str, what: str) -> Path:
    """The path a source reads from, or a sentence about what is missing."""
    if root is None:
        raise UserError(f"data set '{name}' needs the path of {what}: give it as root=PATH, or as the data itself")
    path = Path(root).expanduser()
    if not path.exists():
        raise UserError(f"there is no file or folder '{root}': root must be the path of {what}")
    return path


def data_folder(root: str | None, name: str) -> Path:
    """The folder that holds a published set, or of which a sub-folder does: ``root``, or else ``$ISOFED_DATA``."""
    given = root if root is not None else os.environ.get("ISOFED_DATA") or None
    if given is None:
        raise UserError(
            f"data set '{name}' needs the folder it was unpacked into: give root=PATH or set ISOFED_DATA; "
            f"`isofed data get {name} root=PATH` fetches it, or says where it is to be had"
        )
    path, said = Path(given).expanduser(), "root" if root is not None else "ISOFED_DATA"
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UserError(f"'{given}' {what}: {said} must be the folder that data set '{name}' was unpacked into")
    return path
