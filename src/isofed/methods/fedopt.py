"""FedOpt: Adam, Yogi or Adagrad at the server, with the mean update in place of a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from isofed.layout import Tensors
from isofed.methods.base import Method, Round, Run
from isofed.spec import described, number


@dataclass(frozen=True)
class _FedOpt(Method):
    """m <- beta1 m + (1 - beta1) D; w <- w + lr m / (sqrt(v) + tau); the three differ in how v follows D^2.

    Reddi et al. start v at tau^2 (``v0=none``); public re-implementations start it at 0 (``v0=0``) or correct the
    bias of the first rounds as Adam does (``bias_correction=true``).
    """

    lr: float = number(0.1, "server learning rate; tune it first", above=0)
    beta1: float = number(0.9, "memory of m", at_least=0, below=1)
    beta2: float = number(0.99, "memory of v", at_least=0, below=1)
    tau: float = number(1e-3, "keeps the division tame; larger means less adaptive", above=0)
    v0: float | None = number(None, "where v starts; none means tau²", at_least=0)
    bias_correction: bool = described(False, "Adam's correction of the first rounds")

    owns: ClassVar[frozenset[str]] = frozenset({"server"})
    paper: ClassVar[str] = "Reddi et al. 2021, Adaptive federated optimization"

    def server_state(self, run: Run) -> Tensors:
        start = self.tau**2 if self.v0 is None else self.v0
        m = run.zeros(torch.float64)
        return {"fedopt.m": m, "fedopt.v": torch.full_like(m, start)}

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        raise TypeError("an optimiser must say how its second moment follows the squared update")

    def aggregate(self, round: Round) -> None:
        m = round.server["fedopt.m"].mul_(self.beta1).add_(round.update, alpha=1 - self.beta1)
        v = round.server["fedopt.v"] = self.second_moment(round.server["fedopt.v"], round.update**2)
        lr = self.lr
        if self.bias_correction:
            lr *= (1 - self.beta2**round.number) ** 0.5 / (1 - self.beta1**round.number)
        round.update = lr * m / (v.sqrt() + self.tau)


@dataclass(frozen=True)
class FedAdam(_FedOpt):
    """Adam at the server.

    With the mean update D in place of a gradient: m <- beta1 m + (1 - beta1) D, v <- beta2 v + (1 - beta2) D^2,
    w <- w + lr m / (sqrt(v) + tau).
    """

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(_FedOpt):
    """Yogi at the server.

    With the mean update D in place of a gradient: m <- beta1 m + (1 - beta1) D,
    v <- v - (1 - beta2) D^2 sign(v - D^2), which forgets large updates more slowly, w <- w + lr m / (sqrt(v) + tau).
    """

    beta2: float = number(0.99, "how fast v follows D²", at_least=0, below=1)

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)


@dataclass(frozen=True)
class FedAdagrad(_FedOpt):
    """Adagrad at the server.

    With the mean update D in place of a gradient: m <- beta1 m + (1 - beta1) D, v <- v + D^2,
    w <- w + lr m / (sqrt(v) + tau); beta1 is 0, so there is no momentum unless it is set.
    """

    beta1: float = number(0.0, "memory of m", at_least=0, below=1)
    beta2: float = number(0.99, "only used by bias_correction", at_least=0, below=1)

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square
