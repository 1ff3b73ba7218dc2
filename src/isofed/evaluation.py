"""Judging a model: accuracy, loss, per class, per domain and, where tensors stay at home, per client."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from isofed.engine.replica import Score
from isofed.engine.serial import Executor, States
from isofed.engine.world import World
from isofed.layout import Layout, Policy

MOST_CLIENTS = 100  # own models judged in one evaluation; with more clients, a fixed selection


class Judge:
    """Evaluates the weights of a federation on its test part, or on its validation part where there is one."""

    def __init__(self, world: World, executor: Executor) -> None:
        self.world, self.executor = world, executor
        network = world.network()
        self._own_models = Layout.of(network, world.settings.method.share(network)).count(Policy.HOME) > 0
        self.part = "validation" if world.settings.validation else "test"

    def judge(self, weights: Tensor, states: States, part: str | None = None) -> dict[str, Any]:
        """One evaluation as a record. ``accuracy`` is the number to compare by."""
        part = part or self.part
        line = self._own(part, weights, states) if self._own_models else self._global(part, weights)
        if self.world.settings.train_loss and part == self.part:
            line["train_loss"] = self._train_loss(weights, states)
        return line

    def _train_loss(self, weights: Tensor, states: States) -> float:
        """The loss on all training samples; where clients have models of their own, of each on its own samples."""
        if self._own_models:
            own = [self.executor.score("train", self.world.clients[c], weights, states(c)) for c in self._chosen]
            train = sum(own[1:], own[0])
        else:
            train = self.executor.score("train", np.arange(len(self.world.parts["train"])), weights)
        return train.loss / int(train.seen.sum())

    @cached_property
    def _chosen(self) -> list[int]:
        """The clients whose own models are judged: all that have data, or an even selection of many."""
        clients = [c for c, samples in enumerate(self.world.clients) if len(samples)]
        return [clients[i] for i in np.linspace(0, len(clients) - 1, min(len(clients), MOST_CLIENTS)).astype(int)]

    def _global(self, part: str, weights: Tensor) -> dict[str, Any]:
        """The one global model on the whole part; summed over domains where there are some."""
        scores = [self.executor.score(part, index, weights) for index in self._domains(part)]
        line = _summary(sum(scores[1:], scores[0]))
        if self.world.dataset.domains:
            named = zip(self.world.dataset.domains, scores, strict=True)
            line["domain_accuracy"] = {name: _accuracy(score) for name, score in named if score.seen.any()}
        return line

    def _own(self, part: str, weights: Tensor, states: States) -> dict[str, Any]:
        """Each client's own model, on its own domain where it has one, otherwise on the whole part; then the mean."""
        chosen = self._chosen
        scores = [self.executor.score(part, self.world.tests_of(c, part), weights, states(c)) for c in chosen]
        line = _summary(sum(scores[1:], scores[0]))
        own = {str(c): _accuracy(s) for c, s in zip(chosen, scores, strict=True) if s.seen.any()}
        line["accuracy"] = float(np.mean(list(own.values())))
        line["client_accuracy"] = own
        return line

    def _domains(self, part: str) -> list[np.ndarray]:
        data = self.world.parts[part]
        if data.domains is None:
            return [np.arange(len(data))]
        domains = data.domains.cpu().numpy()
        return [np.flatnonzero(domains == d) for d in range(len(self.world.dataset.domains))]


def _accuracy(score: Score) -> float:
    return int(score.correct.sum()) / max(int(score.seen.sum()), 1)


def _summary(score: Score) -> dict[str, Any]:
    per_class = [int(c) / int(n) if n else None for c, n in zip(score.correct, score.seen, strict=True)]
    return {
        "accuracy": _accuracy(score),
        "loss": score.loss / max(int(score.seen.sum()), 1),
        "class_accuracy": per_class,
    }
