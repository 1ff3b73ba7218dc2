"""What of somebody's folders of pictures is not used, so that nothing is left out without a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isofed.data.sources.decode import SUFFIXES, Contents, Lossy, files_below, pictures_in

LOST = ((len(Lossy._fields), 2), "int64")  # the array that a cache keeps of it


@dataclass
class Unused:
    """What was found in class folders beside their pictures."""

    unread: list[Path] = field(default_factory=list)  # files of other kinds
    deeper: list[Path] = field(default_factory=list)  # files in folders inside class folders

    def add(self, found: Contents) -> None:
        """Put down what of a class folder is not used."""
        self.unread += found.others
        self.deeper += [file for folder in found.folders for file in files_below(folder)]

    def notes(self) -> list[str]:
        """A sentence about each kind."""
        told = []
        if self.unread:
            where = _files(self.unread, "in a class folder", "in class folders")
            told.append(f"{where} not read: isofed reads {', '.join(sorted(SUFFIXES))}")
        if self.deeper:
            where = _files(self.deeper, "in a folder inside a class folder", "in folders inside class folders")
            told.append(f"{where} not used: pictures belong into the class folder itself")
        return told


def _files(found: Sequence[Path], where_one: str, where_many: str) -> str:
    """The beginning of a sentence about files: which, or how many."""
    if len(found) == 1:
        return f"the file '{found[0]}' {where_one} is"
    return f"{len(found):,} files {where_many}, the first '{found[0]}', are"


def strays(folders: Sequence[Path], kind: str) -> list[str]:
    """A sentence about the pictures that lie beside the class (or site) folders, where they belong to nothing."""
    found = [file for folder in folders for file in pictures_in(folder)]
    if not found:
        return []
    if len(found) == 1:
        return [f"the picture '{found[0]}' lies beside the {kind} folders and is not used"]
    return [f"{len(found):,} pictures lie beside the {kind} folders and are not used, the first is '{found[0]}'"]


def lost(found: Lossy) -> npt.NDArray[np.int64]:
    """Of each way in which pictures held more than was read: how many did, and the place of the first."""
    return np.array([[len(places), places[0] if places else 0] for places in found], dtype=np.int64)


def lost_notes(counts: npt.NDArray[Any], files: Sequence[Path]) -> list[str]:
    """A sentence about each way."""
    (deep, first_deep), (several, first_several) = counts.tolist()
    told = []
    if deep:
        who = f"the picture '{files[first_deep]}' has"
        if deep > 1:
            who = f"{deep:,} pictures, the first '{files[first_deep]}', have"
        told.append(
            f"{who} 16 bits a channel, of which the upper 8 are read, so that 12-bit values become 0 to 15: "
            "floating point in an .npz file keeps them"
        )
    if several:
        who = f"the file '{files[first_several]}' holds"
        if several > 1:
            who = f"{several:,} files, the first '{files[first_several]}', hold"
        told.append(f"{who} several pictures (pages or frames), of which the first is read")
    return told
