"""Scikit-learn's handwritten digits: 1,797 pictures of 8x8 that ship inside that package, so nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from isofed import draws, extras
from isofed.data.base import Dataset, Part, held_out
from isofed.data.sources import Progress
from isofed.errors import UserError

Images = npt.NDArray[np.uint8]
CLASSES = tuple("0123456789")
STYLES = ("plain", "inverted", "hazy", "turned")


def _digits(name: str) -> tuple[Part, Part]:
    """The training and the test part, the same in every run."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(f"data set '{name}' comes with scikit-learn: {extras.command('plot')}") from None
    bunch = load_digits()
    images = torch.from_numpy((bunch.images * 15).astype(np.uint8))[..., None].contiguous()  # 0..16 to 0..240
    return held_out(name, Part(images, torch.from_numpy(bunch.target.astype(np.int64))))


@dataclass(frozen=True)
class Digits:
    """Handwritten digits, 8x8 grey, 10 classes, 1,797 pictures; needs scikit-learn and no download."""

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        train, test = _digits("digits")
        return Dataset.build("digits", CLASSES, train, test)


@dataclass(frozen=True)
class DigitsDomains:
    """The same digits in four styles (plain, inverted, hazy, turned), one style a picture, for feature shift."""

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        # Styled after the division into parts, so a picture is in the same part as in `digits`.
        train, test = (_styled(part, i) for i, part in enumerate(_digits("digits-domains")))
        return Dataset.build("digits-domains", CLASSES, train, test, domains=STYLES)


def _styled(part: Part, number: int) -> Part:
    rng = draws.generator(0, "data/digits-domains", number)
    labels = part.labels.numpy()
    domains = np.empty(len(labels), dtype=np.int64)
    for label in range(len(CLASSES)):
        mine = rng.permutation(np.flatnonzero(labels == label))
        domains[mine] = (np.arange(len(mine)) + label) % len(STYLES)  # the odd pictures go to another style each time
    images = part.images.numpy()[..., 0]
    noise = np.rint(rng.normal(0, 16, images.shape))
    styles = (images, 255 - images, _hazy(images, noise), _turned(images))
    styled = np.choose(domains[:, None, None], styles).astype(np.uint8)
    return Part(torch.from_numpy(styled[..., None]), part.labels, torch.from_numpy(domains))


def _neighbours(images: Images, height: int, width: int) -> list[Images]:
    """The pictures moved by every offset of a small window, edges repeated."""
    above, left = (height - 1) // 2, (width - 1) // 2
    padded = np.pad(images, ((0, 0), (above, height - 1 - above), (left, width - 1 - left)), mode="edge")
    rows, columns = images.shape[1:]
    return [padded[:, y : y + rows, x : x + columns] for y in range(height) for x in range(width)]


def _hazy(images: Images, noise: npt.NDArray[np.float64]) -> Images:
    """Out of focus, with little contrast on a grey ground, and noisy."""
    blurred = np.sum(_neighbours(images, 3, 3), axis=0, dtype=np.int64) // 9
    hazy: Images = np.clip(80 + blurred // 2 + noise, 0, 255).astype(np.uint8)
    return hazy


def _turned(images: Images) -> Images:
    """A quarter turn, drawn with a thick pen."""
    turned = np.rot90(images, axes=(1, 2))
    thick: Images = np.max(_neighbours(turned, 2, 2), axis=0)
    return thick
