"""What a run gives: plain numbers, the history behind them, and the model."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isofed.config import Settings
from isofed.errors import RunError
from isofed.layout import Tensors

IF_DIVERGES = "try a smaller lr, or clip=10"


def advised(event: str) -> str:
    """What happened to a client, with what to try where it diverged."""
    return f"{event}: {IF_DIVERGES}" if "NaN" in event else event


def rounds_to(history: list[dict[str, Any]], target: float | None) -> int | None:
    """The first judged round of a history that reached an accuracy."""
    reached = (line["round"] for line in history if (line.get("accuracy") or 0.0) >= (target or math.inf))
    return next(reached, None)


@dataclass
class Result:
    """The outcome of a run.

    Attributes:
        method: as text.
        seed: of the run.
        accuracy: of the final model, on the test part (after any exchange).
        loss: of the final model, likewise.
        best_accuracy: over all evaluated rounds and exchanges.
        rounds: that were run.
        rounds_to_target: first evaluated round that reached ``target``; none if it was not reached or not asked for.
        seconds: spent in rounds, evaluation not counted.
        bytes_up, bytes_down: sent by and to all clients in all rounds and exchanges.
        peak_memory: bytes held at most, of the GPU, or of the main memory by this process and its workers together;
            none where that is not known. Of a resumed run, since it was taken up last.
        validation_accuracy: of the last round, where a validation part was held out.
        class_accuracy: of the final model, class by class; none for a class without a sample to judge by.
        exchanges: records of questions asked after the last round.
        events: how often something went wrong at single clients; the history has each of them.
        privacy: where a method adds noise to updates, the epsilon and delta that it amounts to, and what they rest on.
        executor: that was used in the end, and how many clients trained side by side, as in ``slots:8``.
        notes: what a person should know about the run.
        history: one record per round.
        folder: where it is recorded.
        weights: the final model's tensors by name, also those that nobody trains, such as indices; those that stay at
            home with the clients are as they were at the start here, and each client's own are in
            ``model.safetensors``.
    """

    method: str
    seed: int
    accuracy: float
    loss: float | None
    best_accuracy: float
    rounds: int
    rounds_to_target: int | None
    seconds: float
    bytes_up: int
    bytes_down: int
    peak_memory: int | None = None
    validation_accuracy: float | None = None
    class_accuracy: list[float | None] = field(default_factory=list)
    exchanges: list[dict[str, Any]] = field(default_factory=list)
    events: int = 0
    privacy: dict[str, Any] | None = None
    executor: str = ""
    notes: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)
    folder: Path | None = None
    weights: Tensors = field(default_factory=dict, repr=False)

    @property
    def diverged(self) -> bool:
        """Whether clients had to be left out because their numbers were none, or the model's loss is none."""
        lost = (event for line in self.history for event in line.get("events", []) if "NaN" in event["event"])
        return any(lost) or self.loss is None or not math.isfinite(self.loss)

    @classmethod
    def of(
        cls,
        s: Settings,
        history: list[dict[str, Any]],
        exchanges: list[dict[str, Any]],
        tested: dict[str, Any],
        notes: list[str],
    ) -> Result:
        """Sum up a finished run. ``tested`` is the one look at the test part, where rounds were judged on another."""
        judged = [line for line in history if line.get("accuracy") is not None]
        last = (exchanges or judged)[-1]
        final = tested or last
        return cls(
            method=str(s.method),
            seed=s.seed,
            accuracy=final["accuracy"],
            loss=final["loss"],
            best_accuracy=max(line["accuracy"] for line in [*judged, *exchanges]),
            rounds=history[-1]["round"],
            rounds_to_target=rounds_to(history, s.target),
            seconds=sum(line["seconds"] for line in history),
            bytes_up=sum(line["bytes_up"] for line in history) + sum(e["bytes_up"] for e in exchanges),
            bytes_down=sum(line["bytes_down"] for line in history) + sum(e["bytes_down"] for e in exchanges),
            validation_accuracy=last["accuracy"] if s.validation else None,
            class_accuracy=final["class_accuracy"],
            exchanges=exchanges,
            events=sum(len(line["events"]) for line in history),
            notes=notes,
            history=history,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the history and the weights have files of their own."""
        skipped = {"history", "folder", "weights"}
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in skipped}

    @classmethod
    def from_dict(
        cls, values: dict[str, Any], history: list[dict[str, Any]], folder: Path, weights: Tensors | None = None
    ) -> Result:
        """A result read back from its folder."""
        try:
            return cls(**values, history=history, folder=folder, weights=weights or {})
        except TypeError as error:  # a field too many, or one that is missing
            raise RunError(f"the result in {folder} is damaged, or of another version of isofed") from error
