"""A replica: one network that any client can visit, be judged with, or answer questions from."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from isofed.draws import generator, torch_seeded
from isofed.engine.exact import fits
from isofed.engine.plan import batches
from isofed.engine.step import LocalStep, Pictures, refill
from isofed.engine.world import World
from isofed.errors import UserError
from isofed.layout import Policy, Tensors
from isofed.methods import Visit
from isofed.models import has_batch_norm

CHUNK = 512  # samples that are judged together; fixed, so that results do not depend on who evaluates what


@dataclass(frozen=True)
class Job:
    """One visit to be made."""

    round: int
    client: int
    lr: float
    fraction: float  # the client's share in the population
    keep: bool = False  # whether the trained model itself is wanted back


@dataclass
class Outcome:
    """What came of a visit. ``problem`` says why it must not count."""

    client: int
    update: Tensor = field(default_factory=lambda: torch.empty(0))  # of the shared trained weights
    statistics: Tensor = field(default_factory=lambda: torch.empty(0))  # shared running statistics, as they are now
    mean: Tensors = field(default_factory=dict)
    sum: Tensors = field(default_factory=dict)
    state: Tensors = field(default_factory=dict)
    model: Tensor | None = None
    loss: float = float("nan")
    steps: int = 0
    samples: int = 0  # trained on, counting repeats
    skipped: int = 0
    seconds: float = 0.0
    problem: str | None = None


@dataclass
class Score:
    """Counts of an evaluation, added up over chunks."""

    correct: np.ndarray  # int64 [classes]
    seen: np.ndarray  # int64 [classes]
    loss: float  # summed over samples

    @classmethod
    def none(cls, classes: int) -> Score:
        """Of no samples at all."""
        return cls(np.zeros(classes, np.int64), np.zeros(classes, np.int64), 0.0)

    def __add__(self, other: Score) -> Score:
        return Score(self.correct + other.correct, self.seen + other.seen, self.loss + other.loss)


class Replica:
    """One network with its buffers, visited by one client after another."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self.device = world, device
        self.pictures = {name: Pictures(part, world.dataset, device) for name, part in world.parts.items()}
        network = world.network()
        self.batch_norm = has_batch_norm(network)
        self.local = LocalStep(
            network,
            self.pictures["train"],
            world,
        )
        self.run, self.flat = self.local.run, self.local.flat
        self.initial = self.flat.clone()
        # Integer buffers are not part of a model that can be averaged: each visit starts from their first values.
        self.counters = [(b, b.clone()) for b in network.buffers() if not b.is_floating_point()]
        self.fresh_state = {k: v.clone() for k, v in self.local.step.state.items()}

    def visit(self, job: Job, weights: Tensor, sent: Tensors, state: Tensors | None) -> Outcome:
        """Train at one client, from the server's weights (whole layout) and what the client remembers."""
        began = time.perf_counter()
        with one_thread(self.device), torch_seeded(self.world.settings.seed, "torch", job.round, job.client):
            visit, skipped = self._arrive(job, weights, sent, state)
            self.local.method.begin(visit)
            if self.local.method.full_gradient:
                visit.full_gradient = self._full_gradient(self.world.clients[job.client])
            self.local.network.train()
            for size in visit.sizes:
                self.local.take(size)
            outcome = self._leave(visit)
            outcome.model = self.flat.clone() if job.keep else None
        outcome.skipped, outcome.seconds = skipped, time.perf_counter() - began
        return outcome

    def load(self, weights: Tensor, state: Tensors | None = None) -> None:
        """Take over the server's weights and, where tensors stay at home, the client's own."""
        self.flat.copy_(weights)  # in which tensors that start afresh are as they were at first
        self._reset_counters()
        if state and "isofed.home" in state:
            pieces = self._home()
            torch._foreach_copy_(pieces, list(state["isofed.home"].to(self.device).split([len(p) for p in pieces])))

    def _reset_counters(self) -> None:
        for buffer, value in self.counters:
            buffer.copy_(value)

    def _home(self) -> list[Tensor]:
        layout = self.run.layout
        return [self.flat[layout.home_trained], self.flat[layout.home_statistics]]

    def _arrive(self, job: Job, weights: Tensor, sent: Tensors, state: Tensors | None) -> tuple[Visit, int]:
        local, step = self.local, self.local.step
        samples = self.world.clients[job.client]
        self.load(weights, state)
        step.start.copy_(step.weights)
        for unannounced in step.state.keys() - self.fresh_state.keys():  # of the client before
            del step.state[unannounced]
        for unsent in step.sent.keys() - sent.keys():
            del step.sent[unsent]
        own = {k: v for k, v in (state or {}).items() if not k.startswith("isofed.")}
        refill(step.state, self.fresh_state | own)
        refill(step.sent, {k: v.to(self.device) for k, v in sent.items()})
        if state and "isofed.momentum" in state:
            local.momentum.copy_(state["isofed.momentum"])
        else:
            local.momentum.zero_()
        step.lr.fill_(job.lr)
        step.counter.zero_()
        step.position = 0
        local.loss.zero_()
        labels = local.train.labels[torch.from_numpy(samples).to(self.device)]
        step.label_counts.copy_(torch.bincount(labels, minlength=self.run.classes))
        return self._plan(job, samples)

    def _plan(self, job: Job, samples: np.ndarray) -> tuple[Visit, int]:
        """Make every random draw of the visit and lay it where the step reads it."""
        local, s, step = self.local, self.world.settings, self.local.step
        place = (job.round, job.client)
        made = batches(samples, s, self.batch_norm, generator(s.seed, "order", *place))
        visit = Visit(
            run=self.run,
            network=local.network,
            round=job.round,
            client=job.client,
            samples=len(samples),
            fraction=job.fraction,
            lr=job.lr,
            sizes=made.sizes,
            label_counts=step.label_counts,
            model=self.flat,
            weights=step.weights,
            start=step.start,
            state=step.state,
            sent=step.sent,
            copies=local.copies,
            batches=lambda size: self._plain_batches("train", samples, size),
            tests=lambda size: self._own_tests(job.client, size),
            pull=local.method.pull,
        )
        plan = {"order": made.order}
        if local.augment.parts:
            rng = generator(s.seed, "augment", *place)
            plan |= local.augment.draw(visit.steps, s.batch_size, rng, self.world.dataset.shape)
        if local.dropouts:
            rng = generator(s.seed, "dropout", *place)
            plan["isofed.dropout"] = rng.integers(-(2**63), 2**63 - 1, (visit.steps, len(local.dropouts)))
            for layer in local.dropouts:
                layer.key = None  # that of the last client's last step
        drawn = local.method.plan(visit, lambda name: generator(s.seed, f"method/{name}", *place))
        if taken := sorted(drawn.keys() & plan.keys()):
            raise UserError(f"a method's plan uses the name '{taken[0]}', which is the round's own; choose another")
        step.host = {k: drawn.pop(k) for k in local.method.host}
        plan |= drawn
        refill(step.plan, {k: torch.from_numpy(v).to(self.device) for k, v in plan.items()}, grow=True)
        return visit, made.skipped

    def _leave(self, visit: Visit) -> Outcome:
        layout, step = self.run.layout, self.local.step
        visit.update = visit.moved
        self.local.method.end(visit)
        state = {k: v.clone() for k, v in step.state.items()}
        if layout.count(Policy.HOME):
            state["isofed.home"] = torch.cat(self._home())
        if self.world.settings.persistent_momentum:
            state["isofed.momentum"] = self.local.momentum.clone()
        trained_on = sum(visit.sizes)
        outcome = Outcome(
            visit.client,
            visit.update.clone(),  # whatever a method has put there may be one of the replica's own tensors
            self.flat[layout.shared_trained.stop : layout.shared.stop].clone(),
            {k: v.clone() for k, v in visit.mean.items()},
            {k: v.clone() for k, v in visit.sum.items()},
            state,
            loss=float(self.local.loss) / trained_on if trained_on else float("nan"),
            steps=visit.steps,
            samples=trained_on,
        )
        sent_back = [outcome.update, outcome.statistics, *visit.mean.values(), *visit.sum.values()]
        if not fits(*sent_back, *state.values()) or (trained_on and not math.isfinite(outcome.loss)):
            outcome.problem = "gave NaN or numbers out of range"
        return outcome

    def _plain_batches(self, part: str, samples: np.ndarray, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        pictures = self.pictures[part]
        for index in torch.from_numpy(samples).to(self.device).split(size):
            yield pictures.normalised(pictures.images[index]), pictures.labels[index]

    def _own_tests(self, client: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        s = self.world.settings
        part = "validation" if s.validation and not s.final_test else "test"
        return self._plain_batches(part, self.world.tests_of(client, part), size)

    def _full_gradient(self, samples: np.ndarray) -> Tensor:
        """The gradient of the local objective over all samples, leaving batch-norm statistics as they were."""
        local, step, before = self.local, self.local.step, self.flat.clone()
        total, count = torch.zeros_like(step.grad), 0
        local.network.train()
        for inputs, labels in self._plain_batches("train", samples, self.world.settings.batch_size):
            if len(labels) == 1 and self.batch_norm:
                continue
            local.set_batch(inputs, labels)
            step.grad.zero_()
            local.passes()
            total.add_(step.grad, alpha=len(labels))
            count += len(labels)
        self.flat.copy_(before)
        self._reset_counters()
        local.loss.zero_()
        return total / max(count, 1)

    @torch.no_grad()
    def score(self, part: str, index: np.ndarray) -> Score:
        """Judge the loaded weights on some samples of a part."""
        self.local.network.eval()
        with one_thread(self.device), self.local.autocast():
            places = torch.from_numpy(index).to(self.device).split(self.run.at_once)
            return sum((self._score(part, where) for where in places), Score.none(self.run.classes))

    def _score(self, part: str, where: Tensor) -> Score:
        pictures, classes = self.pictures[part], self.run.classes
        labels = pictures.labels[where]
        logits = self.local.network(pictures.normalised(pictures.images[where])).logits.float()
        loss = cross_entropy(logits, labels, reduction="sum")
        right = labels[logits.argmax(1) == labels]
        seen = torch.bincount(labels, minlength=classes).cpu().numpy()
        return Score(torch.bincount(right, minlength=classes).cpu().numpy(), seen, float(loss))

    def answer(self, exchange: str, job: Job, weights: Tensor, sent: Tensors, state: Tensors | None) -> Tensors:
        """One client's answer to a question after the last round, with the global model in eval mode."""
        method = next(m for name, m in self.local.method.exchanges if name == exchange)
        with one_thread(self.device), torch_seeded(self.world.settings.seed, "torch", job.round, job.client):
            visit, _ = self._arrive(job, weights, sent, state)
            self.local.network.eval()
            return {k: v.double().clone() for k, v in method.answer(exchange, visit).items()}


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Compute on one CPU thread: two threads can change the last bit, and a thread per process is the fastest split."""
    before = torch.get_num_threads()
    if device.type != "cpu" or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
