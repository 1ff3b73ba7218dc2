"""Normal noise for vectors of weights, drawn like everything else that is random in a run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from isofed.draws import generator
from isofed.layout import Layout


def standard_normal(layout: Layout, rng: np.random.Generator) -> Tensor:
    """A float64 vector over the shared trained weights; the gaps between tensors stay zero."""
    part = layout.shared_trained
    vector = np.zeros(part.stop - part.start)
    for entry in layout.entries:
        if part.start <= entry.offset < part.stop:
            start = entry.offset - part.start
            vector[start : start + entry.size] = rng.standard_normal(entry.size)
    return torch.from_numpy(vector)


def normal_at(layout: Layout, device: torch.device, seed: int, *place: int) -> Callable[[str, bool], Tensor]:
    """What draws such vectors at one place (round, or round and client), each purpose by a generator of its own.

    With ``system`` the generator starts from the operating system's random numbers instead of the run's seed.
    """

    def draw(purpose: str, system: bool) -> Tensor:
        rng = np.random.default_rng() if system else generator(seed, f"noise/{purpose}", *place)
        return standard_normal(layout, rng).to(device)

    return draw
