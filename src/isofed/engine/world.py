"""What all executors must agree on: the settings, the data, who holds what, and the network at round 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from isofed.config import Settings
from isofed.data import Dataset, Part, load, validation_split
from isofed.data.augment import parse as parse_augment
from isofed.data.base import validation_places
from isofed.data.partition import FromFile, split
from isofed.data.partition import parse as parse_partition
from isofed.draws import generator, torch_seeded
from isofed.engine.plan import has_batch
from isofed.errors import UserError
from isofed.layout import Layout
from isofed.methods import Run
from isofed.models import Network, create, has_batch_norm

GIVEN = "given"  # in the record of a run whose data set was handed over in Python


def check_given(s: Settings, dataset: Dataset | None) -> None:
    """Refuse settings that name other data than those that were handed over: the record would be of another run."""
    if dataset is None or s.data.startswith(f"{GIVEN}:"):
        return
    if load(s.data, s.root).fingerprint != dataset.fingerprint:
        given = f"the data set '{dataset.name}' in dataset="
        raise UserError(f"data={s.data} and {given} are not the same: give one of them")


@dataclass(frozen=True)
class World:
    """A federation before its first round; the same in every process."""

    settings: Settings
    dataset: Dataset
    parts: Mapping[str, Part]  # "train", "test" and, where asked for, "validation"
    clients: list[np.ndarray]  # each client's positions in the training part
    whole: str = ""  # the fingerprint of the data before a validation part was held out, where one was

    @property
    def fingerprint(self) -> str:
        """What stands for the data, whatever part of them is held out."""
        return self.whole or self.dataset.fingerprint

    def has_data(self, fingerprint: object) -> bool:
        """Whether a fingerprint is that of these data; runs used to note that of what was left to train on."""
        return fingerprint == self.fingerprint or (bool(self.whole) and fingerprint == self.dataset.fingerprint)

    @classmethod
    def create(cls, settings: Settings, dataset: Dataset | None = None) -> World:
        """Load the data, hold out a validation part, and deal the rest out to the clients."""
        if dataset is None and settings.data.startswith(f"{GIVEN}:"):
            raise UserError("this run was made with a data set given in Python; resume it there, with dataset=...")
        dataset = dataset or load(settings.data, settings.root)
        parts = {"train": dataset.train, "test": dataset.test}
        whole, fingerprint = dataset.train, dataset.fingerprint if settings.validation else ""
        if settings.validation:
            dataset, held_out = validation_split(dataset, settings.validation, settings.seed)
            parts = {"train": dataset.train, "validation": held_out, "test": dataset.test}
        if settings.method.pooled:
            clients = [np.arange(len(dataset.train), dtype=np.int64)]
        else:
            # A user's own split speaks of the whole training part; any other is made of what is left of it.
            own = isinstance(parse_partition(settings.partition), FromFile)
            of, count = whole if own else dataset.train, len(dataset.classes)
            clients = split(settings.partition, of, settings.clients, count, settings.seed, dataset.domains)
            if own and settings.validation:
                kept, _ = validation_places(whole, settings.validation, settings.seed)
                place = np.full(len(whole), -1)
                place[kept] = np.arange(len(kept))
                clients = [place[c][place[c] >= 0] for c in clients]
        world = cls(settings, dataset, parts, clients, fingerprint)
        # Whatever the pictures, the network or the clients make impossible is said here, before any work.
        if settings.clients is None:  # only now is it known how many there are
            settings.model_copy(update={"clients": len(clients)}).check_method()
        augment = parse_augment(settings.augment)
        drawn = augment.draw(1, 1, generator(settings.seed, "check"), dataset.shape)
        augment.apply(dataset.train.images[:1], {k: torch.from_numpy(v[0]) for k, v in drawn.items()})
        if settings.batch_size == 1 and has_batch_norm(world.network()):
            raise UserError("batch_size=1 cannot train batch norm; use a larger batch, or norm=group:2")
        return world

    def checked(self) -> World:
        """The same, unless there is nothing that any client could train on."""
        s = self.settings
        if self.samples and not any(has_batch(len(samples), s) for samples in self.clients):
            raise UserError(
                f"no client has a batch of {s.batch_size} samples, so with last_batch=drop none would take a step; "
                "use a smaller batch_size, or last_batch=keep"
            )
        return self

    def network(self, seed: int | None = None) -> Network:
        """A new network with the initial weights, or those of another ``seed``, as the methods want it built."""
        s = self.settings
        seed = s.seed if seed is None else seed
        network = create(s.model, classes=len(self.dataset.classes), shape=self.dataset.shape, norm=s.norm, seed=seed)
        with torch_seeded(seed, "build"):
            s.method.build(network, len(self.dataset.classes), generator(seed, "build"))
        return network

    def context(self, layout: Layout, device: torch.device) -> Run:
        """What the methods may know about the run."""
        s = self.settings
        count, clients = len(self.dataset.classes), len(self.clients)
        more = (self.dataset.shape, s.batch_size, s.method.ours)
        return Run(count, clients, self.samples, s.rounds, s.momentum, s.nesterov, layout, device, *more)

    def fractions(self) -> np.ndarray:
        """Each client's share in the population under the run's weighting; empty clients have none."""
        return self._fractions

    @cached_property
    def _fractions(self) -> np.ndarray:
        sizes = np.array([len(c) for c in self.clients], dtype=np.float64)
        weights = sizes if self._by_samples else (sizes > 0).astype(np.float64)
        return np.asarray(weights / weights.sum())

    def tests_of(self, client: int, part: str) -> np.ndarray:
        """The samples of a part that are the client's own: those of its domain, if all that it trains on are of one."""
        train, data = self.parts["train"], self.parts[part]
        if train.domains is not None and data.domains is not None:
            held = np.unique(train.domains.cpu().numpy()[self.clients[client]])
            if len(held) == 1:
                return np.flatnonzero(data.domains.cpu().numpy() == held[0])
        return np.arange(len(data))

    @cached_property
    def samples(self) -> int:
        """Training samples that belong to a client; each replica asks, and there may be very many clients."""
        return sum(len(c) for c in self.clients)

    def weight(self, client: int) -> float:
        """How much a client counts in a round's mean."""
        return float(len(self.clients[client])) if self._by_samples else 1.0

    @property
    def _by_samples(self) -> bool:
        return self.settings.weighting == "samples" and not self.settings.method.uniform
