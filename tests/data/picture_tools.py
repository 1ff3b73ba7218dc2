"""Sets of tiny pictures for tests: every picture has a colour of its own, which says after loading which one it is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from PIL import Image

from isofed import data


class Painter:
    """Paints plain 8x8 pictures and knows which file each colour is in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[tuple[int, int, int], Path] = {}

    def paint(self, place: str, names: Iterable[str]) -> None:
        (self.root / place).mkdir(parents=True, exist_ok=True)
        for name in names:
            number = len(self.files) + 1
            colour = (number & 255, number >> 8, 77)
            self.files[colour] = self.root / place / name
            Image.new("RGB", (8, 8), colour).save(self.root / place / name, format="PNG")

    def find(self, part: data.Part) -> list[Path]:
        """The file of every picture of a part, relative to the root."""
        assert bool((part.images == part.images[:, :1, :1]).all()), "a plain picture stays plain"
        return [self.files[tuple(colour)].relative_to(self.root) for colour in part.images[:, 0, 0].tolist()]


def numbered(count: int, suffix: str = "png") -> list[str]:
    return [f"{number:03}.{suffix}" for number in range(count)]


def rows(part: data.Part) -> list[bytes]:
    return [image.tobytes() for image in part.images.numpy()]
