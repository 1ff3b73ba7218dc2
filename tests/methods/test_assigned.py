"""What a method of one's own assigns counts as much as what it changes in place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from isofed import Method
from isofed.engine.serial import Serial
from isofed.errors import BadMethod
from isofed.layout import Places, Tensors
from isofed.methods import Final, Round, Step, Visit
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


@dataclass(frozen=True)
class Named(Method):
    """Assigns to a name where others change a tensor in place."""

    assigns: bool = True

    copies = ("named.old",)
    owns = frozenset({"final"})
    exchanges = ("named",)

    def _set(self, tensors: Tensors, name: str, value: Tensor) -> None:
        if self.assigns:
            tensors[name] = value
        else:
            tensors[name].copy_(value)

    def begin(self, visit: Visit) -> None:
        self._set(visit.copies, "named.old", 0.5 * visit.model)
        self._set(visit.named(visit.weights), "head.bias", torch.arange(4.0))

    def loss(self, step: Step) -> Tensor:
        return (step.logits - step.copies["named.old"](step.inputs).logits).square().mean()

    def gradient(self, step: Step) -> None:
        named = step.named(step.grad)
        self._set(named, "head.weight", 0.5 * named["head.weight"])

    def aggregate(self, round: Round) -> None:
        self._set(round.named(round.update), "head.bias", torch.ones(4))

    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        self._set(final.weights, "head.weight", 2 * final.weights["head.weight"])


def test_what_is_assigned_to_a_name_counts() -> None:
    assigned, in_place = small(method=Named()).fit(), small(method=Named(assigns=False)).fit()
    assert distance(assigned.weights, in_place.weights) == 0 and assigned.accuracy == in_place.accuracy
    assert distance(small().fit().weights, assigned.weights) > 0


@dataclass(frozen=True)
class Begins(Method):
    """Begins a visit as the test says."""

    how: Callable[[Visit], None] = field(default=lambda visit: None)

    def begin(self, visit: Visit) -> None:
        self.how(visit)


def test_a_client_may_have_a_learning_rate_of_its_own() -> None:
    def slower(visit: Visit) -> None:
        visit.lr = visit.lr / 2

    def still(visit: Visit) -> None:
        visit.lr = 0 if visit.client else visit.lr

    assert distance(small(method=Begins(slower), lr=0.1).fit().weights, small(lr=0.05).fit().weights) == 0
    run = small(method=Begins(still), rounds=1)
    jobs, _ = run._sample(1)
    found = Serial(run.world, run.device).train(jobs, run.state.weights, {}, lambda client: None)
    assert [bool(outcome.update.any()) for outcome in found] == [True, False, False, False]


def test_a_model_that_is_assigned_is_the_one_that_trains() -> None:
    def assigned(visit: Visit) -> None:
        visit.model = 0.5 * visit.model

    def in_place(visit: Visit) -> None:
        visit.model.mul_(0.5)

    wanted = small(method=Begins(in_place)).fit().weights
    assert distance(small(method=Begins(assigned)).fit().weights, wanted) == 0
    assert distance(small().fit().weights, wanted) > 0


def said_by(method: Method) -> str:
    with pytest.raises(BadMethod) as caught:
        small(method=method, rounds=1).fit()
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (_set("grad", lambda step: step.grad[:3]), "]; it cannot become [3] (test_assigned.py, line "),
        (_set("grad", lambda step: None), "]; it cannot become None (test_assigned.py, line "),
        (
            _set("state", lambda step: {}),
            "step.state cannot be replaced, only what is in it can be changed (test_assign",
        ),
        (_set("plan", lambda step: {}), "step.plan cannot be replaced"),
        (_set("network", lambda step: step.network.head), "step.network cannot be replaced"),
        (_set("lr", lambda step: 0.1), "step.lr is a tensor of shape []; it cannot become a float"),
    ],
)
def test_what_cannot_take_the_place_is_refused(how: Callable[[Step], None], said: str) -> None:
    assert said in said_by(Corrects(how))


def _name(tensors: Callable[[Visit], Any], name: str, value: Any) -> Callable[[Visit], None]:
    return lambda visit: tensors(visit).update({name: value})


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda v: setattr(v, "model", v.weights[:2]), "]; it cannot become [2] (test_assigned.py, line "),
        (lambda v: setattr(v, "state", {}), "visit.state cannot be replaced, only what is in it can be changed (t"),
        (_name(lambda v: v.named(v.weights), "head.wieght", None), "no tensor 'head.wieght': did you mean 'head.weigh"),
        (_name(lambda v: v.named(v.weights), "head.bias", None), "the tensor 'head.bias' is a tensor of shape [4]; "),
        (_name(lambda v: v.copies, "old", None), "there is no frozen copy 'old'"),
    ],
)
def test_so_it_is_at_a_visit(how: Callable[[Visit], None], said: str) -> None:
    assert said in said_by(Begins(how))


def test_copies_of_named_tensors_are_of_the_usual_kind() -> None:
    places = Places({"a": torch.zeros(2)}, "tensor")
    for copied in (copy.deepcopy(places), places.copy(), places | {}, pickle.loads(pickle.dumps(places))):
        copied["b"] = torch.ones(1)
        assert type(copied) is dict and "b" not in places
    assert copy.deepcopy(places)["a"] is not places["a"]
