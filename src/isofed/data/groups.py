"""Setting whole groups of samples aside, such as all pictures of a patient: then a test is of patients never seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]


def numbered(parts: Sequence[npt.NDArray[Any]]) -> list[Index]:
    """Whatever tells groups apart as numbers, the same in all parts."""
    _, numbers = np.unique(np.concatenate(parts), return_inverse=True)
    return np.split(numbers.reshape(-1).astype(np.int64), np.cumsum([len(part) for part in parts])[:-1])


def whole_groups(
    labels: Index, groups: Index, fraction: float, rng: np.random.Generator, domains: Index | None = None
) -> tuple[Index, Index]:
    """Divide places into (kept, taken), no group into both, with about ``fraction`` of every class and domain taken.

    A group counts where its first sample is from, and as of its rarest class. Of each class and domain, groups are
    taken in a drawn order as long as they fit into the share. What is left of it goes to the next ones, of which it
    makes room for one group more at most. Every class keeps a group.
    """
    _, first, member, sizes = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
    where = np.zeros_like(labels) if domains is None else domains
    kinds = np.stack([_rarest(labels, member), where[first]], axis=1)
    _, kind = np.unique(kinds, axis=0, return_inverse=True)
    held, left = _classes(labels, member)
    taken, carried = np.zeros(len(first), dtype=bool), 0.0
    each = _each(kind.reshape(-1))
    for mine in (each[number] for number in rng.permutation(len(each))):
        share = fraction * float(sizes[mine].sum())
        room = share + min(carried, float(sizes[mine].min())) + 1e-9
        for one in rng.permutation(mine):
            if sizes[one] <= room and (left[held[one]] > 1).all():
                taken[one] = True
                room -= sizes[one]
                left[held[one]] -= 1
        carried += share - float(sizes[mine][taken[mine]].sum())
    return np.flatnonzero(~taken[member]), np.flatnonzero(taken[member])


def _rarest(labels: Index, member: Index) -> Index:
    """Of each group the class of its samples of which there are the fewest."""
    order = np.lexsort((labels, np.bincount(labels)[labels], member))
    return labels[order[np.searchsorted(member[order], np.arange(member.max() + 1))]]


def _classes(labels: Index, member: Index) -> tuple[list[Index], Index]:
    """The classes of each group, and in how many groups each class is."""
    pairs = np.unique(np.stack([member, labels], axis=1), axis=0)
    cuts = np.searchsorted(pairs[:, 0], np.arange(1, member.max() + 1))
    return np.split(pairs[:, 1], cuts), np.bincount(pairs[:, 1])


def _each(kind: Index) -> list[Index]:
    """The places of each kind."""
    order = np.argsort(kind, kind="stable")
    return np.split(order, np.cumsum(np.bincount(kind))[:-1])
