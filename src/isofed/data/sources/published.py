"""What the published data sets share: where their files may lie, and how their plain bytes become pictures and labels.

A file is judged by its size before anything of that size is set aside, so that one that claims too much costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isofed.data.base import Part
from isofed.data.sources import data_folder
from isofed.errors import UserError

Bytes = npt.NDArray[np.uint8]

MOST_BYTES = 1 << 30  # of one file: four times the largest one that is published
_BLOCK = 2 << 20  # bytes read in one go: what is in a processor's cache is rearranged much faster


@dataclass(frozen=True)
class Layout:
    """One form a data set is published in: its usual folders, and its files, each with the names it may have."""

    folders: tuple[str, ...]
    files: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return f"{self.folders[0]}/ with {', '.join(names[0] for names in self.files)}"

    def found(self, folder: Path) -> list[Path | None]:
        """The path of each file, where it is in this folder."""
        return [next((folder / n for n in names if (folder / n).is_file()), None) for names in self.files]


def locate(root: str | None, name: str, layouts: Sequence[Layout]) -> tuple[Layout, list[Path]]:
    """The first layout with files in the folder the user names (or ISOFED_DATA), or in a usual folder inside it."""
    base = data_folder(root, name)
    try:
        # The folder itself comes last: two data sets that name their files alike may share a parent.
        places = [(layout, base / folder) for layout in layouts for folder in (*layout.folders, "")]
        partial = None
        for layout, folder in places:
            files = layout.found(folder)
            whole = [file for file in files if file is not None]
            if len(whole) == len(files):
                return layout, whole
            if whole and partial is None:
                partial = folder, layout.files[files.index(None)][0]
    except OSError as error:
        raise unreadable(base, error) from None
    if partial:
        raise UserError(f"'{partial[0]}' has no file '{partial[1]}': data set '{name}' needs it, unpack it again")
    raise UserError(f"there is no data set '{name}' in '{base}': it needs {', or '.join(map(str, layouts))}")


def unreadable(path: Path, error: OSError) -> UserError:
    """The error for a file or folder that the system refuses to open."""
    return UserError(f"'{path}' cannot be read ({error.strerror or error})")


def record_count(path: Path, size: int, what: str = "picture") -> int:
    """How many records of this many bytes a file holds."""
    try:
        found = path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from None
    if found > MOST_BYTES:
        raise UserError(f"'{path}' has {found:,} bytes: isofed reads at most {MOST_BYTES:,} from one such file")
    if not found or found % size:
        raise UserError(f"'{path}' has {found:,} bytes: it must be {size:,} for each {what}, so it is not complete")
    return found // size


def records(path: Path, size: int, what: str = "picture") -> Iterator[Bytes]:
    """The records of a file, some at a time; what is yielded is valid until the next."""
    count = record_count(path, size, what)
    buffer = np.empty((max(1, _BLOCK // size), size), np.uint8)
    try:
        with path.open("rb") as stream:
            for start in range(0, count, len(buffer)):
                block = buffer[: count - start]
                if stream.readinto(block.reshape(-1).data) != block.size:
                    raise UserError(f"'{path}' became shorter while it was read: it is being written by something else")
                yield block
    except OSError as error:
        raise unreadable(path, error) from None


def pictures(path: Path, head: int, side: int, by_column: bool = False) -> tuple[Bytes, Bytes]:
    """The first bytes [N, head] of each record of a file and the square colour pictures [N, H, W, 3] behind them."""
    size = head + 3 * side * side
    count = record_count(path, size)
    heads, images = np.empty((count, head), np.uint8), np.empty((count, side, side, 3), np.uint8)
    start = 0
    for block in records(path, size):
        stop = start + len(block)
        heads[start:stop] = block[:, :head]
        planes = block[:, head:].reshape(-1, 3, side, side)
        fill(images[start:stop], planes.swapaxes(2, 3) if by_column else planes)
        start = stop
    return heads, images


def fill(images: Bytes, planes: Bytes) -> None:
    """Write planes [N, C, H, W] as pictures [N, H, W, C]; a channel at a time is several times faster than at once."""
    for channel in range(planes.shape[1]):
        images[..., channel] = planes[:, channel]


def class_numbers(path: Path, labels: npt.NDArray[Any], classes: int, first: int = 0) -> Tensor:
    """Labels as they stand in a file, as class numbers from 0."""
    wrong = (labels < first) | (labels >= first + classes)
    if wrong.any():
        place = int(wrong.argmax())
        raise UserError(
            f"'{path}' has the label {labels[place]} at picture {place}: it must be {first} to {first + classes - 1}"
        )
    return torch.from_numpy(labels.astype(np.int64) - first)


def part(images: Bytes, labels: Tensor) -> Part:
    """One part of a data set."""
    return Part(torch.from_numpy(images), labels)


def class_names(path: Path, count: int) -> tuple[str, ...]:
    """The names in a text file, one a line."""
    try:
        with path.open("rb") as stream:
            text = stream.read(1 << 16).decode()
    except OSError as error:
        raise unreadable(path, error) from None
    except UnicodeDecodeError:
        raise UserError(f"'{path}' is not a text file: it must hold {count} class names, one a line") from None
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if len(names) != count:
        raise UserError(f"'{path}' has {len(names)} lines with a name: it must hold {count} class names, one a line")
    return names
