"""Methods as a user would write them, one for each place in a round; the tests name them as ``file.py:Class``."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from isofed import Method
from isofed.layout import Policy, Tensors
from isofed.methods import Final, Round, Run, Step, Visit
from isofed.methods.base import Draws
from isofed.models import Network

HERE = str(Path(__file__).resolve())


@dataclass(frozen=True)
class Spoil(Method):
    """Multiplies the loss of some clients by NaN, from a round on."""

    client: int = 1
    every: bool = False
    since: int = 1
    owns: ClassVar[frozenset[str]] = frozenset({"base"})

    def client_state(self, run: Run) -> Tensors:
        return {"spoil.visits": torch.zeros(1)}

    def plan(self, visit: Visit, rng: np.random.Generator) -> Draws:
        bad = (self.every or visit.client == self.client) and visit.round >= self.since
        return {"spoil.factor": np.full((visit.steps, 1), np.nan if bad else 1.0, np.float32)}

    def base(self, step: Step) -> Tensor:
        return super().base(step) * step.draw("spoil.factor")[0]

    def end(self, visit: Visit) -> None:
        visit.state["spoil.visits"] += 1


@dataclass(frozen=True)
class Fail(Method):
    """Raises an exception at one client, at a place of choice."""

    client: int = 1
    place: str = "begin"

    def plan(self, visit: Visit, rng: np.random.Generator) -> Draws:
        return {"fail.here": np.full((visit.steps, 1), visit.client == self.client)}

    def begin(self, visit: Visit) -> None:
        self._maybe("begin", visit.client)

    def gradient(self, step: Step) -> None:
        if self.place == "gradient" and bool(step.draw("fail.here")[0]):
            raise ValueError("broken in gradient\nwith a second line")

    def end(self, visit: Visit) -> None:
        self._maybe("end", visit.client)

    def _maybe(self, place: str, client: int) -> None:
        if place == self.place and client == self.client:
            raise ValueError(f"broken in {place}\nwith a second line")


@dataclass(frozen=True)
class Die(Method):
    """Kills its own process in the middle of a visit: at the first try, or at every one."""

    flag: str = ""
    client: int = 1
    parent: int = 0
    always: bool = False

    def plan(self, visit: Visit, rng: np.random.Generator) -> Draws:
        return {"die.here": np.full((visit.steps, 1), visit.client == self.client)}

    def gradient(self, step: Step) -> None:
        if os.getpid() == self.parent or not bool(step.draw("die.here")[0]) or int(step.counter) != 1:
            return
        if self.always or not Path(self.flag).exists():
            Path(self.flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Median(Method):
    """The coordinate-wise median of the clients' updates."""

    owns: ClassVar[frozenset[str]] = frozenset({"combine"})

    def combine(self, updates: Tensor, weights: Tensor) -> Tensor:
        return updates.double().quantile(0.5, dim=0)


@dataclass(frozen=True)
class Count(Method):
    """Asks for the label counts after the last round and puts their shares into the head's bias."""

    factor: float = 1.0
    exchanges: ClassVar[tuple[str, ...]] = ("count",)

    def answer(self, exchange: str, visit: Visit) -> Tensors:
        seen = sum(len(labels) for _, labels in visit.batches(7))
        return {"labels": visit.label_counts, "seen": torch.tensor([seen])}

    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        final.weights["head.bias"].copy_(self.factor * total["labels"] / total["seen"])


@dataclass(frozen=True)
class Twice(Count):
    """A second question, whose effect depends on the first one's."""

    exchanges: ClassVar[tuple[str, ...]] = ("twice",)

    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        final.weights["head.bias"].mul_(2)


