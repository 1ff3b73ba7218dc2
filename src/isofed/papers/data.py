"""The data of a cell: those of its data set, or, for a tiny run, a few made-up pictures of the same shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from isofed.config import Settings
from isofed.data import Dataset, Progress, load
from isofed.data.base import Part
from isofed.data.sources import domainnet, office_caltech10, office_home, pacs
from isofed.data.sources.synthetic import Synthetic
from isofed.errors import UserError
from isofed.papers.plan import TINY, Job

TESTED = 24  # pictures of the test part of a tiny run
HAM = ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
# Classes, size and domains of the data sets of the papers.
SHAPES: dict[str, tuple[int, int, Sequence[str]]] = {
    "cifar10": (10, 32, ()),
    "cifar100": (100, 32, ()),
    "stl10": (10, 96, ()),
    "tiny-imagenet": (200, 64, ()),
    "imagenet-200": (200, 224, ()),
    "pacs": (7, 96, pacs.DOMAINS),
    "office-home": (65, 96, office_home.DOMAINS),
    "office-caltech10": (10, 256, office_caltech10.DOMAINS),
    "domainnet": (10, 256, domainnet.DOMAINS),
    "ham10000": (7, 96, HAM),
}


class Data:
    """The last data set that was needed, so that it is read once for many cells."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._key: tuple[str, str | None, str] | None = None
        self._dataset: Dataset | None = None

    def get(self, job: Job) -> Dataset:
        """The data set of a job; a UserError where its files are missing, unless hardly any are needed."""
        s = job.settings
        few = job.length.label == TINY
        key = (s.data, s.root, s.partition.partition(":")[0] if few else "")
        if self._dataset is None or self._key != key:
            self._dataset = self._tiny(s) if few else load(s.data, s.root, self._progress)
            self._key = key
        return self._dataset

    def _tiny(self, s: Settings) -> Dataset:
        each = 6 if s.partition.startswith("pathological") else 2  # that many clients may share a class there
        try:
            whole = load(s.data, s.root, self._progress)
        except UserError:
            return made_up(s.data, each)
        return dataclasses.replace(whole, train=_few(whole.train, each), test=_tested(whole.test))


def made_up(data: str, each: int = 2) -> Dataset:
    """Pictures with the classes, the size and the domains of a data set, and nothing else of it."""
    name = data.partition(":")[0]
    classes, size, domains = SHAPES[name]
    groups = classes * max(1, len(domains))
    made = Synthetic(max(64, each * groups), max(TESTED, groups), classes, size, 3, domains=len(domains)).load()
    return dataclasses.replace(made, name=f"{name}, made up", domains=tuple(domains), test=_tested(made.test))


def _tested(part: Part) -> Part:
    """A few pictures, evenly spread over the domains where there are some, otherwise over the classes."""
    order = np.argsort(part.labels.numpy() if part.domains is None else part.domains.numpy(), kind="stable")
    return part.subset(order[np.linspace(0, len(order) - 1, min(TESTED, len(order))).astype(np.int64)])


def _few(part: Part, each: int) -> Part:
    """The first ``each`` pictures of every class and domain."""
    labels = part.labels.numpy()
    groups = labels if part.domains is None else labels * (int(part.domains.max()) + 1) + part.domains.numpy()
    order = np.argsort(groups, kind="stable")
    first = np.r_[True, np.diff(groups[order]) != 0]
    rank = np.arange(len(order)) - np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
    return part.subset(np.sort(order[rank < each]))
