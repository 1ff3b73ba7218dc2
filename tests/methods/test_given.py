"""What a method of one's own may give back, and how it is told what it may not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from isofed import Method
from isofed.data import Dataset, Part
from isofed.engine.slots import Slots
from isofed.engine.workers import Pool
from isofed.engine.world import World
from isofed.errors import BadMethod, UserError
from isofed.federation import Federation
from isofed.functional.precision import nothing
from isofed.layout import Policy, Tensors
from isofed.methods import Final, Round, Run, Step, Visit
from isofed.models import Network
from isofed.plugins import shorten
from tests.engine.own import BOTH, own
from tests.engine.own_methods import HERE
from tests.engine.plain import distance, small


@dataclass(frozen=True)
class Adds(Method):
    """Adds a term of the test's."""

    term: Callable[[Step], Any] = field(default=lambda step: None)

    def loss(self, step: Step) -> Tensor | None:
        return self.term(step)


@dataclass(frozen=True)
class Base(Method):
    """Has a base loss of the test's."""

    term: Callable[[Step], Any] = field(default=lambda step: None)
    owns = frozenset({"base"})

    def base(self, step: Step) -> Tensor:
        return self.term(step)


def far(step: Step) -> Tensor:
    """A pull as a loss, on vectors, which have no graph."""
    return (step.shared(step.weights) - step.shared(step.start)).square().sum()


def said_by(method: Method) -> str:
    with pytest.raises(BadMethod) as caught:
        small(method=method, rounds=1).fit()
    return str(caught.value)


@pytest.mark.parametrize("term", [far, lambda step: torch.zeros(()), lambda step: step.logits.detach().mean()])
def test_a_loss_that_trains_nothing_is_refused(term: Callable[[Step], Any]) -> None:
    said = said_by(Adds(term))
    assert said.startswith("the loss of 'adds' does not depend on the network's outputs, so it trains nothing")
    assert "change step.grad in `gradient` instead" in said
    assert said_by(Base(term)).startswith("the base loss of 'base' does not depend on the network's outputs")


@pytest.mark.parametrize(
    ("term", "said"),
    [
        (lambda step: step.logits, "must be one number, not [16, 4]: take its mean or its sum"),
        (lambda step: step.logits.mean(1), "must be one number, not [16]"),
        (lambda step: step.logits.sum().view(1), "must be one number, not [1]"),
        (lambda step: 0.5, "must be a tensor of one number, not a float"),
    ],
)
def test_a_loss_of_another_form_is_refused(term: Callable[[Step], Any], said: str) -> None:
    assert f"the loss of 'adds' {said}" in said_by(Adds(term))
    assert f"the base loss of 'base' {said}" in said_by(Base(term))


@pytest.mark.parametrize(
    "term",
    [
        lambda step: None,
        lambda step: nothing(step.features),
        lambda step: 0.0 * step.logits.sum(),
        lambda step: 0.0 * sum(p.sum() for p in step.network.parameters()),
    ],
)
def test_a_term_that_is_zero_is_fine(term: Callable[[Step], Any]) -> None:
    assert distance(small(method=Adds(term)).fit().weights, small().fit().weights) == 0


@dataclass(frozen=True)
class Frozen(Method):
    """Leaves the head alone to be trained."""

    def share(self, network: Network) -> dict[str, Policy]:
        return {name: Policy.FIXED for name, _ in network.named_parameters() if not name.startswith("head.")}


def test_where_the_encoder_is_frozen_a_term_on_its_features_is_not_the_methods_mistake() -> None:
    term = Adds(lambda step: step.features.square().mean())
    assert distance(small(method=[Frozen(), term]).fit().weights, small(method=Frozen()).fit().weights) == 0


def test_a_loss_of_ones_own_still_trains() -> None:
    own = small(method=Base(lambda step: cross_entropy(step.logits, step.targets)))
    assert distance(own.fit().weights, small().fit().weights) == 0
    assert distance(small(method=Adds(lambda step: step.logits.square().mean())).fit().weights, own.fit().weights) > 0


def test_slots_refuse_it_too() -> None:
    made = small(method=Adds(far)).world
    of = World(made.settings.model_copy(update={"slots": 2}), made.dataset, made.parts, made.clients)
    run = small(method=Adds(far))
    jobs, _ = run._sample(1)
    with pytest.raises(BadMethod, match="trains nothing"):
        list(Slots(of, torch.device("cpu")).train(jobs, run.state.weights, {}, lambda client: None))


