"""Logging to another tool (``track=tensorboard``), beside the record in the run folder."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from isofed import extras
from isofed.errors import UserError
from isofed.progress import Watcher

if TYPE_CHECKING:
    from isofed.federation import Federation
    from isofed.result import Result

FOLDER = "tensorboard"  # in the run folder
_SKIPPED = ("round", "client_accuracy")


def check(track: str, recorded: bool) -> None:
    """Refuse what could not be logged, before any work."""
    if track == "none":
        return
    extras.check("track=tensorboard", "TensorBoard", "tensorboard", "track")
    if not recorded:
        raise UserError("track=tensorboard logs into the run folder; say where that is with out=")


@contextmanager
def tracked(run: Federation, watcher: Watcher) -> Iterator[Watcher]:
    """The watcher, and beside it what the settings of a run ask to log to."""
    if run.folder is None or run.settings.track == "none":
        yield watcher
        return
    # Events of rounds that are made again after an interruption count no more.
    make = importlib.import_module("torch.utils.tensorboard").SummaryWriter
    writer = make(str(run.folder.path / FOLDER), purge_step=run.round + 1)
    try:
        yield TensorBoard(watcher, writer)
    finally:
        writer.close()


class TensorBoard(Watcher):
    """Logs rounds and diagnostics, and hands everything on to another watcher."""

    def __init__(self, watcher: Watcher, writer: Any) -> None:
        self._watcher, self._writer = watcher, writer

    def reading(self, done: int, of: int) -> None:
        self._watcher.reading(done, of)

    def start(self, run: Federation) -> None:
        self._watcher.start(run)

    def client(self, done: int, of: int) -> None:
        self._watcher.client(done, of)

    def round(self, line: dict[str, Any]) -> None:
        self._log("round", line)
        self._watcher.round(line)

    def diagnosis(self, line: dict[str, Any]) -> None:
        self._log("diagnostics", line)
        self._watcher.diagnosis(line)

    def note(self, text: str) -> None:
        self._watcher.note(text)

    def end(self, result: Result) -> None:
        self._watcher.end(result)

    def _log(self, group: str, line: dict[str, Any]) -> None:
        for name, value in scalars(line).items():
            self._writer.add_scalar(f"{group}/{name}", value, line["round"])
        self._writer.flush()  # for those who look while the run goes on


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The single numbers of a record by name, ``alignment/cosine``; of a list of numbers, its mean."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if name in _SKIPPED or isinstance(value, bool):
            continue
        if isinstance(value, (int, float)):
            found[name] = float(value)
        elif isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in scalars(value).items()}
        elif isinstance(value, list) and name in ("distance", "angle"):
            found[name] = sum(value) / len(value)
    return found
