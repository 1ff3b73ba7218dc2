"""FedDyn: a regulariser that follows the clients until local and global optima agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from isofed.layout import Tensors
from isofed.methods.base import Method, Round, Run, Step, Visit
from isofed.spec import described, number


@dataclass(frozen=True)
class FedDyn(Method):
    """A regulariser that moves until local and global optima agree.

    Client k minimises L_k(w) + alpha <w, h_k> + (alpha/2) ||w - w_received||^2 and remembers h_k += w_k - w_received.
    The server sends the mean of the clients' models plus h, the mean of h_k over all clients (the paper's -h/alpha).
    Means use the run's weighting. What is judged is the mean of the clients' models (``evaluate=mean``), as in the
    official code, or the weights that are sent (``evaluate=sent``). ``scale_alpha=true`` divides alpha by the
    client's size relative to the mean, as that code does.
    """

    alpha: float = number(0.01, "strength of the regulariser", at_least=0)
    evaluate: Literal["mean", "sent"] = described(
        "mean", "judge the mean of the clients' models (mean) or what is sent (sent)"
    )
    scale_alpha: bool = described(False, "divide alpha by the client's size relative to the mean size")

    owns: ClassVar[frozenset[str]] = frozenset({"server"})
    paper: ClassVar[str] = "Acar et al. 2021, Federated learning based on dynamic regularization"

    @property
    def pull(self) -> float:
        return self.alpha

    def client_state(self, run: Run) -> Tensors:
        return {"feddyn.hk": run.zeros(), "feddyn.alpha": torch.zeros(1, device=run.device)}

    def server_state(self, run: Run) -> Tensors:
        return {"feddyn.h": run.zeros(torch.float64), "feddyn.mean": run.zeros(torch.float64)}

    def begin(self, visit: Visit) -> None:
        relative = visit.samples * visit.run.clients / visit.run.samples if self.scale_alpha else 1.0
        own = self.alpha / relative
        visit.state["feddyn.alpha"].fill_(own)
        visit.pull += own - self.alpha  # for those who measure progress: the pull of this client

    def gradient(self, step: Step) -> None:
        away = step.shared(step.weights) - step.shared(step.start) + step.state["feddyn.hk"]
        step.shared(step.grad).addcmul_(away, step.state["feddyn.alpha"])

    def end(self, visit: Visit) -> None:
        visit.state["feddyn.hk"].add_(visit.moved)

    def aggregate(self, round: Round) -> None:
        round.server["feddyn.mean"] = round.weights + round.update
        # The sum of fraction_k (w_k - w_received) over the clients that answered, without sending it separately.
        round.server["feddyn.h"].add_(round.update, alpha=round.fraction)
        round.update = round.update + round.server["feddyn.h"]

    def evaluated(self, server: Tensors) -> Tensor | None:
        mean = server["feddyn.mean"]
        # All zeros: there is no mean yet, where so far every round had to be skipped.
        return mean if self.evaluate == "mean" and bool(mean.any()) else None
