"""FedRS: restricted softmax for classes that a client does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from isofed.methods.base import Method, Step
from isofed.spec import number


@dataclass(frozen=True)
class FedRS(Method):
    """Classes that a client does not have are pushed less.

    In training, the logits of classes without a sample at the client are multiplied by alpha before the softmax, so
    that their classifier rows are pushed away less.
    """

    alpha: float = number(
        0.5,
        "factor on the logits of missing classes; 1 is FedAvg, 0 takes their rows out of training",
        at_least=0,
        at_most=1,
    )

    owns: ClassVar[frozenset[str]] = frozenset({"base"})
    paper: ClassVar[str] = "Li and Zhan 2021, FedRS: federated learning with restricted softmax"

    def base(self, step: Step) -> Tensor:
        factor = torch.where(step.label_counts > 0, 1.0, self.alpha)
        return cross_entropy(step.logits * factor, step.targets)
