"""What a client remembers: names that are declared, at addresses that stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from isofed import Method
from isofed.engine.state import ClientState
from isofed.engine.workers import Pool
from isofed.errors import BadMethod
from isofed.layout import Tensors
from isofed.methods import Step, Visit
from tests.engine.own import BOTH, own
from tests.engine.plain import small

CPU = torch.device("cpu")


def made() -> ClientState:
    return ClientState({"a.x": torch.zeros(2), "a.n": torch.zeros(1, dtype=torch.int64)}, CPU)


def test_assigning_copies_into_the_tensor_that_is_there() -> None:
    state = made()
    x, n = state["a.x"], state["a.n"]
    given = torch.ones(2)
    state["a.x"] = given
    given.fill_(7)
    state["a.n"] += 3
    state.update({"a.n": state["a.n"] + 1})
    state |= {"a.x": 2 * x}
    assert state["a.x"] is x and x.tolist() == [2, 2]
    assert state["a.n"] is n and n.tolist() == [4]
    assert state.setdefault("a.x", torch.zeros(5)) is x


def test_a_graph_is_not_kept() -> None:
    state = made()
    state["a.x"] = torch.ones(2, requires_grad=True) * 2
    assert not state["a.x"].requires_grad and state["a.x"].tolist() == [2, 2]


def test_what_is_declared_is_copied() -> None:
    mine = torch.zeros(2)
    ClientState({"a.x": mine}, CPU)["a.x"].fill_(1)
    assert mine.tolist() == [0, 0]


def _new(state: ClientState) -> None:
    state["a.y"] = torch.zeros(2)


def _default(state: ClientState) -> None:
    state.setdefault("a.y", torch.zeros(2))


def _longer(state: ClientState) -> None:
    state["a.x"] = torch.zeros(3)


def _number(state: ClientState) -> None:
    state["a.x"] = 1.0


def _gone(state: ClientState) -> None:
    del state["a.x"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_new, "puts 'a.y' into a client's state, which client_state does not declare; it declares a.x, a.n"),
        (_default, "puts 'a.y' into a client's state"),
        (_longer, r"'a.x' is a tensor of shape \[2\]; it cannot become \[3\] \(test_state.py, line \d+, in _longer\)"),
        (_number, r"'a.x' is a tensor of shape \[2\]; it cannot become a float"),
        (_gone, "takes a name out of a client's state"),
        (ClientState.clear, "takes a name out of a client's state"),
    ],
)
def test_names_and_shapes_stay(change: Any, said: str) -> None:
    state = made()
    with pytest.raises(BadMethod, match=said):
        change(state)
    assert list(state) == ["a.x", "a.n"] and state["a.x"].shape == (2,)


@BOTH
def test_a_name_that_was_not_declared_ends_the_run(executor: str, one_worker: Pool) -> None:
    with pytest.raises(BadMethod, match=r"'remember.me' .* \(own_methods.py, line \d+, in Remember.end\)"):
        own("Remember", one_worker, executor).fit()


@dataclass(frozen=True)
class Counts(Method):
    """Counts visits and steps, by assigning or in place."""

    assigns: bool = True

    def client_state(self, run: Any) -> Tensors:
        return {"counts.visits": torch.zeros(1), "counts.steps": torch.zeros(1)}

    def begin(self, visit: Visit) -> None:
        if self.assigns:
            visit.state["counts.visits"] = visit.state["counts.visits"] + 1
        else:
            visit.state["counts.visits"].add_(1)

    def gradient(self, step: Step) -> None:
        step.grad.mul_(1 / step.state["counts.visits"])
        if self.assigns:
            step.state["counts.steps"] = step.state["counts.steps"] + 1
        else:
            step.state["counts.steps"].add_(1)


def test_assigning_is_the_same_as_changing_in_place() -> None:
    one, other = small(method=Counts(True)), small(method=Counts(False))
    weights, wanted = one.fit().weights, other.fit().weights
    assert all(torch.equal(weights[k], wanted[k]) for k in wanted)
    for client, state in one.state.clients.items():
        assert float(state["counts.visits"]) == 2
        assert torch.equal(state["counts.steps"], other.state.clients[client]["counts.steps"])
        assert float(state["counts.steps"]) > 2
