"""What a message between a server and a site must look like, found out by making one visit on made-up pictures.

So every method, also one of a package that is installed at the server and the sites, has its messages checked name by
name and shape by shape, without telling anybody what it sends; and a method that fails does so before any site is
asked.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from isofed.config import Settings
from isofed.data import Dataset, Part
from isofed.draws import generator
from isofed.engine.replica import Job, Replica
from isofed.engine.world import World
from isofed.flower.wire import Form, Forms, form, forms
from isofed.layout import Layout

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Down:
    """What a site may be sent."""

    shared: dict[str, Form]  # in every message: the weights that travel
    sent: dict[str, Form]  # besides, for a visit
    once: dict[str, Form]  # with a site's first visit: what is fixed, and what starts afresh each round
    model: dict[str, Form]  # instead of all these, where the server has changed what is fixed

    @classmethod
    def of(cls, world: World, layout: Layout) -> Down:
        method = world.settings.method
        part = layout.shared
        count = layout.total - layout.home_statistics.stop + layout.reset.stop - layout.reset.start
        return cls(
            {"shared": ("float32", (part.stop - part.start,))},
            {f"sent/{k}": form(v) for k, v in method.send(method.server_state(world.context(layout, CPU))).items()},
            {"once": ("float32", (count,))} if count else {},
            {"model": ("float32", (layout.total,))},
        )


class Up:
    """What a site may answer."""

    def __init__(self, world: World) -> None:
        self._world = _made_up(world)
        self._replica = Replica(self._world, CPU)
        method, run = self._world.settings.method, self._replica.run
        self._sent = method.send(method.server_state(run))
        self._job = Job(1, 0, self._world.settings.lr, 1 / len(world.clients))

    @cached_property
    def visit(self) -> Forms:
        """The tensors of an update."""
        outcome = self._replica.visit(self._job, self._replica.initial, self._sent, None)
        made = {"update": outcome.update, "statistics": outcome.statistics}
        made |= {f"mean/{k}": v for k, v in outcome.mean.items()} | {f"sum/{k}": v for k, v in outcome.sum.items()}
        return forms(made)

    def answer(self, exchange: str) -> Forms:
        """The tensors of an answer to a last question."""
        return forms(self._replica.answer(exchange, self._job, self._replica.initial, self._sent, None))


def _made_up(world: World) -> World:
    """The same federation with a few random pictures at every client."""
    s, of = world.settings, world.dataset
    count = max(2 * len(of.classes), s.batch_size)
    channels, height, width = of.shape
    rng = generator(s.seed, "template")
    pictures = torch.from_numpy(rng.integers(0, 256, (count, height, width, channels), np.uint8))
    labels = torch.arange(count) % len(of.classes)
    part = Part(pictures.to(of.train.images.dtype), labels)
    dataset = Dataset(of.name, of.classes, part, part, of.mean, of.std)
    parts = {name: part for name in world.parts}
    return dataclasses.replace(
        world, settings=_short(s), dataset=dataset, parts=parts, clients=[np.arange(count)] * len(world.clients)
    )


def _short(s: Settings) -> Settings:
    return s.model_copy(update={"local_epochs": None, "local_steps": 1, "augment": "none", "device": "cpu"})
