"""A site: it makes visits on its own data, and remembers what its method wants it to. Knows nothing of networks.

What it is sent, and what it sends, is named here and nowhere else: ``down`` and ``up`` of :meth:`Site.do`.
"""

from __future__ import annotations

from collections.abc import Callable
from logging import getLogger
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from isofed import __version__
from isofed.config import Settings
from isofed.engine.choose import device_of, exact_arithmetic
from isofed.engine.replica import Job, Outcome, Replica
from isofed.engine.world import World
from isofed.flower import terms as deployment
from isofed.flower.data import Adapter, read_folder, site_world
from isofed.flower.states import NOTHING, SiteStates
from isofed.flower.template import Down
from isofed.flower.terms import Refusal, Table, guarded
from isofed.flower.wire import Facts, Forms, number, text, whole
from isofed.layout import Layout, Tensors

log = getLogger("flwr.isofed")  # below Flower's own, so that it appears where Flower writes
Read = Callable[[Forms, Forms], Tensors]  # the tensors of a request: those that must be there, those that may


class Reply(NamedTuple):
    """What a site answers."""

    facts: Facts
    tensors: Tensors


class Site:
    """One site, for one request: Flower starts a process for each."""

    def __init__(self, table: Table, node: Table, adapter: Adapter = read_folder) -> None:
        deployment.refuse_paths(table)
        settings, self.terms = deployment.read(table)
        self.settings = _here(settings, node)
        self.node, self.adapter = node, adapter
        self.number = whole(dict(node), "partition-id")
        if self.number >= (settings.clients or 1):
            raise Refusal(f"says it is site {self.number}, and there are {settings.clients}, counted from 0")

    def do(self, facts: Facts, read: Read) -> Reply:
        """Answer a request."""
        what = text(facts, "do")
        if what == "hello":
            return Reply(self._introduce(), {})
        if whole(facts, "client") != self.number:
            raise Refusal(f"was sent what is meant for site {facts['client']}")
        world = site_world(self.settings, self.terms, self.node, self.number, whole(facts, "samples"), self.adapter)
        visiting = _Visiting(world, SiteStates(_state_folder(self.node), text(facts, "run")))
        known = {"run": facts["run"], "client": self.number, "round": whole(facts, "round", 1)}
        with visiting.states.locked(self.terms.deadline), exact_arithmetic(self.settings):
            answer = {"train": visiting.train, "score": visiting.score, "answer": visiting.answer}.get(what)
            if answer is None:
                raise Refusal(f"does not know how to '{what}'")
            reply = answer(facts, read)
        return Reply(known | reply.facts, reply.tensors)

    def _introduce(self) -> Facts:
        world = site_world(self.settings, self.terms, self.node, self.number, 0, self.adapter)
        samples = len(world.clients[self.number])
        for note in world.dataset.notes:  # they name files, so they stay here
            log.warning("isofed: %s", note)
        return {
            "number": self.number,
            "name": str(self.node.get("name", f"site-{self.number}"))[:64],
            "samples": min(1, samples) if guarded(self.settings) else samples,
            "version": __version__,
            "torch": torch.__version__,
        }


