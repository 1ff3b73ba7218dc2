"""FedProx: a pull towards the received weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from isofed.functional.vectors import add_difference_
from isofed.methods.base import Method, Step
from isofed.spec import number


@dataclass(frozen=True)
class FedProx(Method):
    """A pull of local training towards the received weights.

    Adds (mu/2) ||w - w_received||^2 to the local loss, as its gradient mu (w - w_received), over all trained weights.
    """

    mu: float = number(0.01, "strength of the pull", at_least=0)

    paper: ClassVar[str] = "Li et al. 2020, Federated optimization in heterogeneous networks"

    @property
    def pull(self) -> float:
        return self.mu

    def gradient(self, step: Step) -> None:
        add_difference_(step.grad, step.weights, step.start, self.mu)