# States


@dataclass(frozen=True)
class States(Method):
    """Declares what the test says."""

    client: Any = field(default_factory=dict)
    server: Any = field(default_factory=dict)

    def client_state(self, run: Any) -> Any:
        return self.client

    def server_state(self, run: Any) -> Any:
        return self.server


@pytest.mark.parametrize("whose", ["client", "server"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mine.x": 1.0}, "must hold tensors, and 'mine.x' is a float: write torch.tensor(...)"),
        (torch.zeros(3), "must be a dict of named tensors, not a Tensor"),
        (None, "must be a dict of named tensors, not None"),
        ({"isofed.home": torch.zeros(1)}, "has a name 'isofed.home'; use a text that begins with the method's name"),
    ],
)
def test_a_state_that_is_none_is_refused_before_any_work(whose: str, given: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        small(method=States(**{whose: given}))
    assert f"the {whose} state of 'states' {said}" in str(caught.value)


# Classes and objects given in Python


class Misspelt(Method):
    def los(self, step: Step) -> Tensor:
        return step.logits.mean()


class Undecorated(Method):
    strength: float = 0.5

    def gradient(self, step: Step) -> None:
        step.grad.mul_(self.strength)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (Misspelt(), "'Misspelt' has a 'los' that nothing calls: did you mean 'loss'?"),
        (["fedprox", Misspelt()], "'Misspelt' has a 'los' that nothing calls"),
        (Undecorated(), "'Undecorated' has options (strength) but lacks @dataclass(frozen=True) above it"),
        (Adds, "Adds is a class: give an object of it, method=Adds()"),
        (["fedprox", Adds], "Adds is a class: give an object of it"),
    ],
)
def test_objects_are_checked_like_files(method: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        Federation(method=method)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"exchanges": "abc"}, "'facts' has exchanges = 'abc', which is one text: write exchanges = ('abc',)"),
        ({"copies": "teacher"}, "'facts' has copies = 'teacher', which is one text: write copies = ('teacher',)"),
        ({"needs": "features"}, "which is one text: write needs = ('features',)"),
        ({"owns": "head"}, "which is one text: write owns = frozenset({'head'})"),
        ({"host": (3,)}, "host of 'facts' must be a tuple of texts, not (3,)"),
        ({"extras": None}, "extras of 'facts' must be a tuple of texts, not None"),
        ({"guards": frozenset({"extra"})}, "no place that 'facts' could have in `guards` called 'extra': did you mean"),
        ({"answer": lambda self, exchange, visit: {}}, "'facts' writes answer() but asks no question; add ex"),
        ({"finish": lambda self, exchange, total, final: None}, "'facts' writes finish() but asks no question; add ex"),
    ],
)
def test_facts_about_a_class_that_would_quietly_mean_something_else_are_refused(
    facts: dict[str, Any], said: str
) -> None:
    body = {"gradient": lambda self, step: None, **facts}
    made: type[Method] = dataclass(frozen=True)(type("Facts", (Method,), body))
    with pytest.raises(UserError) as caught:
        small(method=made())
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("place", "changed"),
    [
        ("begin", "visit.state"),
        ("batch", "step.inputs"),
        ("gradient", "step.grad"),
        ("end", "visit.update"),
        ("upload", "visit.update"),
        ("aggregate", "round.update"),
    ],
)
def test_what_is_given_back_where_nobody_takes_it_is_refused(place: str, changed: str) -> None:
    made: type[Method] = dataclass(frozen=True)(type("Returns", (Method,), {place: lambda self, given: torch.zeros(3)}))
    made.__dict__[place].__name__ = place
    said = said_by(made())
    assert (
        said
        == f"{place}() of 'returns' returns a Tensor, which goes nowhere: change {changed} instead, and return nothing"
    )


@dataclass(frozen=True)
class Builds(Method):
    """Does with the network what the test says."""

    how: Callable[[Network], Any] = field(default=lambda network: None)

    def build(self, network: Network, classes: int, rng: np.random.Generator) -> Any:
        return self.how(network)


