"""Office-Home (Venkateswara et al. 2017): 65 everyday things as art, clipart, product pictures and photographs."""

from __future__ import annotations

from dataclasses import dataclass

from isofed.data.base import Dataset
from isofed.data.sources import Progress
from isofed.data.sources.domains import Split, by_domain, choose_of_each_class, parts
from isofed.data.sources.pictures import dataset, find

DOMAINS = ("Art", "Clipart", "Product", "Real World")
CLASSES = 65
TESTED = 7  # of each class and domain


@dataclass(frozen=True)
class OfficeHome:
    """Office-Home, 65 classes in 4 domains, from its folders Art/, Clipart/, Product/ and 'Real World'/.

    The test set is FedUV's in size: 7 pictures of each class and domain, 1,820 in all, drawn with ``split_seed`` from
    each folder by itself. ``split=feduv`` trains on all others; ``split=fedbn`` on equally many of each domain (half
    of the smallest one's). Pictures are squashed to size x size.
    """

    size: int = 96
    split: Split = "feduv"
    split_seed: int = 0

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        usual = ("OfficeHomeDataset_10072016", "OfficeHome", "Office-Home", "office-home", "office_home")
        path = find("office-home", root, DOMAINS, usual)
        listing = by_domain("office-home", path, DOMAINS, None, CLASSES)
        test = choose_of_each_class("office-home", listing, TESTED, self.split_seed)
        places = parts("office-home", listing, test, self.split, self.split_seed)
        return dataset("office-home", self, listing, places, progress=progress)