class _Visiting:
    """The site's network, with its states."""

    def __init__(self, world: World, states: SiteStates) -> None:
        self.world, self.states = world, states
        self.device = device_of(world.settings.device)
        network = world.network()
        self.layout = Layout.of(network, world.settings.method.share(network))
        self.down = Down.of(world, self.layout)
        self.replica = Replica(world, self.device)

    def train(self, facts: Facts, read: Read) -> Reply:
        job, accepted = self._job(facts), whole(facts, "accepted")
        given = read(self.down.shared | self.down.sent, self.down.once)
        own = self.states.get(accepted)
        weights = self._weights(given, own)
        sent = {k.removeprefix("sent/"): v for k, v in given.items() if k in self.down.sent}
        outcome = self.replica.visit(job, weights, sent, _method_state(own))
        if outcome.problem:
            return Reply({"problem": outcome.problem}, {})
        self.states.put(job.round, accepted, outcome.state | self._once(weights))
        told = {k: getattr(outcome, k) for k in ("steps", "samples", "skipped", "seconds", "loss")}
        if guarded(self.world.settings):
            # These tell of the site's data, and nothing but the noised update may.
            told = {"steps": min(outcome.steps, 1), "samples": 1, "skipped": 0, "seconds": 0.0, "loss": 0.0}
        return Reply(told, _uploaded(outcome))

    def score(self, facts: Facts, read: Read) -> Reply:
        """Judge weights on the site's own samples, with what stays at home where there is something."""
        if guarded(self.world.settings):
            raise Refusal("tells nobody how well a model does on its samples: the run promises that it does not")
        given = read({}, self.down.shared | self.down.once | self.down.model)
        own, part = self.states.get(whole(facts, "accepted")), text(facts, "part")
        if part not in self.world.parts:
            raise Refusal(f"has no part '{part}'")
        self.replica.load(self._weights(given, own), _method_state(own))
        number = facts["client"]
        index = self.world.clients[number] if part == "train" else self.world.tests_of(number, part)
        score = self.replica.score(part, index)
        tensors = {"correct": torch.from_numpy(score.correct), "seen": torch.from_numpy(np.asarray(score.seen))}
        return Reply({"loss": score.loss}, {k: v.long() for k, v in tensors.items()})

    def answer(self, facts: Facts, read: Read) -> Reply:
        """The answer to a question after the last round."""
        given = read(self.down.sent, self.down.shared | self.down.once | self.down.model)
        own = self.states.get(whole(facts, "accepted"))
        sent = {k.removeprefix("sent/"): v for k, v in given.items() if k in self.down.sent}
        weights = self._weights(given, own)
        return Reply(
            {}, self.replica.answer(text(facts, "exchange"), self._job(facts), weights, sent, _method_state(own))
        )

    def _job(self, facts: Facts) -> Job:
        return Job(whole(facts, "round", 1), facts["client"], number(facts, "lr"), number(facts, "fraction"))

    def _weights(self, given: Tensors, own: Tensors | None) -> Tensor:
        """The server's weights in the order of the layout. What is not sent is as it was built, from the seed."""
        if "model" in given:
            return given["model"].to(self.device)
        if "shared" not in given:
            raise Refusal("was sent no weights")
        weights = self.replica.initial.clone()
        once = given.get("once", (own or {}).get("isofed.once"))
        if once is not None:
            reset = self.layout.reset
            size = reset.stop - reset.start
            weights[reset] = once[:size].to(self.device)
            weights[self.layout.home_statistics.stop :] = once[size:].to(self.device)
        elif self.down.once:
            raise Refusal("was never sent what is fixed in the network")
        weights[self.layout.shared] = given["shared"].to(self.device)
        return weights

    def _once(self, weights: Tensor) -> Tensors:
        """What came with the first visit, to be remembered with every state."""
        return {"isofed.once": once(weights, self.layout)} if self.down.once else {}


def once(weights: Tensor, layout: Layout) -> Tensor:
    """The part of a model that is sent once: what starts afresh in each round, and what is fixed."""
    return torch.cat([weights[layout.reset], weights[layout.home_statistics.stop :]])


def _method_state(own: Tensors | None) -> Tensors | None:
    return None if own is None else {k: v for k, v in own.items() if k != "isofed.once"}


def _uploaded(outcome: Outcome) -> Tensors:
    """What of a visit leaves the site: the update, and what the method reports; never its state."""
    made = {"update": outcome.update, "statistics": outcome.statistics}
    made |= {f"mean/{k}": v for k, v in outcome.mean.items()}
    return made | {f"sum/{k}": v for k, v in outcome.sum.items()}


def _here(settings: Settings, node: Table) -> Settings:
    """The run's settings on this machine; which device it uses is the site's own business."""
    return settings.model_copy(update={"device": str(node.get("device", "cpu")), "executor": "serial"})


def _state_folder(node: Table) -> Path:
    return Path(str(node.get("state", "~/.isofed/sites"))).expanduser()


__all__ = ["NOTHING", "Reply", "Site", "once"]