def test_what_build_gives_back_is_refused_before_any_work() -> None:
    with pytest.raises(BadMethod) as caught:
        small(method=Builds(lambda network: network))
    said = "build() of 'builds' returns a Network, which goes nowhere: change the network instead, and return nothing"
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (nn.Linear(64, 7), "gives 7 outputs for a picture, and there are 4 classes"),
        (nn.Linear(63, 4), "fails on a picture of the shape (1, 8, 8): RuntimeError: "),
    ],
)
def test_a_network_is_looked_at_again_when_it_was_built_on(head: nn.Module, said: str) -> None:
    with pytest.raises(UserError) as caught:
        small(method=["fedprox", Builds(lambda network: setattr(network, "head", head))])
    assert f"the network after build() of 'builds' {said}" in str(caught.value)


def test_who_owns_the_head_may_replace_what_another_built() -> None:
    small(method=["spherefed", Builds(lambda network: setattr(network, "head", nn.Linear(64, 7)))], rounds=1).fit()


@dataclass(frozen=True)
class SendsANumber(Method):
    """Sends a plain number."""

    def end(self, visit: Visit) -> None:
        visit.sum["sends.number"] = 3.0  # type: ignore[assignment]


def test_what_a_client_sends_must_be_tensors() -> None:
    assert said_by(SendsANumber()).startswith("visit.sum['sends.number'] must be a tensor, not a float: write torch.te")


@dataclass(frozen=True)
class SendsMoreAndMore(Method):
    """Sends as many numbers as a client has samples of its commonest class."""

    place: str = "sum"

    def end(self, visit: Visit) -> None:
        getattr(visit, self.place)["sends.some"] = torch.ones(int(visit.label_counts.max()) + visit.client)


@pytest.mark.parametrize("place", ["sum", "mean"])
def test_what_clients_send_must_have_one_shape(place: str) -> None:
    said = said_by(SendsMoreAndMore(place))
    assert said.startswith(f"visit.{place}['sends.some'] must have the same shape at every client, not [")


@dataclass(frozen=True)
class Draws(Method):
    """Plans what the test says."""

    drawn: Callable[[Visit], Any] = field(default=lambda visit: {})

    def plan(self, visit: Visit, rng: np.random.Generator) -> Any:
        return self.drawn(visit)

    def loss(self, step: Step) -> Tensor | None:
        return None


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        (lambda visit: None, "must return a dict of named arrays, not None; without draws an empty one"),
        (lambda visit: {"a": torch.zeros(visit.steps)}, "must return NumPy arrays, and 'a' is a Tensor"),
        (lambda visit: {"a": np.zeros(())}, "and 'a' is a single number"),
        (lambda visit: {"a": np.zeros(visit.steps + 2)}, "must return a row for each of the visit's"),
    ],
)
def test_a_plan_has_a_row_for_each_step(drawn: Callable[[Visit], Any], said: str) -> None:
    told = said_by(Draws(drawn))
    assert told.startswith("plan() of 'draws' ") and said in told


@dataclass(frozen=True)
class Server(Method):
    """Does at the server what the test says."""

    does: Callable[[Round], None] = field(default=lambda round: None)

    def server_state(self, run: Run) -> Tensors:
        return {"server.seen": torch.zeros(1)}

    def aggregate(self, round: Round) -> None:
        self.does(round)


def _shorter(round: Round) -> None:
    round.update = round.update[:3]


def _number(round: Round) -> None:
    round.update = 3.0  # type: ignore[assignment]


def _new_state(round: Round) -> None:
    round.server["mine"] = torch.zeros(2)


def _larger_state(round: Round) -> None:
    round.server["server.seen"] = round.update.clone()


def _plain_state(round: Round) -> None:
    round.server["server.seen"] = round.number  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (_shorter, r"aggregate\(\) of 'server' must leave \[\d+\] numbers in round.update, not \[3\]"),
        (_number, r"aggregate\(\) of 'server' must leave \[\d+\] numbers in round.update, not a float"),
        (_new_state, r"changes which names round.server has: 'mine' belongs into server_state\(\)"),
        (
            _larger_state,
            r"leave a tensor of \[1\] in round.server\['server.seen'\], as server_state\(\) declares, not o",
        ),
        (_plain_state, r"leave a tensor of \[1\] in round.server\['server.seen'\], as .* declares, not an int"),
    ],
)
def test_the_server_keeps_its_update_and_its_names(does: Callable[[Round], None], said: str) -> None:
    assert re.search(said, said_by(Server(does)))


