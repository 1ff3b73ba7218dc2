"""What every kind of split starts from: the samples that there are to divide, and how they are dealt out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from isofed.data.base import Index
from isofed.errors import UserError
from isofed.words import many

DEFAULT_CLIENTS = 10


@dataclass(frozen=True, eq=False)
class Samples:
    """What there is to divide, and among how many (``None``: the kind knows best)."""

    labels: Index
    classes: int
    clients: int | None
    domains: Index | None = None
    domain_names: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.labels)

    def among(self) -> int:
        """The number of clients, for kinds that can serve any number."""
        return DEFAULT_CLIENTS if self.clients is None else self.clients


class Kind(Protocol):
    """One way to divide samples; to add one, write such a dataclass and name it in ``KINDS`` of ``partition.py``."""

    def split(self, samples: Samples, rng: np.random.Generator) -> list[Index]: ...


@dataclass(frozen=True)
class Iid:
    """At random, in equal sizes."""

    def split(self, samples: Samples, rng: np.random.Generator) -> list[Index]:
        return even(rng.permutation(samples.count), samples.among())


def even(places: Index, clients: int) -> list[Index]:
    """Dealt out in the given order, in sizes that differ by one at most."""
    size, larger = divmod(len(places), clients)
    # The slices that np.array_split gives, which takes several times as long for very many clients.
    ends = np.arange(1, clients + 1) * size + np.minimum(np.arange(1, clients + 1), larger)
    places = places.astype(np.int64, copy=False)
    return [places[start:end] for start, end in pairwise([0, *ends.tolist()])]


def by_owner(owner: Index, clients: int) -> list[Index]:
    """The places of each client, for whom each place belongs to."""
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def check_alpha(name: str, alpha: float) -> None:
    if not alpha > 0:
        raise UserError(f"alpha of split '{name}' must be above zero, like 0.1, not {alpha:g}")


def check_least(name: str, option: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{option} of split '{name}' must be at least {least}, not {value}")


def check_enough(name: str, least: int, clients: int, count: int) -> None:
    if least * clients > count:
        fewer = f"use at most {many(count // least, 'client')}" if count >= least else "use more samples"
        smaller = f" or '{name}:...,min={count // clients}'" if count >= clients else ""
        raise UserError(
            f"the split '{name}' cannot give each of {clients} clients {least} samples, as there are only {count}: "
            f"{fewer}{smaller}"
        )
