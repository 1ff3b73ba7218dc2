"""FedLC: logits calibrated by how many samples of a class a client has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from isofed.methods.base import Method, Step
from isofed.spec import number

EXCLUDED = -1e4  # exp of it is exactly zero; minus infinity times a soft label's zero would be NaN


@dataclass(frozen=True)
class FedLC(Method):
    """Logits calibrated by the client's label counts.

    In training, tau n_c^(-1/4) is subtracted from the logit of class c, of which the client has n_c samples, so that
    rare classes get a larger margin. Classes that the client does not have are left out of the softmax.
    """

    tau: float = number(0.1, "size of the margin; 0 still leaves missing classes out", at_least=0)

    owns: ClassVar[frozenset[str]] = frozenset({"base"})
    paper: ClassVar[str] = "Zhang et al. 2022, Federated learning with label distribution skew via logits calibration"

    def base(self, step: Step) -> Tensor:
        present = step.label_counts > 0
        margin = self.tau * step.label_counts.clamp(min=1).float() ** -0.25
        return cross_entropy(torch.where(present, step.logits - margin, EXCLUDED), step.targets)