@dataclass(frozen=True)
class Leaves(Method):
    """Leaves another update than there was."""

    at: str = "end"
    left: Callable[[Tensor], Any] = field(default=lambda update: update)

    def end(self, visit: Visit) -> None:
        if self.at == "end":
            visit.update = self.left(visit.update)

    def upload(self, visit: Visit) -> None:
        if self.at == "upload":
            visit.update = self.left(visit.update)


@pytest.mark.parametrize("at", ["end", "upload"])
@pytest.mark.parametrize(
    ("left", "found"),
    [
        (lambda update: update.norm(), "[]"),  # which would be added to each of the weights
        (lambda update: update[:1], "[1]"),
        (lambda update: update[:10], "[10]"),
        (lambda update: None, "None"),
    ],
)
def test_an_update_of_another_size_is_refused(at: str, left: Callable[[Tensor], Any], found: str) -> None:
    said = said_by(Leaves(at, left))
    assert re.fullmatch(
        rf"{at}\(\) of 'leaves' must leave \[\d+\] numbers in visit.update, not {re.escape(found)}", said
    )


def test_an_update_of_the_same_size_counts() -> None:
    assert distance(small(method=Leaves(left=lambda update: update + 0)).fit().weights, small().fit().weights) == 0


@dataclass(frozen=True)
class Rebuilds(Method):
    """Changes what the network is made of while a client is there."""

    how: Callable[[Visit], Any] = field(default=lambda visit: None)

    def begin(self, visit: Visit) -> None:
        self.how(visit)

    def end(self, visit: Visit) -> None:
        for hook in HOOKS:
            hook.remove()


HOOKS: list[Any] = []  # which are taken away again


def _parameter(visit: Visit) -> None:
    head: Any = visit.network.head
    head.weight = nn.Parameter(torch.zeros_like(head.weight))


@pytest.mark.parametrize(
    "how",
    [
        _parameter,
        lambda visit: setattr(visit.network, "head", nn.Linear(64, 4)),
        lambda visit: visit.network.register_forward_hook(lambda *all: None),
        lambda visit: visit.network.head.register_forward_pre_hook(lambda *all: None),
    ],
)
def test_what_would_stay_in_the_network_is_refused(how: Callable[[Visit], Any]) -> None:
    said = said_by(Rebuilds(how))
    assert said.startswith("'rebuilds' has replaced a layer or a parameter of the network, or left a hook in it")


def test_what_does_not_stay_is_fine() -> None:
    def hooked(visit: Visit) -> None:
        HOOKS.append(visit.network.register_forward_hook(lambda *all: None))

    assert distance(small(method=Rebuilds(hooked)).fit().weights, small().fit().weights) == 0


@dataclass(frozen=True)
class Reports(Method):
    """Reports at the end what the test says, or changes the network."""

    value: Any = 1.0
    key: Any = "figure"
    head: nn.Module | None = None
    owns = frozenset({"final"})
    exchanges = ("reports",)

    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        final.report[self.key] = self.value
        if self.head is not None:
            final.network.head = self.head


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (Reports(torch.ones(2)), "must hold numbers, and 'figure' is a Tensor"),
        (Reports(torch.ones(())), "must hold numbers, and 'figure' is a Tensor: take float(...) of it"),
        (Reports("much"), "must hold numbers, and 'figure' is a str"),
        (Reports(1, "bytes_up"), "cannot have the name 'bytes_up'; use another text"),
        (Reports(1, 3), "cannot have the name 3; use another text"),
    ],
)
def test_a_report_holds_numbers(method: Method, said: str) -> None:
    assert said_by(method) == f"final.report that finish() of 'reports' fills {said}"


def test_reported_numbers_are_recorded() -> None:
    (line,) = small(method=Reports(0.5), rounds=1).fit().exchanges
    assert line["figure"] == 0.5 and line["bytes_up"] == 0


def test_a_network_that_is_rebuilt_at_the_end_is_refused() -> None:
    assert said_by(Reports(head=nn.Linear(64, 4))).startswith("'reports' has replaced a layer")