@dataclass(frozen=True)
class Echo(Method):
    """Asks after the last round for what the server sent."""

    exchanges: ClassVar[tuple[str, ...]] = ("echo",)

    def server_state(self, run: Run) -> Tensors:
        return {"echo.round": torch.zeros(1)}

    def aggregate(self, round: Round) -> None:
        round.server["echo.round"] += 1

    def send(self, server: Tensors) -> Tensors:
        return {"echo.round": server["echo.round"]}

    def answer(self, exchange: str, visit: Visit) -> Tensors:
        return {"heard": visit.sent["echo.round"]}

    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        final.weights["head.bias"].copy_(total["heard"])


@dataclass(frozen=True)
class Guess(Method):
    """Answers with numbers from torch's own generator, as a few steps with dropout would."""

    exchanges: ClassVar[tuple[str, ...]] = ("guess",)

    def answer(self, exchange: str, visit: Visit) -> Tensors:
        return {"guess": torch.rand(4)}

    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        final.weights["head.bias"].copy_(total["guess"])


@dataclass(frozen=True)
class Near(Method):
    """Keeps features close to those of the received model and of the client's last one, as MOON does."""

    strength: float = 0.5
    copies: ClassVar[tuple[str, ...]] = ("near.received", "near.last")

    def client_state(self, run: Run) -> Tensors:
        return {"near.last": torch.zeros(run.layout.total), "near.been": torch.zeros(1)}

    def begin(self, visit: Visit) -> None:
        visit.copies["near.received"].copy_(visit.model)
        visit.copies["near.last"].copy_(visit.state["near.last"] if visit.state["near.been"] else visit.model)

    def loss(self, step: Step) -> Tensor:
        terms = [(step.features - step.copies[c](step.inputs).features).square().mean() for c in self.copies]
        return self.strength * (terms[0] + 2 * terms[1])

    def end(self, visit: Visit) -> None:
        visit.state["near.last"].copy_(visit.model)
        visit.state["near.been"].fill_(1)


@dataclass(frozen=True)
class Answers(Method):
    """Answers with what is no answer, or returns what should be changed in place."""

    answer_: str = "tensor"
    finish_: bool = False
    owns: ClassVar[frozenset[str]] = frozenset({"final"})
    exchanges: ClassVar[tuple[str, ...]] = ("answers",)

    def answer(self, exchange: str, visit: Visit) -> Tensors:
        given: dict[str, Any] = {"none": None, "number": {"n": 1.0}, "tensor": {"n": torch.ones(1)}}
        given["uneven"] = {"n": torch.ones(1 + visit.client)}
        return given[self.answer_]

    def finish(self, exchange: str, total: Tensors, final: Final) -> Any:
        return final.weights if self.finish_ else None


@dataclass(frozen=True)
class Remembers(Method):
    """Fills a frozen copy in each visit, and asks each client for its mean after the last round."""

    copies: ClassVar[tuple[str, ...]] = ("remembers",)
    owns: ClassVar[frozenset[str]] = frozenset({"final"})
    exchanges: ClassVar[tuple[str, ...]] = ("remembers",)

    def begin(self, visit: Visit) -> None:
        visit.copies["remembers"] = visit.model + visit.client

    def answer(self, exchange: str, visit: Visit) -> Tensors:
        return {"mean": (visit.client + 1) * visit.copies["remembers"].mean(), "model": visit.model.mean()}

    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        final.report |= {name: float(value) for name, value in total.items()}


@dataclass(frozen=True)
class Teacher(Method):
    """Keeps the logits close to those of a frozen copy, which it fills or leaves as it is."""

    fill: bool = False
    copies: ClassVar[tuple[str, ...]] = ("teacher",)

    def begin(self, visit: Visit) -> None:
        if self.fill:
            visit.copies["teacher"].copy_(visit.model)

    def loss(self, step: Step) -> Tensor:
        return (step.logits - step.copies["teacher"](step.inputs).logits).square().mean()


@dataclass(frozen=True)
class Place(Method):
    """Gives the head one of the policies."""

    policy: str = "home"

    def share(self, network: Network) -> dict[str, Policy]:
        return {n: Policy(self.policy) for n in ("head.weight", "head.bias")}


