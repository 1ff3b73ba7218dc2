"""How the samples of a part are divided among clients: ``iid``, ``dirichlet:0.1``, ``pathological:2``, ``domain``, ...

A kind of split is a frozen dataclass whose fields are its options. Every split is drawn from the run's seed alone,
gives each client the places of its samples in the part, and never gives a sample to two clients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from isofed import draws, spec
from isofed.data.base import Index, Part
from isofed.data.dirichlet import Dirichlet, Quantity
from isofed.data.splitting import Iid, Kind, Samples, by_owner, check_enough, check_least, even
from isofed.errors import UserError, unknown
from isofed.words import many


@dataclass(frozen=True)
class Pathological:
    """Label shift: every client has exactly this many classes, and the clients of a class share it evenly."""

    classes: int

    def __post_init__(self) -> None:
        check_least("pathological", "classes", self.classes, 1)

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
        return [rng.permutation(places) for places in by_owner(owner, clients)]

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
                has = f"domain '{name}' has {many(len(mine), 'sample')} for {many(clients // count, 'client')}"
                raise UserError(f"{has}: use fewer clients")
            parts += even(mine, clients // count)
        return parts


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
    if choice.name not in KINDS and str(text).strip().endswith(".json"):
        raise UserError(f"a split of your own is written partition=from_file:{str(text).strip()}")
    if choice.name not in KINDS:
        raise unknown("partition", choice.name, KINDS)
    return spec.make(KINDS[choice.name], choice, "partition")


def option_names(text: str) -> list[str]:
    """The options that a kind of split can have; none of what is no kind."""
    kind: Any = KINDS.get(text.strip().partition(":")[0])
    return [spec.option(field) for field in fields(kind)] if kind else []


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
        if least := getattr(kind, "min", 0):
            check_enough(text.partition(":")[0], least, samples.among(), samples.count)
        raise UserError(
            f"{samples.among()} clients cannot share {samples.count} samples: use at most "
            f"{many(samples.count, 'client')}"
        )
    return [places.astype(np.int64, copy=False) for places in kind.split(samples, draws.generator(seed, "partition"))]


def counts(parts: Sequence[Index], labels: Tensor | npt.NDArray[Any], classes: int) -> Index:
    """How many samples of each class each client has, [clients, classes]; also serves to count domains."""
    values = labels.cpu().numpy() if isinstance(labels, Tensor) else labels
    if not parts:
        return np.zeros((0, classes), dtype=np.int64)
    return np.stack([np.bincount(values[places], minlength=classes) for places in parts]).astype(np.int64)
