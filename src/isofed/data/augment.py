"""Changes to training pictures, ``crop:4+flip``: drawn beforehand into the visit's plan, applied to whole batches.

Two kinds of change fit here. A :class:`Move` says from where in the picture each pixel comes; moves that stand next
to each other are joined, so that crop and flip together cost one gather. Any other change (rotation, colour jitter,
a policy) overrides :meth:`Augmentation.apply`, in a file of its own. Callers see only :class:`Augment`: what it draws,
and apply.

Nothing here draws or reads a device value while pictures are changed, so a step can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from isofed import spec
from isofed.data.augment_base import Augmentation, Draws, Shape
from isofed.data.augment_colour import Jitter
from isofed.data.augment_geometry import ResizedCrop, Rotation
from isofed.data.autoaugment import AutoAugment
from isofed.errors import UserError, unknown

__all__ = ["AUGMENTATIONS", "Augment", "Augmentation", "Crop", "Draws", "Flip", "Move", "Shape", "parse"]


@dataclass(frozen=True)
class Move(Augmentation):
    """A change that takes each pixel from another row and column of the same picture."""

    def source(self, rows: Tensor, columns: Tensor, draws: Mapping[str, Tensor], shape: Shape) -> tuple[Tensor, Tensor]:
        """From where the pixels at these rows [B, H] and columns [B, W] come; outside the picture means black."""
        raise NotImplementedError

    def apply(self, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        return _move((self,), images, draws)


@dataclass(frozen=True)
class Crop(Move):
    """Shift by up to ``by`` pixels each way: a random crop of the picture padded on all sides."""

    by: int = 4
    pad: Literal["zero", "reflect"] = "zero"

    def __post_init__(self) -> None:
        if not 1 <= self.by <= 1024:
            raise UserError(f"by of augmentation 'crop' must be from 1 to 1024 pixels, not {self.by}")

    def draw(self, steps: int, batch: int, rng: np.random.Generator, shape: Shape) -> Draws:
        if self.by >= min(shape[1:]):
            raise UserError(
                f"'crop:{self.by}' shifts pictures of {shape[1]} x {shape[2]} pixels out of sight: "
                f"use at most {min(shape[1:]) - 1} pixels"
            )
        kind = np.int8 if self.by < 128 else np.int16
        return {
            key: rng.integers(-self.by, self.by + 1, (steps, batch), dtype=kind) for key in ("augment.dy", "augment.dx")
        }

    def source(self, rows: Tensor, columns: Tensor, draws: Mapping[str, Tensor], shape: Shape) -> tuple[Tensor, Tensor]:
        rows = rows + draws["augment.dy"][:, None]
        columns = columns + draws["augment.dx"][:, None]
        if self.pad == "reflect":
            # Mirrored about the first and the last pixel, which are not repeated.
            rows = (shape[1] - 1) - ((shape[1] - 1) - rows.abs()).abs()
            columns = (shape[2] - 1) - ((shape[2] - 1) - columns.abs()).abs()
        return rows, columns


@dataclass(frozen=True)
class Flip(Move):
    """Mirror left to right, every second picture on average."""

    def draw(self, steps: int, batch: int, rng: np.random.Generator, shape: Shape) -> Draws:
        return {"augment.flip": rng.integers(0, 2, (steps, batch), dtype=np.uint8)}

    def source(self, rows: Tensor, columns: Tensor, draws: Mapping[str, Tensor], shape: Shape) -> tuple[Tensor, Tensor]:
        mirrored = (shape[2] - 1) - columns
        return rows, torch.where(draws["augment.flip"][:, None] != 0, mirrored, columns)


AUGMENTATIONS: dict[str, type[Augmentation]] = {
    "crop": Crop,
    "flip": Flip,
    "rotation": Rotation,
    "resized_crop": ResizedCrop,
    "jitter": Jitter,
    "autoaugment": AutoAugment,
}


@dataclass(frozen=True)
class Augment:
    """Changes made one after the other; empty for ``none``."""

    parts: tuple[Augmentation, ...] = ()

    def draw(self, steps: int, batch: int, rng: np.random.Generator, shape: Shape) -> Draws:
        """Every random number of ``steps`` batches, each array with the step as its first axis."""
        drawn: Draws = {}
        for part in self.parts:
            drawn.update(part.draw(steps, batch, rng, shape))
        return drawn

    def apply(self, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """The changed pictures [B, H, W, C] of one step, from the drawn numbers of that step ([B] each)."""
        for move, group in groupby(self.parts, key=lambda part: isinstance(part, Move)):
            if move:
                images = _move(tuple(p for p in group if isinstance(p, Move)), images, draws)
            else:
                for part in group:
                    images = part.apply(images, draws)
        return images

    def __str__(self) -> str:
        names = {cls: name for name, cls in AUGMENTATIONS.items()}
        return "+".join(str(spec.describe(p, names[type(p)])) for p in self.parts) or "none"


def parse(text: Any) -> Augment:
    """Read ``none``, ``flip``, ``crop:4,pad=reflect+flip``, ``crop:4+flip+autoaugment``."""
    choices = spec.parse(text, "augmentation")
    if any(choice.name == "none" for choice in choices):
        if len(choices) > 1 or choices[0].options:
            raise UserError(f"augmentation 'none' stands alone and has no options, it cannot be part of '{text}'")
        return Augment()
    for choice in choices:
        if choice.name not in AUGMENTATIONS:
            raise unknown("augmentation", choice.name, ["none", *AUGMENTATIONS])
    names = [choice.name for choice in choices]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"augmentation '{twice}' is given twice: once is enough")
    return Augment(tuple(spec.make(AUGMENTATIONS[c.name], c, "augmentation") for c in choices))


def _move(moves: tuple[Move, ...], images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
    """Several moves with one gather: follow each pixel of the result back to where it comes from."""
    batch, height, width, channels = images.shape
    device = images.device
    rows = torch.arange(height, device=device).expand(batch, height)
    columns = torch.arange(width, device=device).expand(batch, width)
    for move in reversed(moves):  # the last move made the result, so it is undone first
        rows, columns = move.source(rows, columns, draws, (channels, height, width))
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    start = torch.arange(batch, device=device)[:, None] * (height * width)
    place = (start + rows.clamp(0, height - 1) * width)[:, :, None] + columns.clamp(0, width - 1)[:, None, :]
    moved = images.reshape(-1, channels).index_select(0, place.reshape(-1)).view(batch, height, width, channels)
    return moved.mul_(inside[..., None])  # several times faster than masked_fill
