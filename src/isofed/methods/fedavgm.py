"""FedAvgM: momentum at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from isofed.layout import Tensors
from isofed.methods.base import Method, Round, Run
from isofed.spec import described, number


@dataclass(frozen=True)
class FedAvgM(Method):
    """Momentum at the server.

    Heavy-ball on the mean update D: v <- momentum v + D, w <- w + lr v.
    ``damped=true`` is the form of MOON's and FedDecorr's code, v <- momentum v + (1 - momentum) D, whose steps are
    smaller by the factor 1 - momentum. Batch-norm statistics are averaged plainly and never enter v.
    """

    momentum: float = number(0.9, "share of v that stays from round to round", at_least=0, below=1)
    damped: bool = described(False, "weigh the new update by 1 − momentum")
    lr: float = number(1.0, "server learning rate", above=0)

    owns: ClassVar[frozenset[str]] = frozenset({"server"})
    paper: ClassVar[str] = "Hsu et al. 2019, Measuring the effects of non-identical data distribution"

    def server_state(self, run: Run) -> Tensors:
        return {"fedavgm.v": run.zeros(torch.float64)}

    def aggregate(self, round: Round) -> None:
        velocity = round.server["fedavgm.v"]
        velocity.mul_(self.momentum).add_(round.update, alpha=1 - self.momentum if self.damped else 1.0)
        round.update = self.lr * velocity
