"""DomainNet (Peng et al. 2019): 345 classes, or the ten that FedBN uses, in six kinds of pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from isofed.data.base import Dataset, Index
from isofed.data.sources import Progress
from isofed.data.sources.domains import Split, by_domain, choose_of_each_domain, parts
from isofed.data.sources.pictures import Listing, dataset, find, numbers, text
from isofed.errors import UserError

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
TEN = ("bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra")
CLASSES = 345
TESTED = 30  # percent of each domain, as in the publishers' lists
SHARE = 0.05  # of the smallest domain's training pictures, in FedBN's split


@dataclass(frozen=True)
class DomainNet:
    """DomainNet, FedBN's 10 classes (or all 345) in 6 domains, from its folders clipart/, infograph/ and so on.

    The publishers' lists <domain>_train.txt and <domain>_test.txt, beside the domain folders or in splits/, say what
    is for training and testing; without them 30 % of each domain, drawn with ``split_seed`` and spread over the
    classes, are for testing. ``split=fedbn`` trains on equally many pictures of each domain: 5 % of as many as the
    smallest has for training. ``split=feduv`` trains on all others. Pictures are squashed to size x size and not
    normalised beyond [0, 1], as in FedBN.
    """

    classes: Literal["ten", "all"] = "ten"
    size: int = 256
    split: Split = "fedbn"
    split_seed: int = 0

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        path = find("domainnet", root, DOMAINS, ("DomainNet", "domainnet", "domain_net"))
        wanted = TEN if self.classes == "ten" else None
        lists = _lists(path)
        if lists:
            listing, test = _listed(path, lists, wanted)
        else:
            listing = by_domain("domainnet", path, DOMAINS, wanted, CLASSES)
            test = choose_of_each_domain("domainnet", listing, TESTED, self.split_seed)
        places = parts("domainnet", listing, test, self.split, self.split_seed, SHARE)
        return dataset("domainnet", self, listing, places, (0.0,) * 3, (1.0,) * 3, progress)


def _lists(path: Path) -> list[tuple[Path, Path]]:
    """The training and the test list of each domain, or nothing where there are none at all."""
    names = [(f"{domain}_train.txt", f"{domain}_test.txt") for domain in DOMAINS]
    for folder in (path, path / "splits"):
        pairs = [(folder / train, folder / test) for train, test in names]
        there = [file.exists() for pair in pairs for file in pair]
        if all(there):
            return pairs
        if any(there):
            lacking = next(file for pair in pairs for file in pair if not file.exists())
            raise UserError(f"'{lacking}' is missing: data set 'domainnet' needs the lists of every domain, or none")
    return []


def _listed(path: Path, lists: list[tuple[Path, Path]], wanted: tuple[str, ...] | None) -> tuple[Listing, Index]:
    """The pictures in the publishers' lists, and the places of those for testing."""
    found: dict[Path, tuple[str, int, bool]] = {}  # class, domain, for testing
    for domain, pair in enumerate(lists):
        for file in pair:
            for picture, label in _lines(path, file, wanted):
                if picture in found:
                    raise UserError(f"the list '{file}' names '{picture}', which is in a list already")
                found[picture] = label, domain, file == pair[1]
    classes = wanted or tuple(sorted({label for label, _, _ in found.values()}))
    number = {label: place for place, label in enumerate(classes)}
    labels = numbers([number[label] for label, _, _ in found.values()])
    where = numbers([domain for _, domain, _ in found.values()])
    for domain, pair in enumerate(lists):
        if domain not in where:
            raise UserError(f"the lists '{pair[0]}' and '{pair[1].name}' name no picture of the classes that are read")
    tested = np.flatnonzero([test for _, _, test in found.values()])
    return Listing(list(found), labels, classes, where, DOMAINS), tested


def _lines(path: Path, file: Path, wanted: tuple[str, ...] | None) -> list[tuple[Path, str]]:
    """Picture and class of the lines 'domain/class/picture number'; folders name the class, so the number is spare."""
    domain, found = file.name.partition("_")[0], []
    for place, line in enumerate(text(file, "domainnet").splitlines(), 1):
        name, _, number = line.strip().rpartition(" ")
        if not line.strip():
            continue
        if not number.isdigit() or name.count("/") != 2 or not name.startswith(f"{domain}/"):
            raise UserError(f"line {place} of '{file}' is not '{domain}/class/picture number': {line!r}")
        label = name.split("/")[1]
        if wanted is not None and label not in wanted:
            continue
        if not (path / name).is_file():
            raise UserError(f"line {place} of '{file}' names the picture '{path / name}', which does not exist")
        found.append((path / name, label))
    return found
