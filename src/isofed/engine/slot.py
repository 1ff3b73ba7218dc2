"""One of the replicas that train side by side: its lane, its graphs, and the visit that it is at."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from isofed.engine.graphs import Graphs
from isofed.engine.lane import Lane, Mark, hold
from isofed.engine.replica import Job, Outcome, Replica
from isofed.engine.step import Pictures, at_once
from isofed.engine.world import World
from isofed.layout import Tensors
from isofed.methods import Visit

STRIDE = 8  # steps that are queued on a stream before the next stream's turn
QUEUED = 4  # strides that may wait on a stream


class Slot:
    """A replica with its lane, and the visit that it is at."""

    def __init__(self, world: World, device: torch.device, pictures: dict[str, Pictures]) -> None:
        self.lane = Lane(device)
        self.lane.follow()
        with self.lane.use():
            self.replica = Replica(world, device, pictures)
        self.graphs: Graphs | None = None
        self._recurring: frozenset[int] = frozenset()
        self._draws = world.settings.method.acts_around_visits  # and only there: a captured step draws nothing
        self.judges_eagerly = False
        self.job: Job | None = None
        self._visit: Visit | None = None
        self._marks: deque[Mark] = deque()
        self._began = 0.0

    def capture(self, sizes: frozenset[int]) -> None:
        """From now on replay steps of these sizes."""
        self._recurring = sizes
        self.graphs = Graphs(self.replica.local, self.lane, self._recurs)
        self.replica.local.do, self.replica.local.arrived = self.graphs.do, self.graphs.arrived

    def warm(self) -> None:
        """From now on capture work when it first comes."""
        if self.graphs:
            self.graphs.cold = False

    def release(self) -> None:
        """From now on do every step."""
        self.graphs, self.replica.local.do, self.replica.local.arrived = None, at_once, lambda: None

    def _recurs(self, key: Hashable) -> bool:
        assert isinstance(key, tuple)
        if key[0] in ("arrive", "leave"):
            return True
        if key[0] == "score":
            return not self.judges_eagerly and bool(key[2] == self.replica.run.at_once)
        if key[0] == "prepare" and self.replica.local.ahead > 1:
            return True  # of full width, whatever comes
        return key[1] in self._recurring

    def knows(self, sizes: Iterable[int]) -> bool:
        """Whether a visit with batches of these sizes needs no new graph."""
        graphs = self.graphs
        return graphs is None or all(graphs.has(n) for n in sizes if n in self._recurring)

    def begin(self, job: Job, weights: Tensor, sent: Tensors, state: Tensors | None) -> Visit:
        """Queue the arrival of a client."""
        self.job, self._began = job, time.perf_counter()
        self.lane.follow(*(state or {}).values())  # which may have come from a disk just now
        with self.lane.use(), self._seeded(job, "visit"):
            self._visit = self.replica.start(job, weights, sent, state)
            if self.graphs:
                self.graphs.begun()
        return self._visit

    def advance(self) -> bool:
        """Queue a few more steps; whether these were the last."""
        assert self._visit is not None
        local, visit = self.replica.local, self._visit
        with self.lane.use():
            for size in visit.sizes[local.step.position : local.step.position + STRIDE]:
                local.take(size)
            self._marks.append(Mark(self.lane.device))
        return local.step.position == visit.steps

    def finish(self) -> Arriving:
        """Queue the end of the visit, and be free for the next client."""
        job, visit = self.job, self._visit
        assert job is not None and visit is not None
        with self.lane.use(), self._seeded(job, "end"):
            outcome = Arriving(self.replica.finish(job, visit), self._began, self.lane.device)
        self.leave()
        return outcome

    def eagerly(self, job: Job, weights: Tensor, sent: Tensors, state: Tensors | None) -> Outcome:
        """A whole visit, step by step."""
        self.lane.follow(*(state or {}).values())
        with self.lane.use():
            outcome = self.replica.visit(job, weights, sent, state)
        self.lane.lead()
        return outcome

    def leave(self) -> None:
        """Be free for another client."""
        self.job = self._visit = None

    def _seeded(self, job: Job, when: str) -> AbstractContextManager[None]:
        return self.replica.seeded(job, when) if self._draws else nullcontext()

    def has_room(self) -> bool:
        """Whether more steps may be queued."""
        while self._marks and self._marks[0].passed():
            self._marks.popleft()
        return len(self._marks) < QUEUED

    def again(self, size: int) -> None:
        """The first step once more, to see how long it takes."""
        local = self.replica.local
        with self.lane.use():
            local.step.position = 0
            local.step.counter.zero_()
            local.take(size)


class Arriving:
    """An outcome that the device is still working on."""

    def __init__(self, outcome: Outcome, began: float, device: torch.device) -> None:
        self.outcome, self._began = outcome, began
        outcome.found = outcome.found.to("cpu", non_blocking=True, copy=True)
        self._made = Mark(device)

    def here(self) -> bool:
        return self._made.passed()

    def take(self) -> Outcome:
        """The finished outcome, to be used outside of the slot's lane."""
        outcome = self.outcome
        outcome.settle()
        outcome.seconds = time.perf_counter() - self._began
        if outcome.update.is_cuda:
            tensors = [outcome.update, outcome.statistics, *([] if outcome.model is None else [outcome.model])]
            named = [*outcome.mean.values(), *outcome.sum.values(), *outcome.state.values()]
            hold(torch.cuda.current_stream(outcome.update.device), *tensors, *named)
        return outcome
