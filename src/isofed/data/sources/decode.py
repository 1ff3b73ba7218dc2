"""Picture files: listing them, and decoding them once into an array."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from isofed.data.sources import Progress
from isofed.errors import UserError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
MOST_PIXELS = 100_000_000  # a larger picture is refused: a small file can claim a size that fills the memory
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
DECODING = 2  # the way in which somebody's own pictures are decoded: another makes what a cache holds worthless
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
    """The files inside a folder and all folders below it, by name, but not behind links, which may lead back."""
    if path.is_symlink():
        return []
    found = contents(path)
    return found.pictures + found.others + [file for folder in found.folders for file in files_below(folder)]


def folders_in(path: Path) -> list[Path]:
    """The folders inside a folder, by name."""
    return [p for p in _listing(path) if p.is_dir()]


def pictures_in(path: Path) -> list[Path]:
    """The picture files inside a folder, by name."""
    return [p for p in _listing(path) if p.suffix.lower() in SUFFIXES and p.is_file()]


class Lossy(NamedTuple):
    """Which of the pictures, by their place, held more than was read of them."""

    deep: list[int]  # sixteen bits where eight are read
    several: list[int]  # several pictures, of which the first is read


class _Decoded(NamedTuple):
    """What became of a picture."""

    broken: str = ""  # in what way
    deep: bool = False
    several: bool = False


def decode(
    wanted: Sequence[tuple[npt.NDArray[Any], Path]],
    channels: str,
    progress: Progress | None = None,
    published: bool = False,
) -> Lossy:
    """Write each picture, squashed to a square, into the array [size, size, C] beside it.

    Somebody's own pictures are turned as the camera says (EXIF). ``published`` ones are not, as no published code does;
    of these a large JPEG is decoded at a fraction of its size, but twice as fine as needed: the resize smooths.
    """
    from PIL import Image

    Image.init()
    formats = [f for f in FORMATS if f in Image.OPEN]  # only these decoders ever see the bytes

    def one(out: npt.NDArray[Any], file: Path) -> _Decoded:
        """Decode a picture, or say in what way it is broken."""
        size = len(out)
        try:
            with Image.open(file, formats=formats) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise UserError(
                        f"'{file}' says it is {image.width} x {image.height} pixels, more than the {MOST_PIXELS:,} "
                        "that are read: make it smaller or remove it"
                    )
                decoded = _Decoded(deep=_is_deep(image), several=_holds_several(image))
                if published:
                    image.draft(None, (2 * size, 2 * size))
                else:
                    turn_upright(image)
                out[:] = _pixels(image, size, channels).reshape(out.shape)
        except UserError:
            raise
        except Image.DecompressionBombError:
            raise UserError(f"'{file}' says it is larger than {MOST_PIXELS:,} pixels: remove it") from None
        except Exception as error:  # decoders fail in many ways on broken bytes
            why = "not a picture in a known format" if "cannot identify" in str(error) else str(error)
            return _Decoded(broken=f"'{file}' cannot be read ({why})")
        return decoded

    def some(block: Sequence[tuple[npt.NDArray[Any], Path]]) -> list[_Decoded]:
        return [one(out, file) for out, file in block]

    # More threads than cores, or a task for each picture, only make small pictures wait for Python's lock; Pillow
    # decodes outside it.
    blocks = [wanted[start : start + _TASK] for start in range(0, len(wanted), _TASK)]
    made: list[_Decoded] = []
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # of Pillow: the size has its own limit here, odd metadata do no harm
        for block in pool.map(some, blocks):
            for decoded in block:
                made.append(decoded)
                if progress is not None and (len(made) % 64 == 0 or len(made) == len(wanted)):
                    progress(len(made), len(wanted))
    broken = [decoded.broken for decoded in made if decoded.broken]
    if len(broken) == 1:
        raise UserError(f"the picture {broken[0]}: replace or remove it")
    if broken:
        more = ", ..." if len(broken) > _NAMED else ""
        raise UserError(
            f"{len(broken):,} of {len(wanted):,} pictures are broken: {', '.join(broken[:_NAMED])}{more}; "
            "replace or remove them"
        )
    deep, several = ([n for n, decoded in enumerate(made) if getattr(decoded, what)] for what in Lossy._fields)
    return Lossy(deep, several)


def _is_deep(image: Any) -> bool:
    """Whether a channel has sixteen bits or more, by the form of what is to be decoded."""
    return image.mode.startswith("I") or any(";16" in str(tile[3]) for tile in image.tile[:1])


def _holds_several(image: Any) -> bool:
    """Whether a file has further pages or frames; a phone's second picture, such as one for depth, is not meant."""
    with suppress(Exception):  # if what follows the first picture is damaged, that does no harm
        return image.format != "MPO" and bool(getattr(image, "is_animated", False))
    return False


def turn_upright(image: Any) -> None:
    """Turn a picture as its EXIF data say, as viewers do."""
    from PIL import ImageOps

    image.load()
    with suppress(Exception):  # damaged EXIF data turn nothing
        ImageOps.exif_transpose(image, in_place=True)


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
