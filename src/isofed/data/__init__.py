"""Data sets: built-in ones, your own files, and how they are divided among clients."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from isofed import spec
from isofed.data.base import Dataset, Part, validation_split
from isofed.data.hugging_face import from_hugging_face
from isofed.data.sources import SOURCES, Progress, source
from isofed.errors import UserError, unknown

__all__ = [
    "AT_SITES",
    "FILES",
    "Dataset",
    "Part",
    "Progress",
    "absolute",
    "elsewhere",
    "from_hugging_face",
    "load",
    "option_names",
    "summaries",
    "validation_split",
]


FILES = {".npz": "npz", ".csv": "table", ".tsv": "table"}  # which source reads a file of which ending
AT_SITES = "sites"  # the value of ``data`` where each site of a deployment has its own folder


def load(data: str | os.PathLike[str], root: str | None = None, progress: Progress | None = None) -> Dataset:
    """Get a data set by name with options, or from a path.

    ``data`` is a text such as ``digits``, ``synthetic:samples=1000000`` or ``folder:size=64`` (with the path in
    ``root``), or directly the path of an ``.npz`` or ``.csv`` file or of a folder with class or domain/class folders,
    which may carry options too: ``pictures:size=64``. ``progress(done, total)`` is called while many files are read.
    """
    choice, root = _chosen(data, root)
    return spec.make(source(choice.name), choice, "data set").load(root, progress)


def elsewhere(data: str, root: str) -> dict[str, Any]:
    """The settings that say that data lie in another place now: ``root`` is a data set's, or takes a path's place."""
    if data.partition(":")[0] in SOURCES:
        return {"root": root}
    _, colon, options = data.rpartition(":")  # the old place need not be there any more
    place = str(Path(root).expanduser().absolute())
    return {"data": f"{place}:{options}" if colon and "=" in options and "/" not in options else place}


def _chosen(data: Any, root: str | None = None) -> tuple[spec.Choice, str | None]:
    given = os.fspath(data) if isinstance(data, os.PathLike) else data
    given = given.strip() if isinstance(given, str) else given
    if given == "":
        raise UserError("data= is empty: it must name a data set, such as digits, or the path of your own")
    if not isinstance(given, str) or given.partition(":")[0] in SOURCES:
        return spec.parse_one(given, "data set"), root
    return _from_path(given, root)


def option_names(data: str) -> list[str]:
    """The options that a data set, or what lies at a path, can have; none of what is no data set."""
    try:
        cls: Any = source(_chosen(data)[0].name)
    except UserError:
        return []
    return [spec.option(field) for field in dataclasses.fields(cls)]


def absolute(data: str) -> str:
    """The same choice with an absolute path, where it is one, so that it still holds in another folder."""
    path, options = _cut(data.strip())
    if data.partition(":")[0] in SOURCES or not os.path.exists(path):
        return data
    return f"{path.absolute()}:{options}" if options else str(path.absolute())


def _cut(text: str) -> tuple[Path, str]:
    """A path and the options behind it; a path may hold any sign, so it is looked for before options are cut off."""
    path, (head, colon, tail) = os.path.expanduser(text), text.rpartition(":")
    if not os.path.exists(path) and colon and os.path.exists(os.path.expanduser(head)):
        return Path(os.path.expanduser(head)), tail
    return Path(path), ""


def summaries() -> dict[str, str]:
    """The name of every source with one line about it."""
    return {name: (source(name).__doc__ or "").strip().splitlines()[0] for name in SOURCES}


def _from_path(text: str, root: str | None) -> tuple[spec.Choice, str]:
    """The source that fits a path."""
    path, options = _cut(text)
    if not os.path.exists(path):
        head, _, rest = text.partition(":")
        if rest.count(":") and os.path.exists(os.path.expanduser(head)):
            raise UserError(
                f"'{text}' has a colon too many: options are joined by commas, {head}:{rest.replace(':', ',')}"
            )
        if os.sep in text or "/" in text or text.startswith((".", "~")) or path.suffix.lower() in FILES:
            raise UserError(f"there is no file or folder '{text}': data must be a path that exists or a known name")
        name = spec.parse_one(text, "data set").name
        if name == AT_SITES:
            raise UserError("data=sites are those of real sites, which are not here: see isofed flower --help")
        raise unknown("data set, file or folder", name, SOURCES)
    if root is not None:
        raise UserError(f"the data '{text}' are a path already: leave out root, or name the kind, like data=folder")
    if path.is_dir():
        from isofed.data.sources.folders import recognise

        name = recognise(path)
    else:
        kind = FILES.get(path.suffix.lower())
        if kind is None:
            raise UserError(
                f"'{text}' is a file isofed does not read: data can be an .npz or .csv file or a folder of pictures"
            )
        name = kind
    return spec.parse_one(f"{name}:{options}" if options else name, "data set"), str(path)
