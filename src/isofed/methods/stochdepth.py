"""StochDepth: residual blocks that are sometimes not there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from isofed.methods.base import Draws, Method, Step, Visit
from isofed.models.base import Network
from isofed.models.residual import residual_blocks
from isofed.spec import described, number


@dataclass(frozen=True)
class StochDepth(Method):
    """Residual blocks that are sometimes not there.

    In training each residual branch is dropped for a whole batch with a probability that grows linearly with depth up
    to 1 - keep; in evaluation it is multiplied by the probability that it is there. A dropped branch leaves its batch
    norm's running statistics untouched. ``schedule=code`` (of FedAlign) starts at 1 with the first block,
    ``schedule=paper`` one step below. Dropped branches are computed nevertheless, so that a step has a fixed shape.
    """

    keep: float = number(0.9, "probability that the last block is there; 1 is FedAvg", above=0, at_most=1)
    schedule: Literal["code", "paper"] = described("code", "of FedAlign, or paper; see above")

    needs: ClassVar[tuple[str, ...]] = ("residual blocks",)
    paper: ClassVar[str] = "Huang et al. 2016, Deep networks with stochastic depth"

    def chances(self, blocks: int) -> list[float]:
        """How likely each block is to be there."""
        if self.schedule == "paper":
            return [1 - (b / blocks) * (1 - self.keep) for b in range(1, blocks + 1)]
        return [1 - b / max(blocks - 1, 1) * (1 - self.keep) for b in range(blocks)]

    def build(self, network: Network, classes: int, rng: np.random.Generator) -> None:
        blocks = residual_blocks(network)
        for block, keep in zip(blocks, self.chances(len(blocks)), strict=True):
            block.keep = keep

    def plan(self, visit: Visit, rng: np.random.Generator) -> Draws:
        blocks = residual_blocks(visit.network)
        for block in blocks:
            block.gate = None  # that of the last client's last batch
        there = rng.random((visit.steps, len(blocks))) < self.chances(len(blocks))
        return {"stochdepth.gates": there.astype(np.float32)}

    def batch(self, step: Step) -> None:
        gates = step.draw("stochdepth.gates").unbind()
        for block, gate in zip(residual_blocks(step.network), gates, strict=True):
            block.gate = gate
