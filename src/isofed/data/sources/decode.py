"""Picture files: listing them, and decoding them once into an array."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isofed.data.sources import Progress
from isofed.errors import UserError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
MOST_PIXELS = 100_000_000  # a larger picture is refused: a small file can claim a size that fills the memory
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
_TASK = 16  # pictures
_NAMED = 3  # broken pictures, in an error


def check_size(name: str, size: int) -> None:
    """Refuse a picture size that nobody can mean."""
    if not 1 <= size <= 4096:
        raise UserError(f"size of data set '{name}' must be from 1 to 4096 pixels, not {size}")


def _listing(path: Path) -> list[Path]:
    try:
        return sorted((p for p in path.iterdir() if not p.name.startswith(".")), key=lambda p: p.name)
    except OSError as error:
        raise UserError(f"the folder '{path}' cannot be read ({error.strerror}): check who may open it") from None


@dataclass(frozen=True)
class Contents:
    """What is in a folder, by name; hidden files count as nothing."""

    pictures: list[Path]
    folders: list[Path]
    others: list[Path]  # files that are not read


def contents(path: Path) -> Contents:
    """What is in a folder, looked through once: it may have a million files."""
    found = Contents([], [], [])
    for entry in _listing(path):
        if entry.suffix.lower() in SUFFIXES and entry.is_file():
            found.pictures.append(entry)
        else:
            (found.folders if entry.is_dir() else found.others).append(entry)
    return found


def files_below(path: Path) -> list[Path]:
    """The files inside a folder and all folders below it, by name."""
    found = contents(path)
    return found.pictures + found.others + [file for folder in found.folders for file in files_below(folder)]


def folders_in(path: Path) -> list[Path]:
    """The folders inside a folder, by name."""
    return [p for p in _listing(path) if p.is_dir()]


def pictures_in(path: Path) -> list[Path]:
    """The picture files inside a folder, by name."""
    return [p for p in _listing(path) if p.suffix.lower() in SUFFIXES and p.is_file()]


def decode(
    wanted: Sequence[tuple[npt.NDArray[Any], Path]],
    channels: str,
    progress: Progress | None = None,
    draft: bool = False,
) -> None:
    """Write each picture, squashed to a square, into the array [size, size, C] beside it.

    With ``draft`` a large JPEG is decoded at a fraction of its size, but twice as fine as needed: the resize smooths.
    """
    from PIL import Image

    Image.init()
    formats = [f for f in FORMATS if f in Image.OPEN]  # only these decoders ever see the bytes

    def one(out: npt.NDArray[Any], file: Path) -> str | None:
        """Decode a picture, or say in what way it is broken."""
        size = len(out)
        try:
            with Image.open(file, formats=formats) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise UserError(
                        f"'{file}' says it is {image.width} x {image.height} pixels, more than the {MOST_PIXELS:,} "
                        "that are read: make it smaller or remove it"
                    )
                if draft:
                    image.draft(None, (2 * size, 2 * size))
                out[:] = _pixels(image, size, channels).reshape(out.shape)
        except UserError:
            raise
        except Image.DecompressionBombError:
            raise UserError(f"'{file}' says it is larger than {MOST_PIXELS:,} pixels: remove it") from None
        except Exception as error:  # decoders fail in many ways on broken bytes
            why = "not a picture in a known format" if "cannot identify" in str(error) else str(error)
            return f"'{file}' cannot be read ({why})"
        return None

    def some(block: Sequence[tuple[npt.NDArray[Any], Path]]) -> tuple[int, list[str]]:
        return len(block), [why for out, file in block if (why := one(out, file))]

    # More threads than cores, or a task for each picture, only make small pictures wait for Python's lock; Pillow
    # decodes outside it.
    blocks = [wanted[start : start + _TASK] for start in range(0, len(wanted), _TASK)]
    done, broken = 0, list[str]()
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # of Pillow: the size has its own limit here, odd metadata do no harm
        for count, wrong in pool.map(some, blocks):
            broken += wrong
            for _ in range(count):
                done += 1
                if progress is not None and (done % 64 == 0 or done == len(wanted)):
                    progress(done, len(wanted))
    if len(broken) == 1:
        raise UserError(f"the picture {broken[0]}: replace or remove it")
    if broken:
        more = ", ..." if len(broken) > _NAMED else ""
        raise UserError(
            f"{len(broken):,} of {len(wanted):,} pictures are broken: {', '.join(broken[:_NAMED])}{more}; "
            "replace or remove them"
        )


def _pixels(image: Any, size: int, channels: str) -> npt.NDArray[np.uint8]:
    from PIL import Image

    image = in_mode(image, channels)
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image, dtype=np.uint8)


def in_mode(image: Any, channels: str) -> Any:
    """The picture with eight bits of red, green and blue, or of grey."""
    from PIL import Image

    if image.mode.startswith("I"):
        # Pillow would cut sixteen-bit grey at 255; the upper eight bits keep the picture.
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pictures have no fixed range, an .npz file can hold them")
    return image.convert("RGB" if channels == "rgb" else "L")
