"""Office-Caltech10 (Gong et al. 2012): ten office things from a shop, a web crawl and two cameras."""

from __future__ import annotations

from dataclasses import dataclass

from isofed.data.base import Dataset
from isofed.data.sources import Progress
from isofed.data.sources.domains import Split, by_domain, choose_of_each_domain, parts
from isofed.data.sources.pictures import dataset, find

DOMAINS = ("amazon", "caltech", "dslr", "webcam")
CLASSES = 10
TESTED = 20  # percent of each domain


@dataclass(frozen=True)
class OfficeCaltech10:
    """Office-Caltech10, 10 classes in 4 domains, from its folders amazon/, caltech/, dslr/ and webcam/.

    The test set is 20 % of each domain, rounded up, drawn with ``split_seed`` and spread over the classes: FedBN's own
    lists are pickled files, which are not read. ``split=fedbn`` trains on equally many pictures of each domain: half as
    many as the smallest has for training. ``split=feduv`` trains on all others. Pictures are squashed to size x size
    and not normalised beyond [0, 1], as in FedBN.
    """

    size: int = 256
    split: Split = "fedbn"
    split_seed: int = 0

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        usual = ("office_caltech_10", "office-caltech10", "OfficeCaltech10", "Office_Caltech_DA_Dataset")
        path = find("office-caltech10", root, DOMAINS, usual)
        listing = by_domain("office-caltech10", path, DOMAINS, None, CLASSES)
        test = choose_of_each_domain("office-caltech10", listing, TESTED, self.split_seed)
        places = parts("office-caltech10", listing, test, self.split, self.split_seed)
        return dataset("office-caltech10", self, listing, places, (0.0,) * 3, (1.0,) * 3, progress)
