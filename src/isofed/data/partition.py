"""How the samples of a part are divided among clients: ``iid``, ``dirichlet:0.1``, ``pathological:2``, ``domain``, ...

A kind of split is a frozen dataclass whose fields are its options. Every split is drawn from the run's seed alone,
gives each client the places of its samples in the part, and never gives a sample to two clients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from isofed import draws, spec
from isofed.data.base import Index, Part
from isofed.errors import UserError, unknown

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
    """One way to divide samples; to add one, write such a dataclass and name it in ``KINDS``."""

    def split(self, samples: Samples, rng: np.random.Generator) -> list[Index]: ...


@dataclass(frozen=True)
class Iid:
    """At random, in equal sizes."""

    def split(self, samples: Samples, rng: np.random.Generator) -> list[Index]:
        return _even(rng.permutation(samples.count), samples.among())


@dataclass(frozen=True)
class Dirichlet:
    """Label shift: the share of each class a client gets is drawn from a Dirichlet distribution.

    With ``balance`` a client that already holds its even share of all samples gets no more, which is what the code
    of MOON, NIID-Bench, FedDecorr, FedAlign and FedUV does. Drawn again until every client has ``min`` samples,
    at most ``tries`` times (by default as often as a few seconds allow, up to 10,000). ``alpha=inf`` means ``iid``.
    With ``numpy_seed`` the split does not depend on the run's seed: it is, sample by sample, the one that such code has
    after ``numpy.random.seed``, so that published numbers can be compared on the very clients they were measured on.
    """

    alpha: float
    balance: bool = True
    min: int = 10
    tries: int | None = None
    numpy_seed: int | None = None

    def __post_init__(self) -> None:
        _check_alpha("dirichlet", self.alpha)
        _check_least("dirichlet", "min", self.min, 0)
        _check_least("dirichlet", "tries", 1 if self.tries is None else self.tries, 1)
        if self.numpy_seed is not None and not 0 <= self.numpy_seed < 2**32:
            raise UserError(f"dirichlet: numpy_seed must be from 0 to {2**32 - 1}, not {self.numpy_seed}")

    def split(self, samples: Samples, rng: np.random.Generator) -> list[Index]:
        clients = samples.among()
        _check_enough("dirichlet", self.min, clients, samples.count)
        if self.numpy_seed is not None:
            return self._as_public_code(samples, clients, np.random.RandomState(self.numpy_seed))
        if math.isinf(self.alpha):
            return Iid().split(samples, rng)
        sizes = np.bincount(samples.labels, minlength=samples.classes)
        shares = self._shares(sizes, clients, rng)
        owner = np.empty(samples.count, dtype=np.int64)
        for label, share in enumerate(shares):
            mine = rng.permutation(np.flatnonzero(samples.labels == label))
            owner[mine] = np.repeat(np.arange(clients), share)
        return [rng.permutation(places) for places in _by_owner(owner, clients)]

    def _shares(self, sizes: Index, clients: int, rng: np.random.Generator) -> Index:
        """How many samples of each class each client gets, [classes, clients].

        Only these numbers decide whether a try is good, so samples are not moved before one is.
        """
        best = 0
        for _ in range(self._tries(len(sizes), clients)):
            shares = self._try(sizes, clients, rng)
            if shares is None:
                continue
            smallest = int(shares.sum(0).min())
            if smallest >= self.min:
                return shares
            best = max(best, smallest)
        raise self._not_found(len(sizes), clients, best)

    def _try(self, sizes: Index, clients: int, rng: np.random.Generator) -> Index | None:
        held = np.zeros(clients, dtype=np.int64)
        shares = np.zeros((len(sizes), clients), dtype=np.int64)
        for label, size in enumerate(sizes):
            share = self._share(rng.dirichlet(np.full(clients, self.alpha)), size, held, sizes.sum())
            if share is None:
                return None  # draw again
            shares[label] = share
            held += share
        return shares

    def _share(self, weights: npt.NDArray[np.float64], size: int, held: Index, total: int) -> Index | None:
        """How a class is divided after these weights; none if all the weight lies on clients that are full: 0/0."""
        if self.balance:
            weights = weights * (held < total / len(held))
        sum_ = weights.sum()
        if not (math.isfinite(sum_) and sum_ > 0):
            return None
        cuts = (np.cumsum(weights / sum_) * size).astype(np.int64)
        cuts[-1] = size  # so the last client also gets what rounding down leaves, as in the published code
        return np.diff(np.minimum(cuts, size), prepend=0)

    def _as_public_code(self, samples: Samples, clients: int, old: np.random.RandomState) -> list[Index]:
        """The draws of the public code in its order, from numpy's old generator."""
        if math.isinf(self.alpha):
            return np.array_split(old.permutation(samples.count), clients)
        best, owner = 0, np.empty(samples.count, dtype=np.int64)
        for _ in range(self._tries(samples.classes, clients)):
            held = np.zeros(clients, dtype=np.int64)
            for label in range(samples.classes):
                mine = np.flatnonzero(samples.labels == label)
                old.shuffle(mine)
                share = self._share(old.dirichlet(np.full(clients, self.alpha)), len(mine), held, samples.count)
                if share is None:  # it divides by zero there, and the last client gets them all
                    share = np.zeros_like(held)
                    share[-1] = len(mine)
                owner[mine] = np.repeat(np.arange(clients), share)
                held += share
            if held.min() >= self.min:
                return _by_owner(owner, clients)
            best = max(best, int(held.min()))
        raise self._not_found(samples.classes, clients, best)

    def _tries(self, classes: int, clients: int) -> int:
        # A limit on work, not on time, so that whether a split is found does not depend on the machine.
        quick = max(50, min(10_000, 30_000_000 // (classes * (clients + 200))))
        return quick if self.tries is None else self.tries

    def _not_found(self, classes: int, clients: int, best: int) -> UserError:
        return UserError(
            f"no split 'dirichlet:{self.alpha:g}' in {self._tries(classes, clients):,} tries gave each of {clients} "
            f"clients {self.min} samples (the best left one with {best}): take a larger alpha, fewer clients or a "
            f"smaller min, like 'dirichlet:{self.alpha:g},min={best}'"
        )


@dataclass(frozen=True)
class Pathological:
    """Label shift: every client has exactly this many classes, and the clients of a class share it evenly."""

    classes: int

    def __post_init__(self) -> None:
        _check_least("pathological", "classes", self.classes, 1)

    def split(self, samples: Samples, rng: np.random.Generator) -> list[Index]:
        clients = samples.among()
        if self.classes > samples.classes:
            raise UserError(
                f"'pathological:{self.classes}' asks for {self.classes} classes a client, "
                f"but the data have {samples.classes}: ask for at most that many"
            )
        if self.classes * clients < samples.classes:
            raise UserError(
                f"'pathological:{self.classes}' with {clients} clients leaves some of the {samples.classes} classes to "
                f"nobody: use at least {math.ceil(samples.classes / self.classes)} clients or "
                f"{math.ceil(samples.classes / clients)} classes a client"
            )
        holders: list[list[int]] = [[] for _ in range(samples.classes)]
        for client, labels in enumerate(self._deal(samples.classes, clients, rng)):
            for label in labels:
                holders[label].append(client)
        owner = np.empty(samples.count, dtype=np.int64)
        for label, who in enumerate(holders):
            mine = rng.permutation(np.flatnonzero(samples.labels == label))
            if len(mine) < len(who):
                raise UserError(
                    f"'pathological:{self.classes}' gives class number {label} to {len(who)} clients, but it has only "
                    f"{len(mine)} samples: use fewer clients or fewer classes a client"
                )
            order = rng.permutation(len(who))  # or the first clients would always get the odd samples
            for place, chunk in zip(order, np.array_split(mine, len(who)), strict=True):
                owner[chunk] = who[place]
        return [rng.permutation(places) for places in _by_owner(owner, clients)]

    def _deal(self, classes: int, clients: int, rng: np.random.Generator) -> list[list[int]]:
        """Classes of each client, dealt from a deck of all classes that is shuffled anew whenever it is empty.

        So no class is dealt out twice more than another. A client in whose hand the deck runs out takes the rest of
        its classes from those of the new deck that it does not have yet.
        """
        hands = []
        deck: list[int] = []
        for _ in range(clients):
            hand, deck = deck[: self.classes], deck[self.classes :]
            if len(hand) < self.classes:
                fresh = rng.permutation(classes).tolist()
                held = set(hand)
                new = [c for c in fresh if c not in held][: self.classes - len(hand)]
                held = set(new)
                deck = [c for c in fresh if c not in held]
                hand = hand + new
            hands.append(hand)
        return hands


@dataclass(frozen=True)
class Domain:
    """Feature shift: a client for each domain, or several that share a domain evenly."""

    def split(self, samples: Samples, rng: np.random.Generator) -> list[Index]:
        if samples.domains is None:
            raise UserError(
                "the split 'domain' needs data with domains, which these are not: take 'digits-domains', "
                "'domain-folder' or another split, like 'dirichlet:0.1'"
            )
        count = len(samples.domain_names) or int(samples.domains.max()) + 1
        clients = count if samples.clients is None else samples.clients
        if clients % count:
            raise UserError(
                f"the split 'domain' needs a multiple of the {count} domains as clients, not {clients}: "
                f"leave the number out, or use {count} or {2 * count}"
            )
        parts = []
        for domain in range(count):
            mine = rng.permutation(np.flatnonzero(samples.domains == domain))
            if len(mine) < clients // count:
                name = samples.domain_names[domain] if samples.domain_names else str(domain)
                raise UserError(
                    f"domain '{name}' has {len(mine)} samples for {clients // count} clients: use fewer clients"
                )
            parts += _even(mine, clients // count)
        return parts


@dataclass(frozen=True)
class Quantity:
    """Size shift: the sizes are drawn from a Dirichlet distribution, the labels at random.

    Every client gets ``min`` samples first and its share of the rest on top, so no drawing again is needed.
    """

    alpha: float
    min: int = 1

    def __post_init__(self) -> None:
        _check_alpha("quantity", self.alpha)
        _check_least("quantity", "min", self.min, 0)

    def split(self, samples: Samples, rng: np.random.Generator) -> list[Index]:
        clients = samples.among()
        _check_enough("quantity", self.min, clients, samples.count)
        if math.isinf(self.alpha):
            return Iid().split(samples, rng)
        rest = samples.count - self.min * clients
        shares = np.cumsum(rng.dirichlet(np.full(clients, self.alpha)))
        if not math.isfinite(shares[-1]) or shares[-1] <= 0:
            raise UserError(f"alpha of split 'quantity' is too small to draw from, {self.alpha:g}: take 0.01 or more")
        cuts = (shares / shares[-1] * rest).astype(np.int64) + self.min * np.arange(1, clients + 1)
        return np.split(rng.permutation(samples.count), cuts[:-1])


@dataclass(frozen=True)
class FromFile:
    """Your own: a JSON file with a list of sample numbers for each client, or {"clients": [...]}."""

    path: str

    def split(self, samples: Samples, rng: np.random.Generator) -> list[Index]:
        lists = self._read()
        if samples.clients not in (None, len(lists)):
            raise UserError(
                f"'{self.path}' divides among {len(lists)} clients, not {samples.clients}: leave the number out"
            )
        parts = []
        seen = np.full(samples.count, -1, dtype=np.int64)
        for client, given in enumerate(lists):
            if not isinstance(given, list) or not all(type(i) is int for i in given):
                raise UserError(f"client {client} in '{self.path}' must be a list of whole numbers, the sample numbers")
            wrong = next((i for i in given if not 0 <= i < samples.count), None)
            if wrong is not None:
                raise UserError(
                    f"client {client} in '{self.path}' has sample {wrong}, but the samples are 0 to {samples.count - 1}"
                )
            places = np.array(given, dtype=np.int64)
            different, times = np.unique(places, return_counts=True)
            twice = different[(times > 1) | (seen[different] >= 0)]
            if len(twice):
                again = twice[0]
                other = seen[again] if seen[again] >= 0 else client
                raise UserError(
                    f"sample {again} in '{self.path}' is with client {other} and again with client {client}: "
                    "a sample belongs to one client, once"
                )
            seen[places] = client
            parts.append(places)
        if not any(map(len, parts)):
            raise UserError(f"'{self.path}' gives no client a sample: at least one must have some")
        return parts

    def _read(self) -> list[Any]:
        path = Path(self.path).expanduser()
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"there is no file '{self.path}': 'from_file' needs the path of a JSON file") from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"'{self.path}' cannot be read as JSON ({error})") from None
        if isinstance(found, dict):
            found = found.get("clients")
        if not isinstance(found, list) or not found:
            raise UserError(f"'{self.path}' must hold a list with a list of sample numbers for each client")
        return found


KINDS: dict[str, type[Kind]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "pathological": Pathological,
    "domain": Domain,
    "quantity": Quantity,
    "from_file": FromFile,
}


def parse(text: Any) -> Kind:
    """The kind of split a text such as ``dirichlet:0.1`` stands for, with its options checked."""
    if isinstance(text, str) and text.strip().startswith("from_file:"):
        # A path may hold the signs of the grammar, so it is taken as it stands.
        path = text.strip().removeprefix("from_file:").removeprefix("path=")
        if path:
            return FromFile(path)
    choice = spec.parse_one(text, "partition")
    if choice.name not in KINDS:
        raise unknown("partition", choice.name, KINDS)
    return spec.make(KINDS[choice.name], choice, "partition")


def kinds() -> dict[str, str]:
    """The name of every kind of split with one line about it."""
    return {name: (kind.__doc__ or "").strip().splitlines()[0] for name, kind in KINDS.items()}


def split(
    text: Any, part: Part, clients: int | None, classes: int, seed: int, domains: tuple[str, ...] = ()
) -> list[Index]:
    """Divide a part: for each client the places of its samples, in the order in which they were drawn.

    ``clients=None`` means 10, or what a split by domain or from a file says itself.
    """
    kind = parse(text)
    if clients is not None and clients < 1:
        raise UserError(f"the number of clients must be at least 1, not {clients}")
    labels = part.labels.cpu().numpy()
    where = None if part.domains is None else part.domains.cpu().numpy()
    samples = Samples(labels, classes, clients, where, domains)
    if not isinstance(kind, (Domain, FromFile)) and samples.among() > samples.count:
        raise UserError(
            f"{samples.among()} clients cannot share {samples.count} samples: use at most {samples.count} clients"
        )
    return [places.astype(np.int64, copy=False) for places in kind.split(samples, draws.generator(seed, "partition"))]


def counts(parts: Sequence[Index], labels: Tensor | npt.NDArray[Any], classes: int) -> Index:
    """How many samples of each class each client has, [clients, classes]; also serves to count domains."""
    values = labels.cpu().numpy() if isinstance(labels, Tensor) else labels
    if not parts:
        return np.zeros((0, classes), dtype=np.int64)
    return np.stack([np.bincount(values[places], minlength=classes) for places in parts]).astype(np.int64)


def _even(places: Index, clients: int) -> list[Index]:
    return [chunk.astype(np.int64, copy=False) for chunk in np.array_split(places, clients)]


def _by_owner(owner: Index, clients: int) -> list[Index]:
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def _check_alpha(name: str, alpha: float) -> None:
    if not alpha > 0:
        raise UserError(f"alpha of split '{name}' must be above zero, like 0.1, not {alpha:g}")


def _check_least(name: str, option: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{option} of split '{name}' must be at least {least}, not {value}")


def _check_enough(name: str, least: int, clients: int, count: int) -> None:
    if least * clients > count:
        raise UserError(
            f"the split '{name}' cannot give each of {clients} clients {least} samples, as there are only {count}: "
            f"use at most {count // least} clients or '{name}:...,min={count // clients}'"
        )
