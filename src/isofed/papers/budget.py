"""A time budget: when to stop, and how to stop so that nothing is lost."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isofed.federation import Federation
from isofed.papers.plan import Job
from isofed.progress import Watcher
from isofed.result import Result

RESERVE = 10.0  # seconds of a budget that are left for the last checkpoint


class BudgetOver(Exception):
    """The time is up; everything that was done is on disk."""


@dataclass(frozen=True)
class Budget:
    """Until when to work."""

    seconds: float | None
    began: float = field(default_factory=time.monotonic)

    @classmethod
    def of_command(cls, seconds: float | None) -> Budget:
        """One that counts from the start of this process: reading the libraries can take many seconds."""
        return cls(seconds, time.monotonic() - _running())

    @property
    def left(self) -> float:
        return float("inf") if self.seconds is None else self.seconds - (time.monotonic() - self.began)

    def check(self, needed: float = 0.0) -> None:
        """Stop here unless so many seconds are left, and some for what must be written."""
        if self.left < needed + RESERVE:
            raise BudgetOver


def _running() -> float:
    """Seconds since this process was started; 0 where the system does not tell."""
    try:
        # The words behind the name of the program, which is in brackets; the 20th of them is the start, in ticks.
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begun = int(words[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - begun)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


class Telling(Watcher):
    """What somebody who watches the cells hears; the base says nothing."""

    def cell(self, number: int, of: int, job: Job) -> None:
        """The next calls are about this job."""

    def diagnosing(self, section: str, done: int, of: int) -> None:
        """How far what is measured after the last round has come."""

    def finished(self, job: Job, measures: Mapping[str, float | None]) -> None:
        """A result is on disk."""

    def failed(self, job: Job, why: str) -> None:
        """A job could not be finished."""

    def left_out(self, data: str, count: int, why: str) -> None:
        """So many jobs wait for data that are not here."""

    def put_off(self, job: Job, needed: float, left: float) -> None:
        """A job is left for another time: it may need more seconds than are left."""


class Timed(Watcher):
    """Passes everything on, and stops a run between two rounds when the budget is nearly spent."""

    def __init__(self, other: Watcher, budget: Budget, whole: bool) -> None:
        self._other, self._budget, self._whole = other, budget, whole
        self._rounds, self._took, self._since = 0, 0.0, 0.0
        self._later: list[float] = []  # what every round took but the first, which sets things up

    def start(self, run: Federation) -> None:
        self._rounds, self._since = run.settings.rounds, time.monotonic()
        self._other.start(run)

    def round(self, line: dict[str, Any]) -> None:
        now = time.monotonic()
        self._took, self._since, before = now - self._since, now, self._took
        if before:
            self._later.append(self._took)
        self._other.round(line)
        left = self._rounds - int(line["round"])
        if not left:
            return
        if self._whole and self._later:
            # The median, because a round that is diagnosed or saved takes longer and is no measure of the others; and
            # while there is only one, it must say so clearly.
            needed = left * statistics.median(self._later)
            self._budget.check(needed if len(self._later) > 1 else needed / 2)
        else:  # the longest of the last two is what the next may take
            self._budget.check(max(self._took, before if before < 2 * self._took else 0.0))

    def client(self, done: int, of: int) -> None:
        self._other.client(done, of)
        if done < of and self._budget.left < RESERVE / 2:
            raise BudgetOver  # a round took longer than those before it: its work is lost, those before it are not

    def note(self, text: str) -> None:
        self._other.note(text)

    def end(self, result: Result) -> None:
        self._other.end(result)
