"""The task of ``peers.py``, as every framework gets it: the case, the clock, the data and the network."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from isofed.config import settings
from isofed.engine.step import Pictures
from isofed.engine.world import World

USERS, COHORT, BATCH, LR, EVERY = 1000, 50, 10, 0.1, 10
AT_ONCE = 500  # pictures judged together; about the fastest for all of them


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of one framework."""

    framework: str
    data: str
    seed: int
    rounds: int
    warmup: int
    device: str
    precision: str
    processes: int
    threads: int
    rank: int = 0

    @property
    def shape(self) -> str:
        return f"{self.framework}:{self.processes}x{self.threads}"

    def judged(self, number: int) -> bool:
        """Whether the model is evaluated after this round."""
        return number % EVERY == 0 or number == self.rounds


class Clock:
    """When each round ended, what the evaluations found, and the processor time of the timed rounds."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.marks: list[float] = []
        self.accuracy: dict[int, float] = {}
        self.cpu = 0.0

    def round(self, accuracy: float | None = None) -> None:
        if self.case.device == "cuda":
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())
        if accuracy is not None:
            self.accuracy[len(self.marks)] = accuracy
        if len(self.marks) in (self.case.warmup, self.case.rounds):
            self.cpu = cpu_seconds() - self.cpu


def cpu_seconds() -> float:
    """Processor time of this process and of all that it has started."""
    used: dict[int, int] = {}
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # one that has just ended
            fields = entry.read_text().rpartition(")")[2].split()
            process = int(entry.parent.name)
            used[process] = sum(int(n) for n in fields[11:15])  # its own, and those of children that have ended
            below.setdefault(int(fields[1]), []).append(process)

    def tree(process: int) -> int:
        return used.get(process, 0) + sum(tree(child) for child in below.get(process, []))

    return tree(os.getpid()) / os.sysconf("SC_CLK_TCK")


@functools.cache
def the_world(data: str, seed: int, device: str) -> World:
    """The split and the initial weights of a seed, as isofed makes them."""
    chosen: dict[str, Any] = {"data": "cifar10", "root": data, "partition": "iid", "clients": USERS, "seed": seed}
    chosen |= {"participation": COHORT / USERS, "local_epochs": 1, "batch_size": BATCH, "lr": LR, "momentum": 0.0}
    chosen |= {"model": "pfl-cnn", "evaluate_every": EVERY, "train_loss": False, "device": device}
    return World.create(settings(chosen))


@functools.cache
def pictures(case: Case, part: str) -> tuple[Tensor, Tensor]:
    """A part of the data as the peers want it: normalised float32 in the order of pfl's benchmark, and labels."""
    world = the_world(case.data, case.seed, case.device)
    stored = Pictures(world.parts[part], world.dataset, torch.device(case.device))
    return stored.normalised(stored.images).permute(0, 2, 3, 1), stored.labels


class PlainNetwork(nn.Module):
    """The network of pfl-research's benchmark, in PyTorch's own layers."""

    def __init__(self, initial: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
            *(nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
        )
        with torch.no_grad():
            for mine, given in zip(self.parameters(), initial.parameters(), strict=True):
                mine.copy_(given)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images.permute(0, 3, 1, 2))
        return logits

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        self.train()
        return cross_entropy(self(images), labels)

    @torch.no_grad()
    def correct(self, images: Tensor, labels: Tensor) -> int:
        self.eval()
        return int((self(images).argmax(1) == labels).sum())


def plain_network(case: Case) -> PlainNetwork:
    return PlainNetwork(the_world(case.data, case.seed, case.device).network()).to(case.device)


def autocast(case: Case) -> AbstractContextManager[object]:
    return torch.autocast(case.device, torch.bfloat16) if case.precision == "bf16" else nullcontext()


def train_plainly(case: Case, network: PlainNetwork, user: int) -> None:
    """One local epoch, as one would write it by hand."""
    images, labels = pictures(case, "train")
    order = torch.from_numpy(the_world(case.data, case.seed, case.device).clients[user]).to(case.device)
    optimiser = torch.optim.SGD(network.parameters(), LR)
    for rows in order[torch.randperm(len(order)).to(order.device)].split(BATCH):
        optimiser.zero_grad()
        with autocast(case):
            loss = network.loss(images[rows], labels[rows])
        loss.backward()
        optimiser.step()


def judge_plainly(case: Case, network: PlainNetwork) -> float:
    images, labels = pictures(case, "test")
    pairs = zip(images.split(AT_ONCE), labels.split(AT_ONCE), strict=True)
    with autocast(case):
        return sum(network.correct(x, y) for x, y in pairs) / len(labels)
