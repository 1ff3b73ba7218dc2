"""What a run's traffic, time and computation bought: accuracy against each of them, from its record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Price(NamedTuple):
    """Paid until some round."""

    round: int
    megabytes: float  # sent and received by all clients
    seconds: float  # of training
    gflop: float | None  # of training, where the cost of a sample is known


@dataclass(frozen=True)
class Bought:
    """Accuracy against what was paid for it, at each round that was judged."""

    rounds: list[int]
    accuracy: list[float]
    loss: list[float | None]
    megabytes: list[float]
    seconds: list[float]
    gflop: list[float] | None
    chance: float  # accuracy that costs nothing

    def until(self, accuracy: float) -> Price | None:
        """What it took to reach an accuracy for the first time; none if it was not reached."""
        where = next((i for i, found in enumerate(self.accuracy) if found >= accuracy), None)
        return None if where is None else self._price(where)

    @property
    def total(self) -> Price:
        """What all rounds took, up to the last that was judged."""
        return self._price(len(self.rounds) - 1)

    def points_per(self) -> dict[str, float | None]:
        """Points of accuracy above chance that one megabyte, second or GFLOP bought, over the whole run."""
        points = 100 * (self.accuracy[-1] - self.chance)
        paid = self.total
        return {
            name: points / amount if amount else None
            for name, amount in (("megabyte", paid.megabytes), ("second", paid.seconds), ("gflop", paid.gflop))
        }

    def _price(self, where: int) -> Price:
        gflop = None if self.gflop is None else self.gflop[where]
        return Price(self.rounds[where], self.megabytes[where], self.seconds[where], gflop)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dict(vars(self)) | {"points_per": self.points_per()}


def bought(history: Sequence[Mapping[str, Any]], flops: float | None = None, classes: int | None = None) -> Bought:
    """Accuracy against cumulative megabytes, seconds and GFLOP.

    Args:
        history: the lines of ``metrics.jsonl``.
        flops: floating-point operations of a training sample, forward and backward, such as ``flops`` of
            :func:`isofed.diagnostics.cost.cost`; without it there are no GFLOP.
        classes: of the data; accuracy counts from 1 / classes on, or from 0 if not given.

    >>> line = {"round": 1, "accuracy": 0.6, "bytes_up": 1_000_000, "bytes_down": 1_000_000, "seconds": 4.0}
    >>> bought([line], classes=5).points_per()["megabyte"]
    20.0
    """
    megabytes, seconds, gflop = 0.0, 0.0, 0.0
    made = Bought([], [], [], [], [], None if flops is None else [], 1 / classes if classes else 0.0)
    for line in history:
        megabytes += (line["bytes_up"] + line["bytes_down"]) / 1e6
        seconds += line["seconds"]
        gflop += (flops or 0.0) * line.get("samples", 0) / 1e9
        accuracy = line.get("accuracy")
        if accuracy is None or not math.isfinite(accuracy):
            continue
        made.rounds.append(line["round"])
        made.accuracy.append(accuracy)
        made.loss.append(line.get("loss"))
        made.megabytes.append(megabytes)
        made.seconds.append(seconds)
        if made.gflop is not None:
            made.gflop.append(gflop)
    if not made.rounds:
        raise ValueError("no round of this run has been judged")
    return made
