"""What comes back in a round, summed so that the order of the clients does not matter."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isofed.engine.exact import ExactSum, Uneven
from isofed.engine.replica import Job, Outcome, one_thread
from isofed.engine.world import World
from isofed.errors import BadMethod
from isofed.gathered import Gathered
from isofed.layout import Layout, Policy, Tensors

_PLACES = ("", "mean", "sum")  # of a visit, for each of the groups of sums
_COUNTS = ("clients", "_steps", "_samples", "_skipped", "_up")


@dataclass(frozen=True)
class Partial:
    """News of several clients at once, from where they are trained."""

    answered: int  # clients that have come back; fewer than none where their results were lost and they train again
    content: dict[str, Any] | None = None  # of a :class:`Collected` over there


@contextmanager
def _even(place: str, key: str) -> Iterator[None]:
    """What clients send is added up, so it must have one shape."""
    try:
        yield
    except Uneven as shapes:
        raise BadMethod(f"visit.{place}['{key}'] must have the same shape at every client, not {shapes}") from None


class Collected:
    """The answers of a round's clients."""

    def __init__(self, world: World, layout: Layout, jobs: Sequence[Job]) -> None:
        self._world, self._layout, self._asked = world, layout, jobs
        self._method = world.settings.method
        self._expected = sum(self._world.weight(j.client) for j in jobs) or 1.0
        self._mean = ExactSum(self._expected)
        self._statistics = ExactSum(self._expected)
        self.means: dict[str, ExactSum] = {}
        self.sums: dict[str, ExactSum] = {}
        self.states: dict[int, Tensors] = {}
        self.models: dict[int, Tensor] = {}
        self._updates = Gathered([job.client for job in jobs])  # where a method wants to see each of them
        self._losses: dict[int, tuple[float, float]] = {}  # of each client that took a step: weighted, and the weight
        self.events: list[dict[str, Any]] = []  # what went wrong at single clients
        self.trace = ""  # of the first error among them
        self.answered = 0
        self.clients = self._steps = self._samples = self._skipped = 0
        self._up = 0

    def add(self, news: Outcome | Partial) -> None:
        """Take what comes back from a client, or from several that were collected elsewhere."""
        if isinstance(news, Outcome):
            self.answered += 1
            if news.problem:
                self._event(news.client, news.problem)
                self.trace = self.trace or news.trace
            else:
                self._count(news)
        else:
            self.answered += news.answered
            if news.content is not None:
                self.merge(news.content)

    def _event(self, client: int, event: str) -> None:
        self.events.append({"client": client, "event": event})

    def _count(self, outcome: Outcome) -> None:
        weight = self._world.weight(outcome.client)
        update, largest = outcome.update, outcome.largest
        if self._method.receives:
            with one_thread(update.device):
                update, largest = self._method.receive(update), math.inf
        if self._method.gathers:
            self._updates[outcome.client] = torch.cat([update, outcome.statistics])
        else:
            self._mean.add(update, weight, largest)
            if outcome.statistics.numel():
                self._statistics.add(outcome.statistics, weight)
        for key, value in outcome.mean.items():
            with _even("mean", key):
                self.means.setdefault(key, ExactSum(self._expected)).add(value, weight)
        for key, value in outcome.sum.items():
            with _even("sum", key):
                self.sums.setdefault(key, ExactSum(len(self._asked))).add(value)
        if outcome.model is not None:
            self.models[outcome.client] = outcome.model
        self.states[outcome.client] = outcome.state
        if outcome.steps:
            self._losses[outcome.client] = (weight * outcome.loss, weight)
        else:
            why = "less than one batch" if self._world.settings.last_batch == "drop" else "a single sample"
            self._event(outcome.client, f"took no step: it has {why}")
        self.clients += 1
        self._steps += outcome.steps
        self._samples += outcome.samples
        self._skipped += outcome.skipped
        self._up += 4 * self._layout.count(Policy.SHARED) + self._size(outcome.mean) + self._size(outcome.sum)

    def content(self) -> dict[str, Any]:
        """Everything collected so far, as plain values and tensors that can travel."""
        return {
            "sums": [{k: made.parts() for k, made in group.items() if made.weight} for group, _ in self._groups()],
            "counts": [getattr(self, name) for name in _COUNTS],
            "by client": [dict(known) for known in self._by_client()],
            "events": self.events,
            "trace": self.trace,
        }

    def merge(self, content: dict[str, Any]) -> None:
        """Take over what was collected from other clients of the same round."""
        for place, (mine, expected), theirs in zip(_PLACES, self._groups(), content["sums"], strict=True):
            for key, parts in theirs.items():
                with _even(place, key):
                    mine.setdefault(key, ExactSum(expected)).merge(parts)
        for name, count in zip(_COUNTS, content["counts"], strict=True):
            setattr(self, name, getattr(self, name) + count)
        for known, new in zip(self._by_client(), content["by client"], strict=True):
            known.update(new)
        self.events += content["events"]
        self.trace = self.trace or content["trace"]

    def _groups(self) -> list[tuple[dict[str, ExactSum], float]]:
        """All sums, with the weights that each expects."""
        own = {"update": self._mean, "statistics": self._statistics}
        return [(own, self._expected), (self.means, self._expected), (self.sums, len(self._asked))]

    def _by_client(self) -> list[MutableMapping[int, Any]]:
        return [self.states, self.models, self._updates, self._losses]

    def combined(self, received: Tensor) -> tuple[Tensor, Tensor]:
        """The update of the trained weights and the new running statistics, from ``received``, all that was sent.

        By the weighted mean, or by the method that owns the combination. Only once: it works in place.
        """
        part = self._layout.shared_trained
        trained = part.stop - part.start
        if not self._method.gathers:
            return self._mean.mean(), self._statistics.mean() if self._statistics.weight else received[trained:]
        updates = self._updates.rows()
        updates[:, trained:] -= received[trained:].to(updates.device)
        weights = torch.tensor([self._world.weight(c) for c in sorted(self._updates)], dtype=torch.float64)
        with one_thread(updates.device):
            made = self._method.combine(updates, weights.to(updates.device)).double().to(received.device)
        return made[:trained], received[trained:] + made[trained:]

    def _size(self, tensors: Tensors) -> int:
        """Bytes on the wire; a vector over the shared weights travels without the gaps of the layout."""
        return sum(self._layout.numbers(t) * t.element_size() for t in tensors.values())

    def line(self, sent: Tensors, known: Container[int]) -> dict[str, Any]:
        """The part of a round's record that is about training; ``known`` are the clients visited before."""
        pooled = self._method.pooled
        shared = self._layout.count(Policy.SHARED)
        once = self._layout.count(Policy.FIXED) + self._layout.count(Policy.RESET)
        new = sum(1 for job in self._asked if job.client not in known)
        down = 4 * (shared * len(self._asked) + once * new) + self._size(sent) * len(self._asked)
        return {
            "clients": self.clients,
            "local_loss": None if "losses" in self._method.guards else self._mean_loss(),
            "steps": self._steps,
            "samples": self._samples,
            "skipped_batches": self._skipped,
            "bytes_up": 0 if pooled else self._up,
            "bytes_down": 0 if pooled else down,
        }

    def _mean_loss(self) -> float | None:
        if not self._losses:
            return None
        weighted, weights = zip(*self._losses.values(), strict=True)
        return math.fsum(weighted) / math.fsum(weights)  # exact sums, whatever the order
