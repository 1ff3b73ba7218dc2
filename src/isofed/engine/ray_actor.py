"""The actor: one engine on one device somewhere in a Ray cluster, spoken to by :mod:`isofed.engine.ray_actors`.

It adds up what its clients send back and keeps the sum until the end of the round, so that one result travels, however
many clients there were. Calls come one at a time, in the order in which they were sent.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

import isofed
from isofed.collect import Collected
from isofed.engine.choose import exact_arithmetic
from isofed.engine.portable import Bytes, arrays, tensors, unpack
from isofed.engine.replica import Job, Score
from isofed.engine.serial import Executor, Serial
from isofed.engine.slots import Slots
from isofed.engine.world import World
from isofed.errors import RunError
from isofed.layout import Layout


def local_executor(world: World, device: torch.device) -> Executor:
    """The engine of an actor: the fastest that one process has for the device."""
    return Slots(world, device) if device.type == "cuda" else Serial(world, device)


def versions() -> dict[str, str]:
    """What must be the same on every machine, or the bits are not."""
    return {"isofed": isofed.__version__, "torch": torch.__version__, "numpy": np.__version__}


class Actor:
    """Trains, judges and asks clients for a run that is led elsewhere."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._open = ExitStack()

    def hello(self) -> tuple[str, dict[str, str]]:
        """Where this is, and what runs here."""
        return socket.gethostname(), versions()

    def set_up(self, data: dict[str, Bytes], plain: dict[str, Any], files: dict[str, str], device: str) -> None:
        """Build the world and the engine of a run."""
        self._open.close()
        content = tensors(data)
        content["clients"] = content["clients"].clone()  # small, and read by those who ask for memory of their own
        self.world = unpack(content, plain)
        for file, digest in self.world.settings.code().items():
            if files.get(file) != digest:
                raise RunError(f"{file} is not the same file on the machine {socket.gethostname()}")
        network = self.world.network()
        self.layout = Layout.of(network, self.world.settings.method.share(network))
        self._open = ExitStack()
        self._open.enter_context(exact_arithmetic(self.world.settings))
        self.engine = local_executor(self.world, torch.device(device))
        if isinstance(self.engine, Slots):
            self._open.callback(self.engine.close)

    def begin(self, jobs: Sequence[Job], weights: Bytes, sent: dict[str, Bytes]) -> None:
        """A round, of which any client may be trained here."""
        self.jobs, self.weights, self.sent = jobs, tensors(weights), tensors(sent)
        self.collected = Collected(self.world, self.layout, jobs)

    def train(self, places: Sequence[int], states: list[Any]) -> int:
        """Visit some of the round's clients, by their places among its jobs; gives how many train side by side."""
        jobs = [self.jobs[place] for place in places]
        known = dict(zip((job.client for job in jobs), tensors(states), strict=True))
        for outcome in self.engine.train(jobs, self.weights, self.sent, known.get):
            self.collected.add(outcome)
        return len(self.engine.slots) if isinstance(self.engine, Slots) else 1

    def finish(self) -> dict[str, Any]:
        """What has been collected since :meth:`begin`, or since the last call."""
        content = arrays(self.collected.content())
        self.collected = Collected(self.world, self.layout, self.jobs)
        return dict(content)

    def score(self, weights: Bytes, part: str, pieces: Sequence[np.ndarray], state: Any) -> list[Score]:
        """Judge piece by piece: the one who asked adds them up in their order."""
        model, own = tensors(weights), tensors(state)
        return [self.engine.score(part, np.array(piece), model, own) for piece in pieces]

    def answer(
        self, exchange: str, jobs: Sequence[Job], weights: Bytes, sent: dict[str, Bytes], states: list[Any]
    ) -> list[Any]:
        """The answers of some clients, in the order of the jobs."""
        known = dict(zip((job.client for job in jobs), tensors(states), strict=True))
        return [arrays(a) for a in self.engine.answer(exchange, jobs, tensors(weights), tensors(sent), known.get)]
