"""Your own pictures as a table lists them: a ``.csv`` file with a line for each, as clinics and studies export it."""

from __future__ import annotations

import csv
import io
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isofed.data.base import Dataset
from isofed.data.sources import Progress, existing
from isofed.data.sources.decode import SUFFIXES, check_size
from isofed.data.sources.items import Item, made_of
from isofed.data.sources.pictures import text
from isofed.errors import UserError
from isofed.words import many

_NEEDED = ("picture", "label")
_OPTIONAL = ("site", "patient", "part")
_SEPARATORS = ",;\t|"
_NAMED = 5  # columns that are not used, in a note


@dataclass(frozen=True)
class Line:
    """A line of the table: its number, as an editor counts it, and what its cells say."""

    number: int
    cells: Mapping[str, str]


@dataclass(frozen=True)
class Table:
    """Your own pictures as a .csv file lists them: picture, label, and if it has them site, patient and part.

    The options ``picture``, ``label``, ``site``, ``patient`` and ``part`` name columns that are called otherwise, or
    are ``none`` where such a column is not meant. Pictures lie beside the table, or where their paths say from there;
    ``suffix`` is added to their names. All pictures of a patient are set aside together. ``part`` says train or test;
    without it a fifth is set aside.
    """

    size: int = 32
    channels: Literal["rgb", "grey"] = "rgb"
    picture: str = "picture"
    label: str = "label"
    site: str = "site"
    patient: str = "patient"
    part: str = "part"
    suffix: str = ""

    def __post_init__(self) -> None:
        check_size("table", self.size)

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        path = existing(root, "table", "a .csv file")
        parts, notes = self.items(path, lambda column: shlex.quote(f"data={path}:{column}=NAME"))
        return made_of(path, parts, self.size, self.channels, progress, notes)

    def items(self, path: Path, naming: Callable[[str], str]) -> tuple[list[list[Item]], list[str]]:
        """The pictures of the training and the test part, or of a single one, and what a person should know.

        ``naming`` shows how to say which column something is.
        """
        header, rows = _read(path)
        used = self._columns(path, header, naming)
        unused = [name for name in header if name and name not in used.values()]
        lines = _lines(header, rows, used.values())
        notes = [f"{_list(unused)} of '{path.name}' {_is(unused)} not used"] if unused else []
        _check_filled(path, lines, used.values())
        files = _files(path, [(line, line.cells[used["picture"]] + self.suffix) for line in lines])
        items = [
            Item(
                file,
                line.cells[used["label"]],
                line.cells[used["site"]] if "site" in used else "",
                line.cells[used["patient"]] if "patient" in used else "",
            )
            for file, line in zip(files, lines, strict=True)
        ]
        if "part" not in used:
            return [items], notes
        return _divided(path, items, [(line, line.cells[used["part"]]) for line in lines]), notes

    def _columns(self, path: Path, header: Sequence[str], naming: Callable[[str], str]) -> dict[str, str]:
        """Which column is used for what; letters may be small or capital."""
        there = f"it has {_list([name for name in header if name], 20)}"
        used = {}
        for what in (*_NEEDED, *_OPTIONAL):
            name: str = getattr(self, what)
            if name == "none" and what in _OPTIONAL:
                continue
            found = [column for column in header if column == name] or [
                column for column in header if column.casefold() == name.casefold()
            ]
            if len(found) > 1:
                raise UserError(f"'{path.name}' has several columns '{name}': give each a name of its own")
            if found:
                used[what] = found[0]
            elif name != what:
                raise UserError(f"'{path.name}' has no column '{name}', which {what}= names: {there}")
            elif what in _NEEDED:
                how = f"say which one it is, as in {naming(what)}"
                raise UserError(f"'{path.name}' has no column '{what}': {there}; {how}")
        return used


