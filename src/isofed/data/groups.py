"""Setting whole groups of samples aside, such as all pictures of a patient: then a test is of patients never seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]


def numbered(parts: Sequence[npt.NDArray[Any]]) -> list[Index]:
    """Whatever tells groups apart as numbers, the same in all parts."""
    if len({part.dtype.kind for part in parts}) > 1:  # signed and unsigned: together they would be floating point
        parts = [part.astype(str) for part in parts]
    _, numbers = np.unique(np.concatenate(parts), return_inverse=True)
    return np.split(numbers.reshape(-1).astype(np.int64), np.cumsum([len(part) for part in parts])[:-1])


def whole_groups(
    labels: Index, groups: Index, fraction: float, rng: np.random.Generator, domains: Index | None = None
) -> tuple[Index, Index]:
    """Divide places into (kept, taken), no group into both, with about ``fraction`` of every class and domain taken.

    A group counts where its first sample is from, and as of its rarest class. Of each class in each domain, groups are
    taken in a drawn order as long as they fit into the share. What is left of a domain's shares goes to its classes
    that lack most, and what is left then to the domains that lack most, one group each. Every class and every domain
    keeps a group.
    """
    _, first, member = np.unique(groups, return_index=True, return_inverse=True)
    member = member.reshape(-1)
    where = np.zeros_like(labels) if domains is None else domains
    pool = _Pool(member, [labels, where])
    kinds = np.stack([where[first], _rarest(labels, member)], axis=1)
    known, kind = np.unique(kinds, axis=0, return_inverse=True)
    each = [rng.permutation(mine) for mine in _each(kind.reshape(-1))]
    share = np.array([fraction * float(pool.sizes[mine].sum()) for mine in each])
    lack = share - np.array([pool.take(mine, room) for mine, room in zip(each, share, strict=True)])
    sites = [rng.permutation(of) for of in _each(np.unique(known[:, 0], return_inverse=True)[1].reshape(-1))]
    left, more = [], np.zeros(len(each))
    for of in sites:
        room = float(lack[of].sum())
        for n in _most(of, lack):
            more[n] = pool.take(each[n], room, most=1)
            room -= more[n]
        left.append(room)
    room = sum(left)
    for site in _most(rng.permutation(len(sites)), np.array(left)):
        again = [each[n] for n in _most(sites[site], lack) if not more[n]]
        room -= pool.take(np.concatenate([*again, each[0][:0]]), room, most=1)
    return np.flatnonzero(~pool.taken[member]), np.flatnonzero(pool.taken[member])


class _Pool:
    """Groups to take from, of which one of each class and of each domain stays."""

    def __init__(self, member: Index, kinds: Sequence[Index]) -> None:
        self.sizes = np.bincount(member)
        self.taken = np.zeros(len(self.sizes), dtype=bool)
        self._size = self.sizes.tolist()
        # For classes, and likewise for domains: in how many groups each is, and which are in each group.
        held = [_in_each(member, kind) for kind in kinds]
        self._each = [(np.bincount(np.concatenate(h)).tolist(), [each.tolist() for each in h]) for h in held]

    def take(self, groups: Index, room: float, most: float = math.inf) -> float:
        """Take the groups that fit, at most so many; how many samples they have."""
        before, room = room, room + 1e-9
        for one in groups[self.sizes[groups] <= room].tolist():
            size = self._size[one]
            if size > room or self.taken[one] or not all(left[p] > 1 for left, held in self._each for p in held[one]):
                continue
            self.taken[one] = True
            for left, held in self._each:
                for part in held[one]:
                    left[part] -= 1
            room, most = room - size, most - 1
            if not most:
                break
        return before + 1e-9 - room


def _most(places: Index, values: npt.NDArray[np.float64]) -> Index:
    """Places by their values, the largest first; equal ones in their order."""
    return places[np.argsort(-values[places], kind="stable")]


def _rarest(labels: Index, member: Index) -> Index:
    """Of each group the class of its samples of which there are the fewest."""
    order = np.lexsort((labels, np.bincount(labels)[labels], member))
    return labels[order[np.searchsorted(member[order], np.arange(member.max() + 1))]]


def _in_each(member: Index, values: Index) -> list[Index]:
    """The classes, or the domains, of each group."""
    pairs = np.unique(np.stack([member, values], axis=1), axis=0)
    return np.split(pairs[:, 1], np.searchsorted(pairs[:, 0], np.arange(1, member.max() + 1)))


def _each(kind: Index) -> list[Index]:
    """The places of each kind."""
    order = np.argsort(kind, kind="stable")
    return np.split(order, np.cumsum(np.bincount(kind))[:-1])
