"""The data of a cell: those of its data set, or, for a tiny run, a few pictures."""

from __future__ import annotations

from isofed.data import Dataset, Progress, load
from isofed.errors import UserError
from isofed.papers import tiny
from isofed.papers.plan import Job

MOST = 4 << 30  # bytes of pictures that are held; of more, only what is needed at the moment


class Data:
    """The data sets that were needed last, so that each is read once for many cells and tables."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self.made_up: set[str] = set()  # data sets whose files are missing, and which hardly matter
        self._held: dict[tuple[str, str | None, bool | None], Dataset] = {}

    def get(self, job: Job) -> Dataset:
        """The data set of a job; a UserError where its files are missing, unless hardly any are needed."""
        s = job.settings
        shared = s.partition.startswith("pathological") if job.length.label == tiny.TINY else None
        key = (s.data, s.root, shared)
        if key not in self._held:
            if sum(map(_bytes, self._held.values())) > MOST:
                self._held.clear()
            self._held[key] = self._read(s.data, s.root) if shared is None else self._few(s.data, s.root, shared)
        return self._held[key]

    def _read(self, data: str, root: str | None) -> Dataset:
        try:
            return load(data, root, self._progress)
        except UserError as error:
            raise UserError(str(error).replace("give root=", "give data_root=")) from error

    def _few(self, data: str, root: str | None, shared: bool) -> Dataset:
        """Of a data set, or made up where its files are missing."""
        try:
            whole = self._read(data, root)
        except UserError:
            self.made_up.add(data)
            return tiny.made_up(data, shared)
        return tiny.cut(whole, shared)


def _bytes(dataset: Dataset) -> int:
    return sum(part.images.nbytes for part in (dataset.train, dataset.test))
