"""Diagnostics during a run (``diagnose=every:10``): spectra, alignment and drift of a round, one line each time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isofed.diagnostics import (
    classifier_alignment,
    classifier_spectrum,
    client_drift,
    representation_spectrum,
    significant,
    spectrum_gap,
)
from isofed.engine.replica import one_thread
from isofed.engine.world import World
from isofed.layout import Layout
from isofed.probe import Probe

CLIENTS = 20  # whose models are looked at after their training,
BYTES = 2**29  # unless they would take more memory than this together
LOCAL = 2  # of these, whose features are looked at before averaging
SAMPLES = 2000  # of the part that rounds are judged on


class Recorder:
    """Measures every ``every`` rounds. It only looks: a run trains the same bits with and without it."""

    def __init__(self, world: World, layout: Layout, device: torch.device, every: int) -> None:
        self.every, self._world, self._layout, self._device = every, world, layout, device
        self._most = max(2, min(CLIENTS, BYTES // (4 * layout.total)))

    def wanted(self, number: int, clients: Sequence[int]) -> set[int]:
        """Of a round's clients, those whose trained models are to be handed over: an even selection, or none."""
        return set(evenly(clients, self._most)) if number % self.every == 0 else set()

    @cached_property
    def _probe(self) -> Probe:
        part = "validation" if self._world.settings.validation else "test"
        return Probe(self._world, self._layout, self._device, part, SAMPLES)

    def line(self, number: int, model: Tensor, start: Tensor, models: Mapping[int, Tensor]) -> dict[str, Any]:
        """The record of a round.

        Args:
            model: the global weights after the round.
            start: the weights that the clients received.
            models: what clients made of them.
        """
        began = time.perf_counter()
        clients = evenly(sorted(models), self._most)
        with torch.no_grad(), one_thread(self._device):
            line: dict[str, Any] = {"round": number}
            whole = self._with_home(model, models[clients[0]]) if clients else model
            line |= self._classifier(whole, [models[c] for c in clients])
            line |= self._features(whole, {c: models[c] for c in evenly(clients, LOCAL)})
            line |= self._drift(start, {c: models[c] for c in clients})
        return line | {"seconds": time.perf_counter() - began}

    def _with_home(self, model: Tensor, own: Tensor) -> Tensor:
        """The global model; of what stays at home with the clients, the server has none, and one client's is taken."""
        parts = [p for p in (self._layout.home_trained, self._layout.home_statistics) if p.stop > p.start]
        if parts:
            model = model.clone()
            for part in parts:
                model[part] = own[part]
        return model

    def _classifier(self, model: Tensor, models: Sequence[Tensor]) -> dict[str, Any]:
        heads = [self._probe.head(weights) for weights in (model, *models)]
        rows = [head for head in heads if head is not None]
        if not rows:
            return {}
        spectrum = classifier_spectrum(rows[0])
        line: dict[str, Any] = {
            "classifier_spectrum": short(spectrum.values),
            "classifier_effective_rank": spectrum.effective_rank,
        }
        if len(rows) > 2:
            found = classifier_alignment(rows[1:])
            line["alignment"] = {"cosine": found.cosine, "norm_difference": found.norm_difference}
        return line

    def _features(self, model: Tensor, local: Mapping[int, Tensor]) -> dict[str, Any]:
        values = self._spectrum(model)
        if values is None:
            return {}
        found = []
        for client, own in local.items():
            theirs = self._spectrum(own)
            if theirs is not None:
                gap = spectrum_gap([theirs], values)
                found.append({"client": client, "representation_spectrum": short(theirs), "gap": gap})
        return {
            "representation_spectrum": short(values),
            "significant": significant(values),
            "part": self._probe.part,
            "samples": len(self._probe.index),
            "local": found,
        }

    def _spectrum(self, weights: Tensor) -> Tensor | None:
        features, _ = self._probe.look(weights)
        return representation_spectrum(features).values if features.isfinite().all() else None

    def _drift(self, start: Tensor, models: Mapping[int, Tensor]) -> dict[str, Any]:
        if len(models) < 2:
            return {}
        part = self._layout.shared_trained
        moved = [own[part] - start[part] for own in models.values()]
        found = client_drift(moved, [self._world.weight(client) for client in models])
        drift = {"length": short(found.norms), "distance": short(found.distances), "angle": short(found.angles)}
        drift["clients"] = list(models)
        return {"drift": drift | {"diversity": found.diversity, "cosine": found.cosine}}


def evenly(values: Sequence[int], most: int) -> list[int]:
    """All of them, or an even selection of many."""
    if len(values) <= most:
        return list(values)
    return [values[i] for i in np.linspace(0, len(values) - 1, most).astype(int)]


def short(values: Tensor | Iterable[float]) -> list[float]:
    """Six digits of each, which is more than a picture shows and a third of the bytes."""
    return [float(f"{float(v):.6g}") for v in (values.tolist() if isinstance(values, Tensor) else values)]
