"""A run as ``isofed diagnose`` finds it: its models, and samples to look at them through."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from isofed.config import settings as make_settings
from isofed.data import Dataset
from isofed.diagnose.options import Options
from isofed.diagnostics.cost import pass_macs
from isofed.engine.choose import device_of
from isofed.engine.lane import synchronize
from isofed.engine.replica import one_thread
from isofed.engine.world import World
from isofed.errors import RunError, UserError
from isofed.files import load_tensors
from isofed.layout import Layout, Tensors
from isofed.probe import AT_ONCE, Probe
from isofed.recorder import evenly
from isofed.records import MODEL, Kept, RunFolder
from isofed.resuming import check_data, check_files, moved

_SMALL = 2e9  # multiply-accumulates of a pass up to which several threads only get in each other's way


@dataclass(frozen=True)
class Model:
    """Weights of a run, in the order of its layout: the shared ones of a round, or a client's own."""

    round: int
    client: int | None
    weights: Tensor


class Material:
    """One run, read when it is needed."""

    def __init__(self, path: str | Path, options: Options, dataset: Dataset | None = None) -> None:
        self.folder, self.options = RunFolder.open(path), options
        self.settings = make_settings(moved(self.folder, options.root))
        self.device = self._device()
        self.world = World.create(self.settings, dataset)
        check_files(self.folder, self.settings)
        check_data(self.folder, self.world, "be diagnosed")
        network = self.world.network()
        self.layout = Layout.of(network, self.settings.method.share(network))
        self.history = self.folder.metrics()
        last = self.history[-1]["round"] if self.history else 0
        self._kept = [one for one in self.folder.kept() if one.round <= last]

    def _device(self) -> torch.device:
        if self.options.device is None and not torch.cuda.is_available():
            return torch.device("cpu")
        return device_of(self.options.device or self.settings.device)

    def _load(self, tensors: Tensors) -> Tensor:
        flat = torch.zeros(self.layout.total)
        for name, view in self.layout.views(flat).items():
            if name not in tensors or tensors[name].shape != view.shape:
                raise RunError(f"a model in {self.folder.path} belongs to another network")
            view.copy_(tensors[name])
        return flat.to(self.device)

    @property
    def has_model(self) -> bool:
        """Whether there is a model to measure, final or not."""
        return (self.folder.path / MODEL).exists() or self.folder.latest() is not None

    @cached_property
    def final(self) -> Model:
        """The final model; of a run that goes on, its newest state."""
        if (self.folder.path / MODEL).exists():
            tensors, info = load_tensors(self.folder.path / MODEL)
            # Of what stays at home with the clients there is no global one: that of the first client is taken.
            first = min((int(k.split("/")[1]) for k in tensors if k.startswith("client/")), default=None)
            prefix = f"client/{first}/"
            own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            return Model(int(info["round"]), None, self._load(tensors | own))
        checkpoint = self.folder.latest()
        if checkpoint is None or checkpoint.tensors["weights"].shape != (self.layout.total,):
            raise UserError(f"the run {self.folder.path} has no model yet")
        return Model(checkpoint.round, None, checkpoint.tensors["weights"].to(self.device))

    def kept(self, clients: bool) -> Iterator[Model]:
        """The models that were kept, one after another."""
        for one in self._kept:
            if (one.client is not None) == clients:
                yield Model(one.round, one.client, self._load(load_tensors(one.path)[0]))

    @cached_property
    def local(self) -> list[Model]:
        """Clients' own models of the last round in which they were kept; an even selection of many."""
        return [Model(one.round, one.client, self._load(load_tensors(one.path)[0])) for one in self._local]

    @cached_property
    def _local(self) -> list[Kept]:
        own = [one for one in self._kept if one.client is not None]
        last = [one for one in own if one.round == own[-1].round]
        return [last[i] for i in evenly(range(len(last)), self.options.clients)]

    @cached_property
    def test(self) -> Probe:
        part = "validation" if self.settings.validation and not self.settings.final_test else "test"
        return Probe(self.world, self.layout, self.device, part, self.options.samples)

    @cached_property
    def train(self) -> Probe:
        return Probe(self.world, self.layout, self.device, "train", self.options.samples)

    @cached_property
    def a_pass(self) -> float:
        """Seconds of a pass over the sample."""
        with self.threads():
            for _ in range(2):  # the first one sets things up
                began = time.perf_counter()
                self.train.look(self.final.weights)
                synchronize(self.device)
        return time.perf_counter() - began

    def threads(self) -> AbstractContextManager[None]:
        small = pass_macs(self.world.network()) * min(self.options.samples, AT_ONCE) < _SMALL
        return one_thread(self.device) if small else nullcontext()
