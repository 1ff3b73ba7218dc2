"""ImageNet-200, as in FedAlign: 200 classes of ImageNet (ILSVRC 2012) with 500 training pictures each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isofed import draws
from isofed.data.base import Dataset
from isofed.data.sources import Progress
from isofed.data.sources.decode import folders_in, pictures_in
from isofed.data.sources.pictures import Listing, dataset, find, numbers, pictures
from isofed.errors import UserError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASS_SEED = 1993  # of numpy's legacy generator


@dataclass(frozen=True)
class ImageNet200:
    """200 classes of ImageNet with 500 training pictures each, from its folders train/<wnid>/ and val/<wnid>/.

    The classes are drawn without replacement from the sorted folders of train/ by numpy's legacy generator with seed
    1993; the training pictures of each by themselves with ``split_seed``. All validation pictures of these classes are
    the test part. Pictures are squashed to size x size: at 224 pixels the decoded set takes 16 GB in the cache.
    """

    classes: int = 200
    per_class: int = 500
    size: int = 224
    split_seed: int = 0

    def __post_init__(self) -> None:
        for what, value, least in (("classes", self.classes, 2), ("per_class", self.per_class, 1)):
            if value < least:
                raise UserError(f"{what} of data set 'imagenet-200' must be at least {least}, not {value}")

    def load(self, root: str | None = None, progress: Progress | None = None) -> Dataset:
        path = find("imagenet-200", root, ("train", "val"), ("imagenet", "ImageNet", "ILSVRC2012", "imagenet-200"))
        chosen = self._chosen(path / "train")
        train: list[Path] = []
        test: list[Path] = []
        labels: list[list[int]] = [[], []]
        if (path / "val").is_dir() and pictures_in(path / "val"):
            raise UserError(f"'{path / 'val'}' holds pictures: 'imagenet-200' needs them in class folders val/<wnid>/")
        for label, wnid in enumerate(chosen):
            found = pictures(path / "train" / wnid, "imagenet-200")
            if len(found) < self.per_class:
                raise UserError(
                    f"the class folder '{path / 'train' / wnid}' has {len(found)} pictures, not {self.per_class}: "
                    f"add the others or ask for fewer, like 'imagenet-200:per_class={len(found)}'"
                )
            rng = draws.generator(self.split_seed, "data/imagenet-200/train", label)
            train += [found[i] for i in np.sort(rng.permutation(len(found))[: self.per_class])]
            labels[0] += [label] * self.per_class
            found = pictures(path / "val" / wnid, "imagenet-200")
            test += found
            labels[1] += [label] * len(found)
        listing = Listing(train + test, numbers(labels[0] + labels[1]), tuple(chosen))
        places = np.arange(len(train)), np.arange(len(train), len(train) + len(test))
        return dataset("imagenet-200", self, listing, places, MEAN, STD, progress)

    def _chosen(self, folder: Path) -> list[str]:
        if not folder.is_dir():
            raise UserError(f"there is no folder '{folder}', which data set 'imagenet-200' needs")
        wnids = [f.name for f in folders_in(folder)]
        if len(wnids) < self.classes:
            raise UserError(
                f"'{folder}' has {len(wnids)} class folders, fewer than the {self.classes} to choose: "
                "add the others or ask for fewer, like 'imagenet-200:classes=10'"
            )
        order = np.random.RandomState(CLASS_SEED).choice(len(wnids), self.classes, replace=False)
        return sorted(wnids[i] for i in order)
