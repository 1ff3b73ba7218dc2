"""What a run tells whoever watches it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isofed.federation import Federation
    from isofed.result import Result


class Watcher:
    """Base of all displays: hears everything and shows nothing."""

    def reading(self, done: int, of: int) -> None:
        """Files of a data set have been read, before anything else."""

    def start(self, run: Federation) -> None:
        """A run begins, or goes on after ``run.round`` rounds."""

    def client(self, done: int, of: int) -> None:
        """A client of the present round has answered."""

    def round(self, line: dict[str, Any]) -> None:
        """A round is over; ``line`` is its record."""

    def diagnosis(self, line: dict[str, Any]) -> None:
        """The round was diagnosed (``diagnose=every:N``); ``line`` is what was found."""

    def note(self, text: str) -> None:
        """Something a person should know."""

    def end(self, result: Result) -> None:
        """The run is over."""
