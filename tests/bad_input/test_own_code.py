"""Mistakes in code of one's own: the sentence says where, ``--debug`` shows it, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli_tools import SMALL, complaint, isofed, metrics, succeeds

OWN = '''
from dataclasses import dataclass

import torch

from isofed import Method
from isofed.spec import number


@dataclass(frozen=True)
class Raises(Method):
    """Looks for what is not there."""

    strength: float = number(1.0, at_least=0)

    def loss(self, step):
        return step.logit.mean()


@dataclass(frozen=True)
class Later(Method):
    """Fails in the second round."""

    def begin(self, visit):
        if visit.round == 2:
            torch.zeros(2) @ torch.zeros(3)


@dataclass(frozen=True)
class Server(Method):
    def aggregate(self, round):
        raise IndexError("Target 9 is out of bounds.")


@dataclass(frozen=True)
class Vectors(Method):
    needs = ("features",)

    def loss(self, step):
        return step.shared(step.weights - step.start).square().sum()


@dataclass(frozen=True)
class Wide(Method):
    needs = ("residual blocks",)

    def gradient(self, step):
        step.grad.mul_(0.5)
'''
RUN = ("run", *SMALL, "rounds=2", "executor=serial")
PLACE = "(own.py, line 17, in Raises.loss)"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


@pytest.mark.parametrize("executor", ["serial", "workers"])
def test_the_sentence_says_where_and_debug_shows_it(executor: str, here: Path) -> None:
    words = (*RUN[:-1], f"executor={executor}", "workers=1", "method=own.py:Raises")
    done = isofed(*words, "--debug", cwd=here)
    said = f"client 0 failed with AttributeError: a step has no 'logit' {PLACE}."
    assert done.code == 1 and done.err.splitlines()[-1] == f"isofed: round 1 has no client left to average: {said}"
    assert "return step.logit.mean()" in done.err and f'File "{here / "own.py"}", line 17, in loss' in done.err
    assert not list(here.glob("runs/*"))


def test_a_mistake_at_the_server_has_one_full_stop_and_a_place(here: Path) -> None:
    text = complaint(isofed(*RUN, "method=own.py:Server", cwd=here), 1)  # which no one calls an internal error
    where = "(own.py, line 32, in Server.aggregate)"
    assert f"code of your own failed with IndexError: Target 9 is out of bounds {where}. Run it again" in text


def test_a_mistake_is_not_called_internal_where_a_method_is_explained(here: Path) -> None:
    text = complaint(isofed("methods", "own.py:Raises", cwd=here), 1)
    assert f"code of your own failed with AttributeError: a step has no 'logit' {PLACE}." in text


def test_a_run_that_recorded_nothing_leaves_no_folder_of_its_own_name(here: Path) -> None:
    assert "trains nothing" in complaint(isofed(*RUN, "method=own.py:Vectors", cwd=here), 1)
    assert not list(here.glob("runs/*"))
    isofed(*RUN, "method=own.py:Vectors", "out=asked-for", cwd=here)
    assert (here / "asked-for" / "config.yaml").is_file()
    assert "(own.py, line 26, in Later.begin)" in complaint(isofed(*RUN, "method=own.py:Later", cwd=here), 1)
    [left] = here.glob("runs/*")
    assert len(metrics(left)) == 1  # a round is recorded, from which the run can go on


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("own.py", "there is no method 'own.py': name the class in the file, own.py:Raises or own.py:Later or "),
        ("own:Raises", "there is no method 'own'; the class in the file is written own.py:CLASS"),
        ("own.py:Rises", "there is no method in own.py called 'Rises': did you mean 'Raises'?"),
        ("own.py:Zzz", "there is no method in own.py called 'Zzz'. Known: Later, Raises, Server, Vectors, Wide"),
        ("own.py:Raises:strength=-1", "strength of method 'own.py:Raises' must be at least 0, not -1"),
        ("own.py:Raises:strenth=1", "option of method 'own.py:Raises' called 'strenth'"),
        ("own.py:Raises:strength=x", "strength of method 'own.py:Raises' must be a number, not 'x'"),
        ("own.py:Wide", "'own.py:Wide' drops residual blocks, and this network has none"),
        ("own.py:Wide+own.py:Wide", "'own.py:Wide' appears twice in the method 'own.py:Wide+own.py:Wide'"),
    ],
)
def test_a_method_goes_by_the_name_that_was_typed(method: str, said: str, here: Path) -> None:
    assert said in complaint(isofed(*RUN, f"method={method}", cwd=here), 2)


def test_a_method_is_explained_under_the_name_that_was_typed(here: Path) -> None:
    assert succeeds("methods", "own.py:Wide", cwd=here).startswith("own.py:Wide\n")
