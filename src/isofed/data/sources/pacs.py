"""PACS (Li et al. 2017): seven classes as art painting, cartoon, photo and sketch."""

from __future__ import annotations

from dataclasses import dataclass

from isofed.data.base import Dataset
from isofed.data.sources import Progress
from isofed.data.sources.domains import Split, by_domain, choose_of_each_class, parts
from isofed.data.sources.pictures import dataset, find

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
TESTED = 40  # of each class and domain


@dataclass(frozen=True)
class Pacs:
    """PACS, 7 classes in 4 domains, from its folders art_painting/, cartoon/, photo/ and sketch/ (or kfold/).

    The test set is FedUV's in size: 40 pictures of each class and domain, 1,120 in all, drawn with ``split_seed``
    from each folder by itself. ``split=feduv`` trains on the other 8,871; ``split=fedbn`` on equally many of each
    domain (half of the smallest one's). Pictures are squashed to size x size.
    """

    size: int = 96
    split: Split = "feduv"
    split_seed: int = 0

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        path = find("pacs", root, DOMAINS, ("kfold", "PACS", "PACS/kfold", "pacs", "pacs/kfold"))
        listing = by_domain("pacs", path, DOMAINS, CLASSES, len(CLASSES))
        test = choose_of_each_class("pacs", listing, TESTED, self.split_seed)
        places = parts("pacs", listing, test, self.split, self.split_seed)
        return dataset("pacs", self, listing, places, progress=progress)
