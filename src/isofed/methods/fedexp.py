"""FedExP: a longer server step where the clients disagree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from isofed.methods.base import Method, Round, Visit
from isofed.spec import number


@dataclass(frozen=True)
class FedExP(Method):
    """A longer server step where clients disagree.

    The mean update D is multiplied by max(1, mean ||D_k||^2 / (2 (||D||^2 + eps))): the more the clients' updates
    cancel each other, the longer the step.
    """

    eps: float = number(0.001, "keeps the factor small when the mean update is very short", at_least=0)

    owns: ClassVar[frozenset[str]] = frozenset({"server"})
    extras: ClassVar[tuple[str, ...]] = ("fedexp.squared",)
    paper: ClassVar[str] = "Jhunjhunwala et al. 2023, FedExP: speeding up federated averaging via extrapolation"

    def end(self, visit: Visit) -> None:
        # How far training went, whatever else in a composition makes of the update: so their order does not matter.
        visit.mean["fedexp.squared"] = visit.moved.double().square().sum().view(1)

    def aggregate(self, round: Round) -> None:
        ratio = round.mean["fedexp.squared"] / (2 * (round.update.square().sum() + self.eps))
        round.update = round.update * ratio.nan_to_num(nan=1.0).clamp(min=1)
