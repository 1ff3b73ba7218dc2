"""SCAFFOLD: control variates that cancel the drift of each client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from isofed.functional.vectors import add_difference_
from isofed.layout import Tensors
from isofed.methods.base import Method, Round, Run, Step, Visit
from isofed.methods.momentum import progress, refuse_persistent
from isofed.spec import described, number

if TYPE_CHECKING:
    from isofed.config import Settings


@dataclass(frozen=True)
class Scaffold(Method):
    """Control variates that cancel the drift of each client.

    Each gradient becomes g - c_k + c, with c_k the client's own mean gradient and c that of the federation.

    Option 2 (default) takes the new c_k from the distance travelled, c_k - c + (w_received - w) / (lr a), where a
    is the optimiser's answer to a unit gradient: the number of steps without momentum, and right with it. Option 1
    takes the full local gradient at the received weights, one more pass over the data. Control variates start at zero,
    cover trained weights only, and are averaged with the run's weighting, like the weights themselves (with
    ``weighting=uniform`` that is the paper's 1/K).

    ``divisor=steps`` divides by the steps alone, as public code does: with momentum 0.9 that makes c_k ten times too
    large.
    """

    option: Literal[1, 2] = number(2, "how c_k is renewed, 1 or 2")
    lr: float = number(1.0, "server learning rate", above=0)  # of the server
    divisor: Literal["response", "steps"] = described(
        "response", "of option 2: response, the optimiser's answer to a unit gradient, or steps, as in public code"
    )

    extras: ClassVar[tuple[str, ...]] = ("scaffold.dc",)
    paper: ClassVar[str] = "Karimireddy et al. 2020, SCAFFOLD: stochastic controlled averaging"

    def check(self, settings: Settings) -> None:
        refuse_persistent("scaffold", settings)

    def client_state(self, run: Run) -> Tensors:
        return {"scaffold.ck": run.zeros()}

    def server_state(self, run: Run) -> Tensors:
        return {"scaffold.c": run.zeros()}

    def send(self, server: Tensors) -> Tensors:
        return {"scaffold.c": server["scaffold.c"]}

    @property
    def full_gradient(self) -> bool:
        return self.option == 1

    def gradient(self, step: Step) -> None:
        add_difference_(step.shared(step.grad), step.sent["scaffold.c"], step.state["scaffold.ck"])

    def end(self, visit: Visit) -> None:
        old = visit.state["scaffold.ck"]
        if visit.full_gradient is not None and self.option == 1:
            new = visit.shared(visit.full_gradient)
        elif visit.steps:
            taken = progress(visit) if self.divisor == "response" else visit.steps
            new = old - visit.sent["scaffold.c"] - visit.moved / (visit.lr * taken)
        else:
            new = old.clone()
        visit.sum["scaffold.dc"] = visit.fraction * (new - old)
        old.copy_(new)

    def aggregate(self, round: Round) -> None:
        round.update = self.lr * round.update
        round.server["scaffold.c"].add_(round.sum["scaffold.dc"])
