"""What a method of one's own assigns counts as much as what it changes in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from isofed import Method
from isofed.errors import BadMethod
from isofed.methods import Step
from tests.engine.plain import distance, small


@dataclass(frozen=True)
class Corrects(Method):
    """Corrects the gradient as the test says."""

    how: Callable[[Step], None] = field(default=lambda step: None)

    def gradient(self, step: Step) -> None:
        self.how(step)


def _assigned(step: Step) -> None:
    step.grad = step.grad + 0.1 * step.weights


def _added(step: Step) -> None:
    step.grad += 0.1 * step.weights


def _in_place(step: Step) -> None:
    step.grad.add_(0.1 * step.weights)


@pytest.mark.parametrize("how", [_assigned, _added])
@pytest.mark.parametrize("more", [{}, {"momentum": 0.9, "clip": 1.0}])
def test_a_gradient_that_is_assigned_counts(how: Callable[[Step], None], more: dict[str, Any]) -> None:
    wanted = small(method=Corrects(_in_place), **more).fit().weights
    assert distance(small(method=Corrects(how), **more).fit().weights, wanted) == 0
    assert distance(small(**more).fit().weights, wanted) > 0


def _set(name: str, value: Callable[[Step], Any]) -> Callable[[Step], None]:
    return lambda step: setattr(step, name, value(step))


@pytest.mark.parametrize(
    ("how", "same"),
    [
        (_set("weights", lambda step: 0.9 * step.weights), lambda step: step.weights.mul_(0.9)),
        (_set("lr", lambda step: 0.5 * step.lr), lambda step: step.lr.mul_(0.5)),  # in each step anew
    ],
)
def test_so_do_the_weights_and_the_learning_rate(how: Callable[[Step], None], same: Callable[[Step], None]) -> None:
    wanted = small(method=Corrects(same)).fit().weights
    assert distance(small(method=Corrects(how)).fit().weights, wanted) == 0
    assert distance(small().fit().weights, wanted) > 0


def said_by(method: Method) -> str:
    with pytest.raises(BadMethod) as caught:
        small(method=method, rounds=1).fit()
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (_set("grad", lambda step: step.grad[:3]), "]; it cannot become [3] (test_assigned.py, line "),
        (_set("grad", lambda step: None), "]; it cannot become a NoneType (test_assigned.py, line "),
        (_set("lr", lambda step: 0.1), "step.lr is a tensor of shape []; it cannot become a float"),
    ],
)
def test_what_cannot_take_the_place_is_refused(how: Callable[[Step], None], said: str) -> None:
    assert said in said_by(Corrects(how))
