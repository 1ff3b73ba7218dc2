"""The data of a cell: those of its data set, or, for a tiny run, a few pictures."""

from __future__ import annotations

from isofed.data import Dataset, Progress, load
from isofed.errors import UserError
from isofed.papers import tiny
from isofed.papers.plan import Job


class Data:
    """The last data set that was needed, so that it is read once for many cells."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._key: tuple[str, str | None, bool | None] | None = None
        self._dataset: Dataset | None = None

    def get(self, job: Job) -> Dataset:
        """The data set of a job; a UserError where its files are missing, unless hardly any are needed."""
        s = job.settings
        shared = s.partition.startswith("pathological") if job.length.label == tiny.TINY else None
        key = (s.data, s.root, shared)
        if self._dataset is None or self._key != key:
            self._dataset = self._read(s.data, s.root) if shared is None else self._few(s.data, s.root, shared)
            self._key = key
        return self._dataset

    def _read(self, data: str, root: str | None) -> Dataset:
        return load(data, root, self._progress)

    def _few(self, data: str, root: str | None, shared: bool) -> Dataset:
        """Of a data set, or made up where its files are missing."""
        try:
            whole = self._read(data, root)
        except UserError:
            return tiny.made_up(data, shared)
        return tiny.cut(whole, shared)
