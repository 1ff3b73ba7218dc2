"""The tables that a comparison and a tuning end with, as plain rows, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

from isofed.experiments import Batch
from isofed.files import write_atomic
from isofed.result import Result, rounds_to
from isofed.stats import mean_std, paired_difference


@dataclass(frozen=True)
class Row:
    """One method of a comparison. Differences are to the first method, over the seeds that both have."""

    method: str
    seeds: int = 0
    accuracy: float | None = None
    std: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    rounds_to_target: float | None = None
    reached: int = 0
    seconds_per_round: float | None = None
    relative_seconds: float | None = None
    megabytes_per_round: float | None = None
    failed: int = 0
    events: int = 0
    peak_memory_megabytes: float | None = None  # the largest of all seeds
    points_per_megabyte: float | None = None  # of accuracy above chance, in percent, for each MB that was sent
    points_per_second: float | None = None  # likewise, for each second of training
    rounds: int | None = None  # the most of all seeds
    epsilon: float | None = None  # where the method adds noise to updates: the largest of all seeds, at this delta
    delta: float | None = None

    @property
    def partly(self) -> bool:
        """Whether the target was reached with some seeds, and with others not."""
        return self.rounds_to_target is not None and self.reached < self.seeds

    @property
    def to_target(self) -> str:
        """Rounds to the target as a text: a mean where all seeds reached it.

        A mean over those alone that reached it would flatter a method that seldom does, so where some did not, the
        text says that the rounds were not enough, and in how many seeds they were.
        """
        if not self.seeds:
            return "-"
        if self.rounds_to_target is None:
            return "never"
        if self.partly:
            return f"> {self.rounds} ({self.reached}/{self.seeds})"
        return f"{self.rounds_to_target:.1f}"

    @property
    def clear(self) -> bool:
        """Whether the confidence interval of the difference excludes zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    @property
    def no_spread(self) -> bool:
        """Whether there are several seeds, and yet no interval."""
        return self.seeds > 1 and self.difference is not None and self.low is None


def comparison(batch: Batch, methods: Sequence[str], target: float | None = None, level: float = 0.95) -> list[Row]:
    """One row per method, in the given order; ``target`` is the accuracy to count rounds to."""
    first = batch.results.get(methods[0], {})
    rows = []
    for method in methods:
        results = batch.results.get(method, {})
        failed = len(batch.failures.get(method, {}))
        if not results:
            rows.append(Row(method, failed=failed))
            continue
        mean, std = mean_std([r.accuracy for r in results.values()])
        common = sorted(set(results) & set(first))
        paired = None
        if method != methods[0] and common:
            pairs = [results[s].accuracy for s in common], [first[s].accuracy for s in common]
            paired = paired_difference(*pairs, level=level)
        counts = [rounds_to(r.history, target) for r in results.values()]
        reached = [n for n in counts if n is not None]
        rows.append(
            Row(
                method,
                seeds=len(results),
                accuracy=mean,
                std=std,
                difference=paired.mean if paired else None,
                low=paired.low if paired else None,
                high=paired.high if paired else None,
                rounds_to_target=sum(reached) / len(reached) if reached else None,
                reached=len(reached),
                seconds_per_round=_seconds(list(results.values())),
                relative_seconds=_relative(list(results.values()), list(first.values())),
                megabytes_per_round=sum((r.bytes_up + r.bytes_down) / r.rounds for r in results.values())
                / len(results)
                / 1e6,
                failed=failed,
                events=sum(r.events for r in results.values()),
                peak_memory_megabytes=max(
                    (r.peak_memory / 1e6 for r in results.values() if r.peak_memory), default=None
                ),
                points_per_megabyte=_bought(results, [(r.bytes_up + r.bytes_down) / 1e6 for r in results.values()]),
                points_per_second=_bought(results, [r.seconds for r in results.values()]),
                rounds=max(r.rounds for r in results.values()),
                epsilon=_private(results, "epsilon"),
                delta=_private(results, "delta"),
            )
        )
    return rows


def _bought(results: Mapping[int, Result], paid: Sequence[float]) -> float | None:
    """Points of accuracy above chance for what was paid, mean over seeds; none where nothing was."""
    chances = [1 / len(r.class_accuracy) if r.class_accuracy else 0.0 for r in results.values()]
    points = [100 * (r.accuracy - chance) for r, chance in zip(results.values(), chances, strict=True)]
    return sum(p / much for p, much in zip(points, paid, strict=True)) / len(paid) if all(paid) else None


def _private(results: Mapping[int, Result], name: str) -> float | None:
    """The worst number of all seeds that a method's noise amounts to; none where a run has no noise."""
    found = [(r.privacy or {}).get(name) for r in results.values()]
    numbers = [float(value) for value in found if value is not None]
    return max(numbers) if len(numbers) == len(found) else None


def _seconds(results: list[Result]) -> float | None:
    """The median round: a pause of the machine, or the first round's warming up, should not decide a comparison.

    Of two in the middle it is the shorter one: with two rounds in all, the other is the one that warmed up.
    """
    rounds = [line["seconds"] for r in results for line in r.history]
    return median_low(rounds) if rounds else None


def _relative(results: list[Result], first: list[Result]) -> float | None:
    """The time of a round relative to the first method's; none where a single round may be nothing but warming up."""
    if any(sum(len(r.history) for r in those) < 2 for those in (results, first)):
        return None
    seconds, base = _seconds(results), _seconds(first)
    return seconds / base if seconds and base else None


def write(rows: Sequence[Any], folder: Path, name: str, more: dict[str, Any]) -> tuple[Path, Path]:
    """The rows as ``name.json`` and ``name.csv`` in a folder."""
    plain = [asdict(r) for r in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(plain[0]))
    writer.writeheader()
    writer.writerows(plain)
    write_atomic(folder / f"{name}.json", (json.dumps({**more, "rows": plain}, indent=2) + "\n").encode())
    write_atomic(folder / f"{name}.csv", text.getvalue().encode())
    return folder / f"{name}.json", folder / f"{name}.csv"


@dataclass(frozen=True)
class Trial:
    """One point of a grid, judged on the validation part."""

    setting: str
    seeds: int
    validation_accuracy: float | None
    std: float | None
    failed: int
    chosen: bool = False


def tuning(batch: Batch, settings: Sequence[str]) -> list[Trial]:
    """One row per grid point; the best mean is chosen, the earlier one where two are equal.

    A point that failed on any seed is not chosen: its mean would be over other seeds than those of its rivals.
    """
    trials = []
    for setting in settings:
        results = batch.results.get(setting, {})
        failed = len(batch.failures.get(setting, {}))
        mean, std = mean_std([r.accuracy for r in results.values()]) if results else (None, None)
        trials.append(Trial(setting, len(results), mean, std, failed))
    able = [t for t in trials if t.validation_accuracy is not None and not t.failed]
    able = able or [t for t in trials if t.validation_accuracy is not None]
    best = max(able, key=lambda t: t.validation_accuracy or 0.0)
    return [Trial(**{**asdict(t), "chosen": t is best}) for t in trials]