@dataclass(frozen=True)
class Looks(Method):
    """Counts the batches of a client's own test samples."""

    def end(self, visit: Visit) -> None:
        visit.sum["looks.batches"] = torch.tensor(float(len([*visit.tests(8)])))
        visit.sum["looks.samples"] = torch.tensor(float(sum(len(labels) for _, labels in visit.tests(8))))

    def aggregate(self, round: Round) -> None:
        SEEN.append((float(round.sum["looks.batches"]), float(round.sum["looks.samples"])))


SEEN: list[tuple[float, float]] = []


def test_a_client_without_test_samples_has_no_batch_of_them() -> None:
    """Not one of nothing, whose mean would be no number."""
    rng = np.random.default_rng(0)
    images, where = rng.integers(0, 255, (60, 8, 8, 1), dtype=np.uint8), np.arange(60) // 20
    train, test = (Part(images[:n], np.arange(n) % 4, where[:n] % sites) for n, sites in ((60, 3), (20, 1)))
    dataset = Dataset.build("mine", 4, train, test, domains=["a", "b", "c"])
    given: dict[str, Any] = {"partition": "domain", "model": "mlp", "rounds": 1, "executor": "serial"}
    SEEN.clear()
    Federation(dataset=dataset, method=Looks(), **given).fit()
    assert SEEN == [(3.0, 20.0)]  # all are of the first site


@BOTH
def test_what_a_question_finds_in_copies_is_the_model(executor: str, two_workers: Pool) -> None:
    """And not what the last visit of that process has left there."""
    (line,) = own("Remembers", two_workers, executor, rounds=1).fit().exchanges
    assert line["mean"] == pytest.approx(2.5 * line["model"], rel=1e-6)  # (1 + 2 + 3 + 4) / 4 of the sum


@dataclass(frozen=True)
class Combines(Method):
    """Combines updates as the test says."""

    how: Callable[[Tensor], Any] = field(default=lambda updates: updates.mean(0))
    owns = frozenset({"combine"})

    def combine(self, updates: Tensor, weights: Tensor) -> Tensor:
        return self.how(updates)


@dataclass(frozen=True)
class Receives(Method):
    """Receives and judges as the test says."""

    update: Callable[[Tensor], Any] = field(default=lambda update: update)
    judged: Any = None

    def receive(self, update: Tensor, bound: float | None) -> Tensor:
        return self.update(update)

    def evaluated(self, server: Any) -> Any:
        return self.judged


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (Combines(lambda updates: updates), r"combine\(\) of 'combines' must return \[\d+\] numbers, not \[4, \d+\]"),
        (Combines(lambda updates: None), r"combine\(\) of 'combines' must return \[\d+\] numbers, not None"),
        (Receives(lambda update: None), r"receive\(\) of 'receives' must return \[\d+\] numbers, not None"),
        (Receives(lambda update: update[1:]), r"receive\(\) of 'receives' must return \[\d+\] numbers, not \[\d+\]"),
        (Receives(judged=torch.zeros(3)), r"evaluated\(\) of 'receives' must return \[\d+\] numbers, not \[3\]"),
    ],
)
def test_what_the_server_makes_of_updates_keeps_its_form(method: Method, said: str) -> None:
    assert re.fullmatch(said, said_by(method))


def test_policies_are_given_by_name() -> None:
    made: type[Method] = dataclass(frozen=True)(type("Shares", (Method,), {"share": lambda self, network: None}))
    with pytest.raises(UserError) as caught:
        small(method=made())
    said = "share() of 'shares' must return a dict of policies by name, not None; without any an empty one"
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Answers:answer=none", "what answer() of '{}' returns must be a dict of named tensors, not None"),
        ("Answers:answer=number", "what answer() of '{}' returns must hold tensors, and 'n' is a float: write torch.t"),
        (
            "Answers:answer=uneven",
            "the answer to 'answers' must hold tensors of one shape from all clients, and 'n' has",
        ),
        (
            "Answers:finish=true",
            "finish() of '{}' returns a Places, which goes nowhere: change final.weights instead, and return nothing",
        ),
    ],
)
@BOTH
def test_so_do_answers_and_what_is_made_of_them(name: str, said: str, executor: str, two_workers: Pool) -> None:
    with pytest.raises(BadMethod) as caught:
        own(name, two_workers, executor, rounds=1).fit()
    assert str(caught.value).startswith(said.format(shorten(f"{HERE}:Answers")))
