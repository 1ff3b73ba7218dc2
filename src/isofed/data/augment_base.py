"""What every augmentation is, and the two refusals they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from isofed.errors import UserError

Draws = dict[str, npt.NDArray[Any]]
Shape = tuple[int, int, int]  # channels, height, width


@dataclass(frozen=True)
class Augmentation:
    """One change. Its random numbers are drawn with steps as the first axis, under keys of its own."""

    def draw(self, steps: int, batch: int, rng: np.random.Generator, shape: Shape) -> Draws:
        return {}

    def apply(self, images: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """Change the pictures [B, H, W, C] of one step; ``draws`` holds its own step's slices."""
        raise NotImplementedError


def need_grey_or_colour(shape: Shape, name: str) -> None:
    """Refuse pictures whose channels are neither one grey nor red, green and blue."""
    if shape[0] not in (1, 3):
        raise UserError(f"augmentation '{name}' changes grey or RGB pictures, and these have {shape[0]} channels")


def need_bytes(images: Tensor, name: str) -> None:
    """Refuse pictures that are not made of levels from 0 to 255."""
    if images.dtype != torch.uint8:
        raise UserError(f"augmentation '{name}' needs uint8 pictures, and the values of these are floating-point")


def need_level(fill: int, name: str) -> None:
    """Refuse a fill that is no grey level."""
    if not 0 <= fill <= 255:
        raise UserError(f"fill of augmentation '{name}' must be from 0 to 255, not {fill}")
