"""The executor whose clients are sites: each visit is a message, each good answer an outcome.

Everything else (sampling, exact sums, the server step, records, checkpoints) is the round of
:mod:`isofed.federation`, as in a simulation. What clients remember stays with them, so in its place the server keeps a
*token*: the round of the last visit that it has used. It travels with the next message, and tells the site which of
its states counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from isofed.engine.exact import LIMIT
from isofed.engine.replica import Job, Outcome, Score, largest
from isofed.engine.serial import Serial, States
from isofed.engine.world import World
from isofed.errors import RunError
from isofed.flower import wire
from isofed.flower.crew import Crew
from isofed.flower.limits import objects
from isofed.flower.site import NOTHING, once
from isofed.flower.template import Up
from isofed.flower.wire import BadMessage, Facts
from isofed.layout import Layout, Tensors

TOKEN = "isofed.site"


class _Answer(NamedTuple):
    """The plain part of an answer, and all of it."""

    plain: Facts
    content: RecordDict


class _Judged(NamedTuple):
    """What sites have said about some weights, by client and the round of its state."""

    weights: Tensor
    version: int
    part: str
    scores: dict[tuple[int, int], Score]

    def of(self, weights: Tensor, part: str) -> bool:
        return self.weights is weights and self.version == weights._version and self.part == part


class Sites:
    """Makes visits at sites, and judges at the server what the server has data for."""

    def __init__(self, world: World, device: torch.device, crew: Crew) -> None:
        self.world, self.device, self.crew = world, device, crew
        self.local = Serial(world, device)
        self.layout: Layout = self.local.replica.run.layout
        self.initial = self.local.replica.initial
        self.up = Up(world)
        asked = [self.up.visit, *(self.up.answer(name) for name, _ in world.settings.method.exchanges)]
        crew.most_objects = max(objects(forms) for forms in asked)
        self._norms: list[float] = []  # of the last round's good updates
        self._tokens: dict[int, Tensors] = {}  # of each client
        self._judged: _Judged | None = None

    @property
    def shown(self) -> str:
        return f"flower:{len(self.world.clients)}"

    def train(self, jobs: Sequence[Job], weights: Tensor, sent: Tensors, states: States) -> Iterator[Outcome]:
        """Ask the sites of a round. Their outcomes come when all have answered or their time is over."""
        for client, old in self.crew.late():
            yield Outcome(client, problem=f"{self._who(client)} sent its update of round {old} too late")
        known = ((client, states(client)) for client in range(len(self.world.clients)))
        self._tokens = {client: token for client, token in known if token}
        replies = self._ask("train", jobs, {"do": "train"}, weights, sent, states)
        found = [self._outcome(job_of(jobs, client), reply) for client, reply in replies]
        self._leave_out_too_large(found)
        self._tokens |= {outcome.client: outcome.state for outcome in found if not outcome.problem}
        yield from found

    def _ask(
        self, kind: str, jobs: Sequence[Job], what: Facts, weights: Tensor, sent: Tensors, states: States
    ) -> Iterator[tuple[int, RecordDict | str]]:
        """Send each client of the jobs what it needs, and give the answers as they come."""
        # What most messages share is packed once, and Flower stores it once.
        model, extra = self._model(weights), wire.record({f"sent/{k}": v for k, v in sent.items()})
        fixed = once(weights, self.layout)
        contents = {}
        for job in jobs:
            accepted = round_of(states(job.client))
            facts = {"run": self.crew.run, "client": job.client, "round": job.round, "accepted": accepted}
            facts |= {"samples": self.world.samples, "lr": job.lr, "fraction": job.fraction}
            first = [wire.record({"once": fixed})] if accepted == NOTHING and fixed.numel() else []
            contents[job.client] = wire.content(facts | what, model, extra, *first)
        return self.crew.ask(kind, contents, jobs[0].round if jobs else 0)

    def _model(self, weights: Tensor) -> ArrayRecord:
        """The weights that travel: the shared ones, unless the server has changed others as well."""
        outside = torch.ones(self.layout.total, dtype=torch.bool, device=weights.device)
        outside[self.layout.shared] = False
        if torch.equal(weights[outside], self.initial[outside]):
            return wire.record({"shared": weights[self.layout.shared]})
        return wire.record({"model": weights})

    def _who(self, client: int) -> str:
        return f"(site {self.crew.called(client)})"

    def _outcome(self, job: Job, reply: RecordDict | str) -> Outcome:
        """A checked answer, or an outcome that says what is wrong with it."""
        try:
            answer = self._checked(job, reply)
            given = {k: v.to(self.device) for k, v in wire.tensors(answer.content, self.up.visit).items()}
            if not float(largest(*given.values())) < LIMIT:
                raise BadMessage("sent NaN or numbers out of range")
            counts = [wire.whole(answer.plain, name) for name in ("steps", "samples", "skipped")]
            loss, seconds = wire.number(answer.plain, "loss"), wire.number(answer.plain, "seconds")
            if counts[0] and not np.isfinite(loss):
                raise BadMessage("sent a loss that is not a number")
        except BadMessage as error:
            return Outcome(job.client, problem=f"{self._who(job.client)} {error}")
        means, sums = ({k[len(p) :]: v for k, v in given.items() if k.startswith(p)} for p in ("mean/", "sum/"))
        token = {TOKEN: torch.tensor([job.client, job.round])}
        update, statistics = given["update"], given["statistics"]
        outcome = Outcome(job.client, update, statistics, means, sums, token, loss=loss, seconds=seconds)
        outcome.steps, outcome.samples, outcome.skipped = counts
        return outcome

    def _checked(self, job: Job, reply: RecordDict | str) -> _Answer:
        """An answer, if it belongs to the question."""
        if isinstance(reply, str):
            raise BadMessage(reply)
        facts = wire.facts(reply)
        if problem := wire.text(facts, "problem"):
            raise BadMessage(problem)
        if facts.get("run") != self.crew.run or wire.whole(facts, "client") != job.client:
            raise BadMessage("sent what belongs to another run or site")
        if (number := wire.whole(facts, "round")) != job.round:
            raise BadMessage(f"sent an update of round {number} in round {job.round}")
        return _Answer(facts, reply)

    def _leave_out_too_large(self, found: list[Outcome]) -> None:
        """Mark updates that are far longer than those of the others, and of the round before."""
        good = [o for o in found if not o.problem]
        norms = {o.client: float(o.update.double().norm()) for o in good}
        for outcome in good:
            others = [n for client, n in norms.items() if client != outcome.client] + self._norms
            usual = median(others) if others else 0.0
            if usual and norms[outcome.client] > self.crew.terms.too_large * usual:
                times = norms[outcome.client] / usual
                outcome.problem = f"{self._who(outcome.client)} sent an update {times:.3g} times as long as the others"
        self._norms = [norms[o.client] for o in good if not o.problem] or self._norms

    def score(self, part: str, index: np.ndarray, weights: Tensor, state: Tensors | None = None) -> Score:
        """Judge at the server, at the one site that has the state, or at all sites where the server has no data."""
        nothing = Score.none(len(self.world.dataset.classes))
        if state and TOKEN in state:
            client = int(state[TOKEN][0])
            self._tokens[client] = state
            return self._at_sites(part, weights).get(client, nothing)
        if part == "train" or not len(self.world.parts[part]):
            return sum(self._at_sites(part, weights).values(), nothing)
        return self.local.score(part, index, weights)

    def _at_sites(self, part: str, weights: Tensor) -> dict[int, Score]:
        """What sites say about weights; each is asked once, however many questions follow."""
        if self._judged is None or not self._judged.of(weights, part):
            self._judged = _Judged(weights, weights._version, part, {})
        scores = self._judged.scores
        every = [client for client, samples in enumerate(self.world.clients) if len(samples)]
        asked = {client: round_of(self._tokens.get(client)) for client in every}
        jobs = [Job(1, client, 0.0, 0.0) for client in every if (client, asked[client]) not in scores]
        classes = len(self.world.dataset.classes)
        forms = {"correct": ("int64", (classes,)), "seen": ("int64", (classes,))}
        for client, reply in self._ask("evaluate", jobs, {"do": "score", "part": part}, weights, {}, self._tokens.get):
            try:
                answer = self._checked(job_of(jobs, client), reply)
                given = {k: v.numpy() for k, v in wire.tensors(answer.content, forms).items()}
                if (given["correct"] < 0).any() or (given["correct"] > given["seen"]).any():
                    raise BadMessage("sent a score that cannot be")
                found = Score(given["correct"], given["seen"], wire.number(answer.plain, "loss"))
            except BadMessage as error:
                self.crew.note(f"client {client} {self._who(client)} {error}, when asked to judge a model")
                found = Score.none(classes)
            scores[client, asked[client]] = found
        return {client: scores[client, asked[client]] for client in every}

    def answer(
        self, exchange: str, jobs: Sequence[Job], weights: Tensor, sent: Tensors, states: States
    ) -> Iterator[Tensors]:
        """Ask the sites a last question. Who does not answer is asked once more, then left out while enough remain."""
        forms, answers, problems = self.up.answer(exchange), dict[int, Tensors](), dict[int, str]()
        for _ in range(2):
            missing = [job for job in jobs if job.client not in answers]
            facts = {"do": "answer", "exchange": exchange}
            for client, reply in self._ask("query", missing, facts, weights, sent, states):
                try:
                    given = wire.tensors(self._checked(job_of(jobs, client), reply).content, forms)
                    if not all(bool(value.isfinite().all()) for value in given.values()):
                        raise BadMessage("sent NaN or numbers out of range")
                    answers[client] = {k: v.to(self.device) for k, v in given.items()}
                except BadMessage as error:
                    problems[client] = f"client {client} {self._who(client)} {error}, when asked '{exchange}'"
        for client in sorted(problems.keys() - answers.keys()):
            self.crew.note(problems[client])
        if len(answers) < min(self.crew.terms.min_clients, len(jobs)):
            raise RunError(
                f"too few sites have answered '{exchange}', so start the run again: {next(iter(problems.values()))}"
            )
        yield from (answers[client] for client in sorted(answers))


def round_of(state: Tensors | None) -> int:
    """The round of a client's last visit that counted."""
    return int(state[TOKEN][1]) if state and TOKEN in state else NOTHING


def job_of(jobs: Sequence[Job], client: int) -> Job:
    """The one of a client."""
    return next(job for job in jobs if job.client == client)
