"""Made-up pictures of any number, size and difficulty, for speed measurements and tests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from isofed import draws
from isofed.data.base import Dataset, Part
from isofed.data.sources import Progress
from isofed.errors import UserError

_GRID = 4  # the pictures are smooth: a few random numbers, spread over the picture
_MODES = 2  # patterns in a class, so that a class is more than one blob
_CHUNK = 1 << 15  # samples made in one go


@dataclass(frozen=True)
class Synthetic:
    """Made-up pictures: two smooth patterns a class plus noise, and with domains=k also k styles."""

    samples: int = 10_000
    test: int = 2_000
    classes: int = 10
    size: int = 8
    channels: int = 1
    noise: float = 0.8
    seed: int = 0
    domains: int = 0

    def __post_init__(self) -> None:
        least = {"test": 1, "classes": 2, "size": 1, "channels": 1, "domains": 0}
        for option, low in least.items():
            if getattr(self, option) < low:
                raise UserError(f"{option} of data set 'synthetic' must be at least {low}, not {getattr(self, option)}")
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise UserError(f"noise of data set 'synthetic' must be zero or more, not {self.noise:g}")
        groups = self.classes * max(self.domains, 1)
        if self.samples < groups:
            every = "class of every domain" if self.domains else "class"
            raise UserError(f"samples of data set 'synthetic' must be at least {groups}, one for every {every}")

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        names = [f"class {i}" for i in range(self.classes)]
        domains = [f"domain {i}" for i in range(self.domains)]
        train, test = self._part(self.samples, 0), self._part(self.test, 1)
        return Dataset.build("synthetic", names, train, test, domains=domains)

    def _part(self, count: int, number: int) -> Part:
        grid = min(_GRID, self.size)
        patterns = draws.generator(self.seed, "synthetic/patterns").standard_normal(
            (self.classes, _MODES, self.channels, grid * grid), dtype=np.float32
        )
        scale = math.sqrt(self.channels * grid * grid) / _GRID  # more numbers a picture do not make it easier
        spread = _spread(grid, self.size)
        gain, offset = self._styles()
        order = draws.generator(self.seed, "synthetic/order", number).permutation(count)
        labels = order % self.classes
        domains = order // self.classes % max(self.domains, 1)
        images = np.empty((count, self.size, self.size, self.channels), dtype=np.uint8)
        for start in range(0, count, _CHUNK):
            here = slice(start, min(start + _CHUNK, count))
            rng = draws.generator(self.seed, "synthetic/noise", number, start)
            length = here.stop - start
            mode = rng.integers(_MODES, size=length)
            values = rng.standard_normal((length, self.channels, grid * grid), dtype=np.float32)
            values *= np.float32(self.noise * scale)
            values += patterns[labels[here], mode]
            # On a coarse grid of binary fractions the matrix product is exact, so any machine makes the same pictures.
            np.rint(values * 64, out=values)
            pixels = (values.reshape(-1, grid * grid) @ spread).reshape(length, self.channels, -1) / 64
            if self.domains:
                pixels = pixels * gain[domains[here], :, None] + offset[domains[here], :, None]
            levels = np.clip(np.rint(pixels * 40 + 128), 0, 255).astype(np.uint8)
            images[here] = levels.reshape(length, self.channels, self.size, self.size).transpose(0, 2, 3, 1)
        where = torch.from_numpy(domains) if self.domains else None
        return Part(torch.from_numpy(images), torch.from_numpy(labels), where)

    def _styles(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Contrast and brightness of every domain and channel; the first is plain and every second one inverted."""
        rng = draws.generator(self.seed, "synthetic/styles")
        shape = (max(self.domains, 1), self.channels)
        gain = rng.uniform(0.4, 1.0, shape).astype(np.float32)
        offset = rng.uniform(-1.5, 1.5, shape).astype(np.float32)
        gain[1::2] *= -1
        gain[0], offset[0] = 1, 0
        return gain, offset


def _spread(grid: int, size: int) -> npt.NDArray[np.float32]:
    """The matrix [grid*grid, size*size] of bilinear interpolation, its weights multiples of 1/256."""
    at = np.linspace(0, grid - 1, size)
    weight = np.maximum(0, 1 - np.abs(at[None, :] - np.arange(grid)[:, None]))
    weight = np.rint(weight * 16) / 16
    return np.kron(weight, weight).astype(np.float32)
