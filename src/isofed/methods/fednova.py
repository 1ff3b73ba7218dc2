"""FedNova: clients that took more steps do not pull harder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from isofed.methods.base import Method, Round, Visit
from isofed.methods.momentum import progress, refuse_persistent
from isofed.spec import described

if TYPE_CHECKING:
    from isofed.config import Settings


@dataclass(frozen=True)
class FedNova(Method):
    """Updates normalised by local progress, so that more steps do not pull harder.

    Divides each update by the progress a that the client's optimiser made, and multiplies the mean by the mean of a.
    a is the optimiser's answer to a constant unit gradient, which covers momentum, Nesterov's form and a proximal
    pull (``fedprox+fednova``) at once. ``effective=steps`` multiplies by the mean number of steps instead, as the
    official code does with a proximal term. The official "global momentum" is ``fednova+fedavgm``.
    """

    effective: Literal["response", "steps"] = described(
        "response", "multiply back by the mean of a_k (response), or by the mean number of steps (steps)"
    )

    extras: ClassVar[tuple[str, ...]] = ("fednova.a",)
    paper: ClassVar[str] = "Wang et al. 2020, Tackling the objective inconsistency problem"

    def check(self, settings: Settings) -> None:
        refuse_persistent("fednova", settings)

    def end(self, visit: Visit) -> None:
        a = progress(visit)
        if visit.steps:
            visit.update.div_(a)
        back = a if self.effective == "response" else float(visit.steps)
        visit.mean["fednova.a"] = torch.tensor([back], dtype=torch.float64, device=visit.update.device)

    def aggregate(self, round: Round) -> None:
        round.update = round.update * round.mean["fednova.a"]
