"""FedSAM: sharpness-aware local steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from isofed.methods.base import Method, Step
from isofed.models.base import statistics_kept
from isofed.spec import number


@dataclass(frozen=True)
class FedSAM(Method):
    """Steps that look for flat minima.

    Each step takes its gradient not at the weights w but at w + rho g / ||g||, with g the gradient at w: two passes.
    The second leaves batch norm's running statistics alone.
    """

    rho: float = number(0.05, "how far uphill; 0 is FedAvg", at_least=0)

    paper: ClassVar[str] = "Qu et al. 2022, Generalized federated learning via sharpness aware minimization"

    def around(self, step: Step, inner: Callable[[], None]) -> None:
        if not self.rho:
            inner()
            return
        before, others = step.weights.clone(), step.grad.clone()  # who is around this may have put a gradient there
        step.grad.zero_()
        inner()
        length = torch.linalg.vector_norm(step.grad)
        step.weights.addcmul_(step.grad, self.rho / (length + 1e-12))
        step.grad.zero_()
        with statistics_kept(step.network):
            inner()
        step.weights.copy_(before)
        step.grad.add_(others)
