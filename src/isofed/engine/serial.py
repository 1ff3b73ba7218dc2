"""Clients one after another in this process: for small runs, for a GPU, and for debugging."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from isofed.engine.replica import Job, Outcome, Replica, Score, chunks
from isofed.engine.world import World
from isofed.errors import BadMethod, RunError
from isofed.layout import Tensors
from isofed.traces import place_of

if TYPE_CHECKING:
    from isofed.collect import Partial

__all__ = ["Executor", "Serial", "States", "chunks", "failure"]

States = Callable[[int], Tensors | None]  # what a client remembers; nothing before its first visit


class Executor(Protocol):
    """Something that can make visits. All executors give the same bits on the same machine."""

    @property
    def shown(self) -> str:
        """What it is, with how many clients train side by side, as in ``slots:8``."""
        ...

    def train(self, jobs: Sequence[Job], weights: Tensor, sent: Tensors, states: States) -> Iterator[Outcome | Partial]:
        """Make the visits, in any order."""
        ...

    def score(self, part: str, index: np.ndarray, weights: Tensor, state: Tensors | None = None) -> Score:
        """Judge weights (and, where tensors stay at home, one client's own) on samples of a part."""
        ...

    def answer(
        self, exchange: str, jobs: Sequence[Job], weights: Tensor, sent: Tensors, states: States
    ) -> Iterator[Tensors]:
        """Ask every client, and give the answers in the order of the jobs."""
        ...


class Serial:
    """One replica in this process."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.replica = Replica(world, device)

    @property
    def shown(self) -> str:
        return "serial"

    def train(self, jobs: Sequence[Job], weights: Tensor, sent: Tensors, states: States) -> Iterator[Outcome]:
        for job in jobs:
            try:
                outcome = self.replica.visit(job, weights, sent, states(job.client))
            except BadMethod:
                raise
            except Exception as error:
                outcome = Outcome(job.client, problem=failure(error), trace=traceback.format_exc())
            yield outcome

    def score(self, part: str, index: np.ndarray, weights: Tensor, state: Tensors | None = None) -> Score:
        self.replica.load(weights, state)
        return self.replica.score(part, index)

    def answer(
        self, exchange: str, jobs: Sequence[Job], weights: Tensor, sent: Tensors, states: States
    ) -> Iterator[Tensors]:
        for job in jobs:
            try:
                yield self.replica.answer(exchange, job, weights, sent, states(job.client))
            except BadMethod:
                raise
            except Exception as error:
                raise RunError(f"client {job.client} has no answer to '{exchange}': it {failure(error)}") from error


def failure(error: Exception) -> str:
    """Why a visit failed, in one line, and where in a user's own file."""
    said = str(error).splitlines()[0] if str(error) else "no message"
    return f"failed with {type(error).__name__}: {said.rstrip('.')}{place_of(error)}"