def _read(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The names of the columns, and the cells of all other lines that are not empty, with their numbers."""
    if path.is_dir():
        raise UserError(f"'{path}' is a folder: data set 'table' needs a .csv file")
    content = text(path, "table")
    first, _, rest = content.lstrip().partition("\n")
    said = re.fullmatch(r"sep=(.)\r?", first, re.IGNORECASE)  # as Excel writes it
    separator = said[1] if said else max(_SEPARATORS, key=first.count)
    skipped = content[: len(content) - len(rest)].count("\n") if said else 0
    reader = csv.reader(
        io.StringIO(rest if said else content, newline=""), delimiter=separator, strict=True, skipinitialspace=True
    )
    rows = []
    try:
        for row in reader:
            if any(map(str.strip, row)):
                rows.append((skipped + reader.line_num, [cell.strip() for cell in row]))
    except csv.Error as error:
        where = f"after line {skipped + reader.line_num - 1}" if not rows else f"in the record after line {rows[-1][0]}"
        raise UserError(f"'{path}' cannot be read as a table ({error}, {where}): is a quotation mark open?") from None
    if len(rows) < 2:
        raise UserError(f"'{path}' has no pictures: it needs the names of the columns, and a line for each picture")
    (_, header), *rows = rows
    for number, row in rows:
        if len(row) != len(header):
            raise UserError(
                f"line {number} of '{path}' has {many(len(row), 'cell')}, and the first line names "
                f"{many(len(header), 'column')}: put texts with commas in quotes"
            )
    return header, rows


def _lines(header: list[str], rows: list[tuple[int, list[str]]], used: Collection[str]) -> list[Line]:
    """What the lines say in the columns that are used: a study may have a hundred others."""
    places = {name: header.index(name) for name in used}
    return [Line(number, {name: row[place] for name, place in places.items()}) for number, row in rows]


def _check_filled(path: Path, lines: Sequence[Line], columns: Collection[str]) -> None:
    """Refuse a line that leaves out what is used."""
    empty = [(line.number, name) for line in lines for name in columns if not line.cells[name]]
    if empty:
        number, name = empty[0]
        more = f", and {many(len(empty) - 1, 'other cell')} {_is(empty[1:])} empty" if len(empty) > 1 else ""
        raise UserError(f"line {number} of '{path}' has nothing in the column '{name}'{more}: fill it or leave it out")


def _files(path: Path, named: Sequence[tuple[Line, str]]) -> list[Path]:
    """The files of the pictures, each of which must be there, once."""
    files: list[Path] = []
    first: dict[str, int] = {}
    missing = []
    for line, name in named:
        file = path.parent / name
        plain = os.path.normpath(file)
        if plain in first:
            raise UserError(f"'{path}' names the picture '{name}' twice, in the lines {first[plain]} and {line.number}")
        first[plain] = line.number
        if not os.path.isfile(file):
            missing.append((line.number, file))
        files.append(file)
    if missing:
        number, file = missing[0]
        which = f"the picture '{file}', which line {number} of '{path}' names, is not there"
        if len(missing) > 1:
            which = f"{len(missing):,} of the {len(files):,} pictures that '{path}' names are not there, the first is "
            which += f"'{file}' (line {number})"
        raise UserError(f"{which}: paths begin where the table lies{_hint(file)}")
    return files


def _divided(path: Path, items: Sequence[Item], said: Sequence[tuple[Line, str]]) -> list[list[Item]]:
    """Training and test pictures as the table says, or all where it has no test picture."""
    parts: dict[str, list[Item]] = {"train": [], "test": []}
    for item, (line, part) in zip(items, said, strict=True):
        if part.lower() not in parts:
            raise UserError(f"line {line.number} of '{path}' says that the part is '{part}': it must be train or test")
        parts[part.lower()].append(item)
    if not parts["train"]:
        raise UserError(f"'{path}' has no picture whose part is 'train'")
    return [part for part in parts.values() if part]


def _hint(file: Path) -> str:
    """What may be meant by the name of a file that is not there."""
    if os.path.isdir(file):
        return ", and this is a folder: name each picture in it"
    if "\\" in file.name:
        return ", with / between folders"
    return "" if file.suffix.lower() in SUFFIXES else "; suffix=.jpg adds an ending to the names"


def _list(names: Sequence[str], most: int = _NAMED) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:most])
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"the column{'s' if len(names) > 1 else ''} {shown}{more}"


def _is(names: Sequence[object]) -> str:
    return "is" if len(names) == 1 else "are"
