"""What sets in domain/class folders share: their listing, and which pictures are for testing and for training.

A test set depends on ``split_seed`` and on the sorted names of the files, never on the seed of a run, and is the same
for both splits. ``split=feduv`` trains on all other pictures. ``split=fedbn`` gives every domain the same number of
training pictures, as FedBN does: the first ``int(share * m)`` of a seeded order of its training pictures, ``m`` being
the number of training pictures of the smallest domain.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from isofed import draws
from isofed.data.base import Index, stratified
from isofed.data.sources.decode import folders_in
from isofed.data.sources.pictures import Listing, numbers, pictures
from isofed.errors import UserError

Split = Literal["feduv", "fedbn"]


def by_domain(name: str, path: Path, domains: Sequence[str], classes: Sequence[str] | None, count: int) -> Listing:
    """The pictures in domain/class folders; without ``classes``, ``count`` of them as the domains have them."""
    folders = {_plain(folder.name): folder for folder in folders_in(path)}
    for domain in domains:
        if _plain(domain) not in folders:
            raise UserError(
                f"'{path}' has no folder '{domain}': data set '{name}' has the domains {', '.join(domains)}"
            )
    own = [folders[_plain(domain)] for domain in domains]
    if classes is None:
        classes = sorted({folder.name for domain in own for folder in folders_in(domain)})
        if len(classes) != count:
            raise UserError(f"the domains in '{path}' have {len(classes)} classes: data set '{name}' has {count}")
    files: list[Path] = []
    labels, where = [], []
    for number, domain_folder in enumerate(own):
        for label, cls in enumerate(classes):
            found = pictures(domain_folder / cls, name)
            files += found
            labels += [label] * len(found)
            where += [number] * len(found)
    return Listing(files, numbers(labels), tuple(classes), numbers(where), tuple(domains))


def _plain(folder: str) -> str:
    """Copies of a set differ in 'Real World', 'Real_World' and 'RealWorld'."""
    return folder.lower().replace(" ", "").replace("_", "").replace("-", "")


def choose_of_each_class(name: str, listing: Listing, count: int, seed: int) -> Index:
    """FedUV's rule: ``count`` pictures of every class in every domain, drawn for each such folder by itself."""
    assert listing.domains is not None
    taken = []
    for domain in range(len(listing.domain_names)):
        for label in range(len(listing.classes)):
            mine = np.flatnonzero((listing.domains == domain) & (listing.labels == label))
            if len(mine) <= count:
                raise UserError(
                    f"the class folder '{listing.files[mine[0]].parent}' has {len(mine)} pictures: the test set of "
                    f"'{name}' takes {count} of each class and domain, and at least one must be left to train on"
                )
            rng = draws.generator(seed, f"data/{name}/test", domain, label)
            taken.append(rng.permutation(mine)[:count])
    return np.sort(np.concatenate(taken))


def choose_of_each_domain(name: str, listing: Listing, percent: int, seed: int) -> Index:
    """This share of every domain, rounded up and spread over its classes as evenly as whole pictures allow."""
    assert listing.domains is not None
    taken = []
    for domain in range(len(listing.domain_names)):
        mine = np.flatnonzero(listing.domains == domain)
        share = -(-percent * len(mine) // 100) / len(mine)
        _, test = stratified(listing.labels[mine], share, draws.generator(seed, f"data/{name}/test", domain))
        taken.append(mine[test])
    return np.sort(np.concatenate(taken))


def parts(name: str, listing: Listing, test: Index, split: Split, seed: int, share: float = 0.5) -> tuple[Index, Index]:
    """The places to train on and to test on."""
    assert listing.domains is not None
    train = np.setdiff1d(np.arange(len(listing.files)), test)
    if split == "feduv":
        return train, test
    sizes = np.bincount(listing.domains[train], minlength=len(listing.domain_names))
    keep = int(share * sizes.min())
    if not keep:
        smallest = listing.domain_names[int(sizes.argmin())]
        raise UserError(
            f"domain '{smallest}' of data set '{name}' has {sizes.min()} training pictures, of which 'split=fedbn' "
            f"takes a share of {share:g} from every domain, that is none: use 'split=feduv' or more data"
        )
    kept = []
    for domain in range(len(sizes)):
        rng = draws.generator(seed, f"data/{name}/fedbn", domain)
        kept.append(rng.permutation(train[listing.domains[train] == domain])[:keep])
    return np.sort(np.concatenate(kept)), test
