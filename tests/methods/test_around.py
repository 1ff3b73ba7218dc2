"""Methods around the passes: what they add, and what they ask for in vain."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from isofed import Federation
from isofed.errors import BadMethod
from isofed.methods import Method, Step
from isofed.methods.base import Draws, Visit
from isofed.models.slim import Cut, slim_forward


def federation(method: Method | list[str | Method]) -> Federation:
    data = "synthetic:samples=120,test=40,classes=4,size=8,channels=1"
    return Federation(
        data=data,
        model="cnn",
        norm="none",
        method=method,
        clients=3,
        rounds=2,
        local_epochs=2,
        batch_size=16,
        clip=1.0,
        device="cpu",
    )


@dataclass(frozen=True)
class Before(Method):
    """A pass of its own before the others."""

    def around(self, step: Step, inner: Callable[[], None]) -> None:
        step.add_gradient(0.5 * cross_entropy(step.forward(step.inputs).logits, step.targets))
        inner()


@dataclass(frozen=True)
class After(Method):
    """The same pass after the others."""

    def around(self, step: Step, inner: Callable[[], None]) -> None:
        inner()
        step.add_gradient(0.5 * cross_entropy(step.forward(step.inputs).logits, step.targets))


@dataclass(frozen=True)
class Half(Method):
    """Everything twice, and half of that."""

    def around(self, step: Step, inner: Callable[[], None]) -> None:
        inner()
        inner()
        step.grad.mul_(0.5)


@pytest.mark.parametrize("name", ["fedsam", "gradaug:sizes=none"])
def test_inner_adds_whatever_is_inside(name: str) -> None:
    def weights(*parts: str | Method) -> Tensor:
        run = federation([*parts])
        run.fit()
        return run.state.weights

    torch.testing.assert_close(weights(name, Before()), weights(name, After()), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights(name, Half()), weights(name), rtol=1e-4, atol=1e-5)
    assert float((weights(name, After()) - weights(name)).norm()) > 1e-2


@dataclass(frozen=True)
class Asks(Method):
    """Asks for draws that are not there."""

    host: ClassVar[tuple[str, ...]] = ("asks.listed",)
    wanted: str = "draw"

    def plan(self, visit: Visit, rng: np.random.Generator) -> Draws:
        return {"asks.listed": rng.uniform(size=(visit.steps, 1)), "asks.other": rng.uniform(size=(visit.steps, 1))}

    def around(self, step: Step, inner: Callable[[], None]) -> None:
        inner()
        if self.wanted == "cuts":
            cuts: list[Cut] = []
            step.add_gradient(slim_forward(step.network, step.inputs, 0.5, cuts=cuts).logits.square().mean())
        elif self.wanted == "draw":
            step.draw("asks.nothing")
        else:
            step.known(self.wanted)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("draw", "step.draw('asks.nothing') asks for something that was drawn by no `plan`"),
        ("asks.other", "step.known('asks.other') asks for something that is planned, but not listed in `host`"),
        ("asks.nothing", "step.known('asks.nothing') asks for something that was drawn by no `plan`"),
        ("cuts", "a loss depends on no weight that is trained, so it trains nothing"),
    ],
)
def test_what_is_not_there_is_told_in_a_sentence(wanted: str, said: str) -> None:
    with pytest.raises(BadMethod, match=re.escape(said)):
        federation(Asks(wanted=wanted)).fit()


@dataclass(frozen=True)
class Forgets(Method):
    """Does not call what it is given."""

    own: bool = False

    def around(self, step: Step, inner: Callable[[], None]) -> None:
        if self.own:
            step.add_gradient(cross_entropy(step.forward(step.inputs).logits, step.targets))


@dataclass(frozen=True)
class Skips(Method):
    """Makes no pass in some steps."""

    host: ClassVar[tuple[str, ...]] = ("skips.at",)

    def plan(self, visit: Visit, rng: np.random.Generator) -> Draws:
        return {"skips.at": np.arange(visit.steps) == 1}

    def around(self, step: Step, inner: Callable[[], None]) -> None:
        if not step.known("skips.at"):
            inner()


@dataclass(frozen=True)
class Gives(Method):
    """Returns what it thinks is a loss."""

    def around(self, step: Step, inner: Callable[[], None]) -> Tensor:  # type: ignore[override]
        inner()
        return step.base_loss


@pytest.mark.parametrize(
    ("parts", "who"),
    [
        ([Forgets()], "'forgets'"),
        ([Forgets(own=True)], "'forgets'"),
        ([Skips()], "'skips'"),
        (["fedsam", Forgets()], "'forgets'"),
        ([Forgets(), "fedsam"], "'forgets'"),
        ([Half(), Forgets()], "'half' or 'forgets'"),
    ],
)
def test_a_step_without_a_pass_is_refused(parts: list[str | Method], who: str) -> None:
    said = f"around() of {who} did not call inner(), which trains on the losses of all parts: call it once or more"
    with pytest.raises(BadMethod, match=re.escape(said)):
        federation(parts).fit()


def test_what_around_returns_is_refused() -> None:
    with pytest.raises(BadMethod, match=re.escape("around() of 'gives' returns a Tensor, which goes nowhere")):
        federation(Gives()).fit()
