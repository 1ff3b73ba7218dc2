"""Mixup: pictures and labels mixed in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch.nn.functional import one_hot

from isofed.methods.base import Draws, Method, Step, Visit
from isofed.spec import number


@dataclass(frozen=True)
class Mixup(Method):
    """Pictures and labels mixed in pairs.

    One share m from Beta(gamma, gamma) per batch; every sample is mixed with a random partner of the same batch,
    m x_i + (1 - m) x_j, and so are their labels. The labels become probabilities, which every base loss takes.
    """

    gamma: float = number(0.1, "the larger, the more even the shares; 0 is FedAvg", at_least=0)

    paper: ClassVar[str] = "Zhang et al. 2018, mixup: beyond empirical risk minimization"

    def plan(self, visit: Visit, rng: np.random.Generator) -> Draws:
        if not self.gamma:
            return {}
        return {
            "mixup.share": rng.beta(self.gamma, self.gamma, visit.steps).astype(np.float32),
            # The order of random keys is a permutation of whatever part of a batch there is.
            "mixup.keys": rng.random((visit.steps, visit.run.batch_size), dtype=np.float32),
        }

    def batch(self, step: Step) -> None:
        if not self.gamma:
            return
        share, partner = step.draw("mixup.share"), step.draw("mixup.keys")[: step.size].argsort(stable=True)
        labels = one_hot(step.labels, step.run.classes).float() if step.soft is None else step.soft
        step.inputs = step.inputs.lerp(step.inputs[partner], 1 - share)
        step.soft = labels.lerp(labels[partner], 1 - share)
