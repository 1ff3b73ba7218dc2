"""Where data come from: one file a family, one frozen dataclass a source, its fields the options a user may write."""

from __future__ import annotations

import importlib
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
    "npz": "isofed.data.sources.npz:Npz",
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
