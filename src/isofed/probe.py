"""Looking at weights through a fixed sample of the data: what diagnostics during and after a run are made of."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from isofed.engine.replica import one_thread
from isofed.engine.step import Pictures
from isofed.engine.world import World
from isofed.layout import Layout
from isofed.methods.needs import check_need

AT_ONCE = 256  # samples in a pass


class Probe:
    """A network in eval mode that can take any weights, and the same samples of a part each time.

    Args:
        layout: of the weights.
        part: ``"train"``, ``"test"`` or ``"validation"``.
        samples: at most so many, evenly spread over the part, so that they are the same in every run.
    """

    def __init__(self, world: World, layout: Layout, device: torch.device, part: str, samples: int) -> None:
        self.layout, self.device, self.part = layout, device, part
        self.network = world.network().to(device).eval()
        check_need("diagnose", "features", self.network)
        whole = world.parts[part]
        self.index = np.linspace(0, len(whole) - 1, min(samples, len(whole))).astype(np.int64)
        pictures = Pictures(whole.subset(self.index), world.dataset, device)
        self.inputs, self.labels = pictures.normalised(pictures.images), pictures.labels

    @torch.no_grad()
    def look(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Features and logits of the samples under these weights (whole layout)."""
        self.bind(weights)
        with one_thread(self.device):
            seen = [self.network(inputs) for inputs in self.inputs.split(AT_ONCE)]
        return torch.cat([s.features for s in seen]).float(), torch.cat([s.logits for s in seen]).float()

    def bind(self, weights: Tensor) -> None:
        """Give the network these weights, which it does not copy."""
        self.layout.bind(self.network, weights)
        self.network.eval()

    def head(self, weights: Tensor) -> Tensor | None:
        """The classifier's matrix [classes, width] among these weights, if the head is one linear layer."""
        if not isinstance(self.network.head, nn.Linear):
            return None
        return self.layout.views(weights)["head.weight"]
