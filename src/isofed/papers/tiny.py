"""What a tiny run is, all in one place: everything of a cell happens, with hardly any data and a thin network.

It shows that a preset runs from end to end, in seconds on one core. Its numbers mean nothing, so it is labelled
wherever it is shown, and kept apart from the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from isofed.data import Dataset
from isofed.data.base import Part
from isofed.data.sources import domainnet, office_caltech10, office_home, pacs
from isofed.data.sources.synthetic import Synthetic
from isofed.papers import thin

TINY = "tiny"
CLASSES = 5  # at most: the first ones of a data set
CLIENTS = 4  # at most, but for partitions that give each of them a part of the classes
EACH = 2  # pictures of a class, and of a domain where there are some
SHARED = 6  # the same where several clients share a class
TESTED = 24  # pictures of the test part
SIZE, LARGE = 32, 64  # pixels of pictures, and of those that were so large that their network needs more
DIAGNOSE = {"samples": 4, "probes": 8, "points": 3, "clients": 2}  # at most; fewer probes are not made

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


def settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a cell, cut down."""
    few: dict[str, Any] = {
        "rounds": 2,
        "local_epochs": None,
        "local_steps": 1,
        "batch_size": 4,
        "last_batch": "keep",
        "model": thin.reference(values["model"]),
    }
    few |= {k: "every:2" for k in ("diagnose", "keep") if str(values.get(k, "none")) != "none"}
    split, _, option = str(values.get("partition", "iid")).partition(":")
    if split == "pathological":  # the same part of the classes
        whole = SHAPES[name_of(values["data"])][0]
        few |= {"partition": f"{split}:{max(1, round(int(option) * CLASSES / whole))}", "clients": CLASSES}
    elif split != "domain":  # which has as many clients as domains
        few["clients"] = min(int(values.get("clients") or CLIENTS), CLIENTS)
    if split == "dirichlet":  # few pictures need not reach every client
        few["partition"] = f"{split}:{option},min=0"
    few["participation"] = max(float(values.get("participation", 1)), 0.5)  # at least two clients
    return {**values, **few}


def options(diagnose: Mapping[str, Any]) -> dict[str, Any]:
    """Options of ``isofed diagnose``, cut down."""
    return {**diagnose, **{key: min(int(diagnose.get(key, most)), most) for key, most in DIAGNOSE.items()}}


def cut(whole: Dataset, shared: bool) -> Dataset:
    """A few pictures of a few classes of a data set, made smaller; ``shared`` if several clients share a class."""
    train, test = (_smaller(_of_few_classes(part)) for part in (whole.train, whole.test))
    few = _first(train, SHARED if shared else EACH)
    return dataclasses.replace(whole, classes=whole.classes[:CLASSES], train=few, test=_tested(test))


def made_up(data: str, shared: bool = False) -> Dataset:
    """The same from nothing: pictures with the domains of a data set, and of the size that cutting it would leave."""
    name = name_of(data)
    classes, size, domains = SHAPES[name]
    classes = min(classes, CLASSES)
    groups, size = classes * max(1, len(domains)), size // _stride(size)
    made = Synthetic((SHARED if shared else EACH) * groups, max(TESTED, groups), classes, size, 3, domains=len(domains))
    loaded = made.load()
    return dataclasses.replace(loaded, name=f"{name}, made up", domains=tuple(domains), test=_tested(loaded.test))


def name_of(data: str) -> str:
    """Of a data set, without its options."""
    return data.partition(":")[0]


def _stride(size: int) -> int:
    return max(1, size // (LARGE if size >= 4 * LARGE else SIZE))


def _smaller(part: Part) -> Part:
    """Every second, third, ... pixel."""
    step = _stride(min(part.images.shape[1:3]))
    return dataclasses.replace(part, images=part.images[:, ::step, ::step])


def _of_few_classes(part: Part) -> Part:
    return part.subset(np.flatnonzero(part.labels.numpy() < CLASSES))


def _tested(part: Part) -> Part:
    """A few pictures, evenly spread over the domains where there are some, otherwise over the classes."""
    order = np.argsort(part.labels.numpy() if part.domains is None else part.domains.numpy(), kind="stable")
    return part.subset(order[np.linspace(0, len(order) - 1, min(TESTED, len(order))).astype(np.int64)])


def _first(part: Part, each: int) -> Part:
    """The first ``each`` pictures of every class and domain."""
    labels = part.labels.numpy()
    groups: npt.NDArray[np.int64] = labels
    if part.domains is not None:
        groups = labels * (int(part.domains.max()) + 1) + part.domains.numpy()
    order = np.argsort(groups, kind="stable")
    first = np.r_[True, np.diff(groups[order]) != 0]
    rank = np.arange(len(order)) - np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
    return part.subset(np.sort(order[rank < each]))
