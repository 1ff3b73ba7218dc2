"""A replica: one network that any client can visit, be judged with, or answer questions from."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from isofed.draws import generator, torch_seeded
from isofed.engine.exact import LIMIT
from isofed.engine.plan import batches
from isofed.engine.step import LocalStep, Pictures, refill
from isofed.engine.upload import Upload
from isofed.engine.world import World
from isofed.errors import UserError
from isofed.layout import Policy, Tensors
from isofed.methods import Visit
from isofed.methods.given import anatomy, check_anatomy
from isofed.models import has_batch_norm
from isofed.noise import normal_at

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
    trace: str = ""  # of the error that is the problem, for who wants to see it
    largest: float = math.inf  # of the numbers sent back, where it is known
    found: Tensor = field(default_factory=lambda: torch.empty(0))  # the largest number, and the summed loss

    def settle(self) -> None:
        """Read what was found, and judge by it."""
        if self.found.numel():
            self.largest, loss = self.found.tolist()
            self.loss = loss / self.samples if self.samples else float("nan")
            if not self.largest < LIMIT or (self.samples and not math.isfinite(loss)):
                self.problem = "gave NaN or numbers out of range"
            self.found = torch.empty(0)


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
    """One network with its buffers, visited by one client after another.

    A visit is :meth:`start`, :meth:`LocalStep.take` for each batch, and :meth:`finish`. None of them waits for a GPU;
    only :meth:`Outcome.settle` reads what it found.
    """

    def __init__(self, world: World, device: torch.device, pictures: dict[str, Pictures] | None = None) -> None:
        self.world, self.device = world, device
        self.pictures = pictures or all_pictures(world, device)
        network = world.network()
        self.batch_norm = has_batch_norm(network)
        self.local = LocalStep(network, self.pictures["train"], world)
        self.run, self.flat = self.local.run, self.local.flat
        self.initial = self.flat.clone()
        # A layer of one's own may refuse to train, as a frozen batch norm does: then all are asked.
        self._asks = any(type(module).train is not nn.Module.train for module in network.modules())
        self._layers = [] if self._asks else [vars(module) for module in network.modules()]
        # Integer buffers are not part of a model that can be averaged: each visit starts from their first values.
        self.counters = [(b, b.clone()) for b in network.buffers() if not b.is_floating_point()]
        self.fresh_state = {k: v.clone() for k, v in self.local.step.state.items()}
        self.upload = Upload(device)
        self._where = torch.zeros(self.run.at_once, dtype=torch.int64, device=device)
        self._right = torch.zeros(self.run.classes, dtype=torch.int64, device=device)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._found = torch.zeros(2, dtype=torch.float64, device=device)

    def visit(self, job: Job, weights: Tensor, sent: Tensors, state: Tensors | None) -> Outcome:
        """Train at one client, from the server's weights (whole layout) and what the client remembers."""
        began = time.perf_counter()
        with one_thread(self.device):
            with self.seeded(job):
                visit = self.start(job, weights, sent, state)
                for size in visit.sizes:
                    self.local.take(size)
            with self.seeded(job, "end"):
                outcome = self.finish(job, visit)
        outcome.settle()
        outcome.seconds = time.perf_counter() - began
        return outcome

    def seeded(self, job: Job, when: str = "visit") -> AbstractContextManager[None]:
        """For what a user's network or method draws from torch's own generators."""
        return torch_seeded(self.world.settings.seed, f"torch/{when}", job.round, job.client)

    def start(self, job: Job, weights: Tensor, sent: Tensors, state: Tensors | None) -> Visit:
        """All of a visit before its first step."""
        visit = self._arrive(job, weights, sent, state)
        if self._asks:
            self.local.network.train()
        for layer in self._layers:  # whatever the last visit or evaluation has left; asking each layer would take long
            layer["training"] = True
        if not self.local.method.ours:  # which fill their copies; of somebody's own, one may be left to what was sent
            for copy in self.local.copies.values():
                copy.copy_(self.flat)
            self._built = anatomy(self.local.network)
        self.local.method.begin(visit)
        if visit.lr != job.lr:
            self.local.step.lr.fill_(visit.lr)
        self.local.lower_copies()
        if self.local.method.full_gradient:
            visit.full_gradient = self._full_gradient(self.world.clients[job.client])
        return visit

    def load(self, weights: Tensor, state: Tensors | None = None) -> None:
        """Take over the server's weights and, where tensors stay at home, the client's own."""
        self.flat.copy_(weights)  # in which tensors that start afresh are as they were at first
        self._reset_counters()
        if state and "isofed.home" in state:
            pieces = self._home()
            torch._foreach_copy_(pieces, list(state["isofed.home"].to(self.device).split([len(p) for p in pieces])))

    def _another(self, client: int) -> Tensor:
        """A model with initial weights of the client's own."""
        drawn = generator(self.world.settings.seed, "another network", client).integers(2**62)
        return self.run.layout.pack(self.world.network(int(drawn)), self.device)

    def _reset_counters(self) -> None:
        for buffer, value in self.counters:
            buffer.copy_(value)

    def _home(self) -> list[Tensor]:
        layout = self.run.layout
        return [self.flat[layout.home_trained], self.flat[layout.home_statistics]]

    def _arrive(self, job: Job, weights: Tensor, sent: Tensors, state: Tensors | None) -> Visit:
        local, step = self.local, self.local.step
        samples = self.world.clients[job.client]
        self.load(weights, state)
        for unsent in step.sent.keys() - sent.keys():
            del step.sent[unsent]
        own = {k: v.to(self.device) for k, v in (state or {}).items() if not k.startswith("isofed.")}
        refill(step.state, self.fresh_state | own)
        refill(step.sent, {k: v.to(self.device) for k, v in sent.items()})
        step.position = 0
        visit = self._plan(job, samples)
        visit.first = state is None
        local.arrived()
        local.do(("arrive",), self._reset)
        if state and "isofed.momentum" in state:
            local.momentum.copy_(state["isofed.momentum"])
        return visit

    def _reset(self) -> None:
        """All that is the same in every arrival."""
        local, step = self.local, self.local.step
        step.start.copy_(step.weights)
        if not local.leaves_gaps:  # clipping a gradient of NaN puts NaN between the tensors too, where no pass writes
            step.grad.zero_()
        if self.run.momentum:
            local.momentum.zero_()
        step.lr.copy_(step.plan["isofed.lr"][0])
        step.label_counts.copy_(step.plan["isofed.label_counts"])
        step.counter.zero_()
        local.loss.zero_()

    def _plan(self, job: Job, samples: np.ndarray) -> Visit:
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
            skipped=made.skipped,
            label_counts=step.label_counts,
            model=self.flat,
            initial=self.initial,
            weights=step.weights,
            start=step.start,
            state=step.state,
            sent=step.sent,
            copies=local.copies,
            batches=lambda size: self._plain_batches("train", samples, size),
            tests=lambda size: self._own_tests(job.client, size),
            normal=normal_at(self.run.layout, self.device, s.seed, *place),
            another=lambda: self._another(job.client),
            bound=local.method.bound,
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
        counts = np.bincount(self.pictures["train"].labels_here[samples], minlength=self.run.classes)
        if not local.method.ours:  # somebody's own plan may look at what is laid in its place only on arrival
            step.label_counts.copy_(torch.from_numpy(counts))
            step.start.copy_(step.weights)
        drawn = local.method.plan(visit, lambda name: generator(s.seed, f"method/{name}", *place))
        if taken := sorted(drawn.keys() & plan.keys()):
            raise UserError(f"a method's plan uses the name '{taken[0]}', which is the round's own; choose another")
        step.host = {k: drawn.pop(k) for k in local.method.host if k in drawn}
        plan |= drawn
        plan |= {"isofed.label_counts": counts, "isofed.lr": np.array([job.lr], np.float32)}
        for unplanned in step.plan.keys() - plan.keys():
            del step.plan[unplanned]
        self.upload(step.plan, plan)
        return visit

    def finish(self, job: Job, visit: Visit) -> Outcome:
        """All of a visit after its last step; on a GPU the numbers are still being made when this returns."""
        layout, step = self.run.layout, self.local.step
        visit.update = visit.moved
        self.local.method.end(visit)
        if not self.local.method.ours:
            check_anatomy(self.local.method.theirs, self.local.network, self._built)
        state = {k: v.clone() for k, v in step.state.items()}
        if layout.count(Policy.HOME):
            state["isofed.home"] = torch.cat(self._home())
        if self.world.settings.persistent_momentum:
            state["isofed.momentum"] = self.local.momentum.clone()
        local = self.local
        outcome = Outcome(
            visit.client,
            # Whatever a method has put there may be one of the replica's own tensors.
            visit.update.clone() if local.method.acts_around_visits else visit.update,
            self.flat[layout.shared_trained.stop : layout.shared.stop].clone(),
            {k: v.clone() for k, v in visit.mean.items()},
            {k: v.clone() for k, v in visit.sum.items()},
            state,
            self.flat.clone() if job.keep else None,
            steps=visit.steps,
            samples=sum(visit.sizes),
            skipped=visit.skipped,
        )
        more = [*outcome.mean.values(), *outcome.sum.values(), *state.values()]
        if more or local.method.acts_around_visits or self.device.type == "cpu":
            most = largest(outcome.update, outcome.statistics, *more)
            outcome.found = torch.stack([most, local.loss.double()])
        else:
            local.do(("leave",), self._look)
            outcome.found = self._found
        return outcome

    def _look(self) -> None:
        """The largest number of a plain update and of the statistics, and the loss."""
        layout, step = self.run.layout, self.local.step
        moved = step.shared(step.weights) - step.shared(step.start)
        statistics = self.flat[layout.shared_trained.stop : layout.shared.stop]
        self._found.copy_(torch.stack([largest(moved, statistics), self.local.loss.double()]))

    def _plain_batches(self, part: str, samples: np.ndarray, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        pictures = self.pictures[part]
        for index in torch.from_numpy(samples).to(self.device).split(size) if len(samples) else ():
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
            local.pass_over()
            total.add_(step.grad, alpha=len(labels))
            count += len(labels)
        self.flat.copy_(before)
        self._reset_counters()
        return total / max(count, 1)

    @torch.no_grad()
    def score(self, part: str, index: np.ndarray) -> Score:
        """Judge the loaded weights on some samples of a part."""
        self.local.network.eval()
        self._right.zero_()
        losses: list[Tensor] = []  # of each chunk
        with one_thread(self.device):
            for chunk in chunks(index):
                self._loss.zero_()
                for where in np.array_split(chunk, range(self.run.at_once, len(chunk), self.run.at_once)):
                    self.upload({"where": self._where}, {"where": where.astype(np.int64, copy=False)})
                    self.local.do(("score", part, len(where)), partial(self._score, part, len(where)))
                losses.append(self._loss.clone())
        seen = np.bincount(self.pictures[part].labels_here[index], minlength=self.run.classes)
        return Score(self._right.cpu().numpy().copy(), seen, sum(torch.stack(losses).tolist()) if losses else 0.0)

    def _score(self, part: str, size: int) -> None:
        pictures, where = self.pictures[part], self._where[:size]
        labels = pictures.labels.index_select(0, where)
        with self.local.autocast():
            output = self.local.network(pictures.normalised(pictures.images.index_select(0, where)))
        logits = output.logits.float()
        self._loss.add_(cross_entropy(logits, labels, reduction="sum"))
        self._right.index_add_(0, labels, (logits.argmax(1) == labels).long())

    def answer(self, exchange: str, job: Job, weights: Tensor, sent: Tensors, state: Tensors | None) -> Tensors:
        """One client's answer to a question after the last round, with the global model in eval mode."""
        with one_thread(self.device), self.seeded(job):
            visit = self._arrive(job, weights, sent, state)
            for copy in self.local.copies.values():  # in which there is what the last visit has left
                copy.copy_(self.flat)
            self.local.network.eval()
            return {k: v.double().clone() for k, v in self.local.method.answer(exchange, visit).items()}


def all_pictures(world: World, device: torch.device) -> dict[str, Pictures]:
    """The parts of the data set on a device, for any number of replicas."""
    return {name: Pictures(part, world.dataset, device) for name, part in world.parts.items()}


def chunks(index: np.ndarray) -> list[np.ndarray]:
    """The pieces in which samples are judged: the same for every executor."""
    return [index[i : i + CHUNK] for i in range(0, len(index), CHUNK)]


def largest(*values: Tensor) -> Tensor:
    """The largest absolute value of some tensors, NaN if there is one, as a float64 number of their device."""
    # What is not a floating-point number cannot be NaN, and is not summed.
    ends = [end for v in values if v.numel() and v.is_floating_point() for end in torch.aminmax(v)]
    return torch.stack([end.double() for end in ends]).abs().amax()  # all of which hand a NaN on


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