@dataclass(frozen=True)
class Mix(Method):
    """Mixes each sample with its opposite in the batch, with another weight in each step."""

    def plan(self, visit: Visit, rng: np.random.Generator) -> Draws:
        return {"mix.weight": np.linspace(0.6, 0.9, visit.steps, dtype=np.float32)[:, None]}

    def batch(self, step: Step) -> None:
        weight = step.draw("mix.weight")[0]
        hot = one_hot(step.labels, step.run.classes).float()
        step.inputs = weight * step.inputs + (1 - weight) * step.inputs.flip(0)
        step.soft = weight * hot + (1 - weight) * hot.flip(0)


@dataclass(frozen=True)
class Ascend(Method):
    """FedSAM: the gradient at a point a little uphill."""

    rho: float = 0.05

    def around(self, step: Step, inner: Callable[[], None]) -> None:
        inner()
        up = step.grad * (self.rho / (step.grad.norm() + 1e-12))
        step.weights.add_(up)
        step.grad.zero_()
        inner()
        step.weights.sub_(up)


@dataclass(frozen=True)
class Noise(Method):
    """Adds drawn noise to the gradient."""

    def plan(self, visit: Visit, rng: np.random.Generator) -> Draws:
        size = visit.weights.numel()
        return {"noise.g": rng.normal(0, 0.01, (visit.steps, size)).astype(np.float32)}

    def gradient(self, step: Step) -> None:
        step.grad.add_(step.draw("noise.g"))


@dataclass(frozen=True)
class Extend(Method):
    """Adds a layer the way everybody writes it, with PyTorch's own initialisation."""

    def build(self, network: Network, classes: int, rng: np.random.Generator) -> None:
        network.head = nn.Sequential(nn.Linear(network.width, 8), nn.Linear(8, classes))


@dataclass(frozen=True)
class Remember(Method):
    """Keeps something that it never announced in ``client_state``."""

    def end(self, visit: Visit) -> None:
        visit.state["remember.me"] = torch.tensor([float(visit.client)])


@dataclass(frozen=True)
class Shout(Method):
    """Sends a vector under a name that the engine uses too."""

    def send(self, server: Tensors) -> Tensors:
        return {"weights": torch.full((3,), 7.0)}

    def gradient(self, step: Step) -> None:
        step.grad.mul_(step.sent["weights"][0] / 7)


@dataclass(frozen=True)
class Alias(Median):
    """Hands out the very buffer it was given."""

    def end(self, visit: Visit) -> None:
        visit.update = visit.shared(visit.weights)

    def aggregate(self, round: Round) -> None:
        round.update = round.update - round.weights


@dataclass(frozen=True)
class Stop(Method):
    """Interrupts the run when a certain round is judged, once."""

    flag: str = ""
    round: int = 2
    error: str = "interrupt"
    place: str = "evaluated"

    def server_state(self, run: Run) -> Tensors:
        return {"stop.round": torch.zeros(1)}

    def aggregate(self, round: Round) -> None:
        round.server["stop.round"] += 1
        if self.place == "aggregate":
            self._maybe(round.server)

    def evaluated(self, server: Tensors) -> Tensor | None:
        if self.place == "evaluated":
            self._maybe(server)
        return None

    def _maybe(self, server: Tensors) -> None:
        if int(server["stop.round"]) == self.round and not Path(self.flag).exists():
            Path(self.flag).touch()
            raise KeyboardInterrupt if self.error == "interrupt" else ValueError("broken at the server")


@dataclass(frozen=True)
class Explode(Method):
    """A server step that gives infinity in one round, after it has changed its state."""

    round: int = 2
    flag: str = ""

    def server_state(self, run: Run) -> Tensors:
        return {"explode.rounds": torch.zeros(1)}

    def aggregate(self, round: Round) -> None:
        round.server["explode.rounds"] += 1
        if round.number == self.round and not Path(self.flag).exists():
            Path(self.flag).touch()
            round.update = round.update * float("inf")
