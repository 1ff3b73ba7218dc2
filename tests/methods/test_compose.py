"""Methods joined by ``+``: the text form, who may go with whom, and the order of the hooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import isofed
from isofed import spec
from isofed.errors import UserError
from isofed.layout import Policy
from isofed.methods import Composition, Method, Step, find, names, parse
from isofed.methods.fedavgm import FedAvgM
from isofed.methods.fedprox import FedProx
from tests.engine.plain import distance, small

SERVERS = ("fedavgm", "fedadam", "fedyogi", "fedadagrad", "feddyn")


def values_of(hint: Any, limits: Mapping[str, float]) -> st.SearchStrategy[Any]:
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if type(None) in get_args(hint):
        return st.none() | values_of(next(a for a in get_args(hint) if a is not type(None)), limits)
    largest = limits.get("at_most", 0.9999 * limits.get("below", 1e12))
    numbers = st.floats(1e-12, largest)
    return {bool: st.booleans(), float: numbers, int: st.integers(1, 10**9)}.get(hint, st.just("auto"))


@st.composite
def compositions(draw: Any) -> list[Method]:
    chosen = draw(
        st.lists(st.sampled_from([n for n in names() if n != "central"]), min_size=1, max_size=4, unique=True)
    )
    made: list[Method] = []
    for name in chosen:
        cls = find(name)[1]
        hints = get_type_hints(cls)
        fields = [f for f in dataclasses.fields(cls) if draw(st.booleans())]
        method = cls(**{f.name: draw(values_of(hints[f.name], f.metadata)) for f in fields})
        guarded = any(m.guards for m in [*made, method]) and any(m.extras or m.exchanges for m in [*made, method])
        clash = any(method.owns & other.owns or set(method.exchanges) & set(other.exchanges) for other in made)
        if not guarded and not clash:
            made.append(method)
    return made


@settings(max_examples=100, deadline=None)
@given(compositions())
def test_any_composition_survives_text_and_yaml(methods: list[Method]) -> None:
    composition = parse(methods)
    assert [m for _, m in composition.parts] == methods
    assert parse(str(composition)).parts == composition.parts
    assert parse(composition.to_yaml()).parts == composition.parts
    written = yaml.safe_load(yaml.safe_dump(composition.to_yaml()))
    assert parse(written).parts == composition.parts
    for entry in composition.to_yaml():  # every hyper-parameter is spelled out
        name, options = next(iter(entry.items())) if isinstance(entry, dict) else (entry, {})
        assert list(options) == [spec.option(f) for f in dataclasses.fields(find(name)[1])]


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("fedavg", "fedavg"),
        ("FedProx: mu = 1e-2 + FEDBN", "fedprox+fedbn"),
        ("fedprox:0.5", "fedprox:mu=0.5"),
        ("fedavgm:momentum=0.5,damped=yes+fedprox", "fedavgm:momentum=0.5,damped=true+fedprox"),
        ("fedprox:mu=1e+5+fednova", "fedprox:mu=100000+fednova"),
        ("fedprox:mu=1e+20+fednova", "fedprox:mu=1e+20+fednova"),
        ("scaffold:option=1", "scaffold:option=1"),
        ("fedadam:v0=0", "fedadam:v0=0"),
        ("fedadam:v0=none", "fedadam"),
    ],
)
def test_texts(text: str, printed: str) -> None:
    assert str(parse(text)) == printed
    assert parse(printed).parts == parse(text).parts


def test_yaml_text_and_objects_are_the_same() -> None:
    wanted = (("fedprox", FedProx(0.1)), ("fedavgm", FedAvgM(0.5, True)))
    for given_ in (
        "fedprox:mu=0.1+fedavgm:0.5,true",
        [{"fedprox": {"mu": 0.1}}, {"fedavgm": {"momentum": 0.5, "damped": True}}],
        {"fedprox": {"mu": 0.1}, "fedavgm": {"momentum": 0.5, "damped": True}},
        ["fedprox:0.1", "fedavgm:damped=true,momentum=0.5"],
        [FedProx(0.1), FedAvgM(0.5, True)],
        [FedProx(0.1), "fedavgm:momentum=0.5,damped=true"],
    ):
        assert parse(given_).parts == wanted
    assert parse(FedProx(0.1)).parts == wanted[:1]
    composition = parse("fedprox")
    assert parse(composition) is composition


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fedadam+fedavgm", "'fedadam' and 'fedavgm' both decide the server step; use one of them"),
        ("fedprox+feddyn+fedyogi", "'feddyn' and 'fedyogi' both decide the server step"),
        ("fedprox+fedavg+fedprox:mu=1", "'fedprox' appears twice in the method 'fedprox+fedavg+fedprox'"),
        ("fedprox+FedProx", "appears twice"),
        ("central+fedprox", "'central' trains on the pooled data without a federation, so it cannot be combined"),
        ("fedprx", "there is no method 'fedprx': did you mean 'fedprox'? `isofed methods` lists all"),
        ("fedprox+scafold", "there is no method 'scafold': did you mean 'scaffold'?"),
        ("fedavgm:momentun=1", "there is no option of method 'fedavgm' called 'momentun': did you mean 'momentum'?"),
        ("fedprox:my=1", "there is no option of method 'fedprox' called 'my'. Known: mu"),
        ("fedprox:mu=big", "mu of method 'fedprox' must be a number, not 'big'"),
        ("fedprox:1,2", "method 'fedprox' takes 1 option, '2' is one too many"),
        ("fedavg:1", "method 'fedavg' takes 0 options"),
        ("fedavg:x=1", "method 'fedavg' has no options, so 'x' means nothing to it"),
        ("scaffold:option=3", "option of method 'scaffold' must be one of 1, 2, not '3'"),
        ("fedavgm:damped=perhaps", "damped of method 'fedavgm' must be true or false"),
        ("", "has an empty part"),
        ("fedprox++fedbn", "has an empty part"),
        ("nowhere.py:Mine", "needs the file"),
    ],
)
def test_mistakes_are_one_sentence(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "fedprox:mu=-1", "fedavgm:momentum=1.5", "fedavgm:momentum=-0.1", "fedadam:beta1=1", "fedadam:beta2=2",
        "fedadam:tau=0", "fedadam:lr=0", "fedadam:v0=-1", "feddyn:alpha=-0.1", "scaffold:lr=-1", "fedprox:mu=inf",
    ],
)  # fmt: skip
def test_hyper_parameters_out_of_range_are_refused_before_any_work(text: str) -> None:
    # DESIGN: a wrong value is one clear sentence that says what would be right, before any work starts.
    with pytest.raises(UserError):
        small(method=text)


# Hooks


def recorder(name: str, log: list[str]) -> Method:
    class Recorder(Method):
        def around(self, step: Step, inner: Callable[[], None]) -> None:
            log.append(f"{name} in")
            inner()
            log.append(f"{name} out")

        def gradient(self, step: Step) -> None:
            log.append(f"{name} gradient")

        def loss(self, step: Step) -> torch.Tensor | None:
            log.append(f"{name} loss")
            return None

        def begin(self, visit: Any) -> None:
            log.append(f"{name} begin")

    Recorder.__name__ = name
    return Recorder()


def test_hooks_run_in_order_and_the_rightmost_wrapper_is_outermost() -> None:
    log: list[str] = []
    small(method=[recorder("a", log), recorder("b", log)], clients=1, partition="iid", local_steps=1,
          local_epochs=None, rounds=1).fit()  # fmt: skip
    assert log == [
        "a begin",
        "b begin",
        "b in",
        "a in",
        "a loss",
        "b loss",
        "a out",
        "b out",
        "a gradient",
        "b gradient",
    ]


def test_added_losses_add_up() -> None:
    class Term(Method):
        factor: ClassVar[float] = 0.5

        def loss(self, step: Step) -> torch.Tensor:
            return self.factor * step.logits.square().mean()

    class Another(Term):
        factor: ClassVar[float] = 0.25

    class Both(Term):
        factor: ClassVar[float] = 0.75

    two, one = small(method=[Term(), Another()]).fit(), small(method=Both()).fit()
    assert distance(two.weights, one.weights) < 1e-6
    assert distance(one.weights, small().fit().weights) > 1e-3


@pytest.mark.parametrize("what", ["client_state", "server_state", "send"])
def test_two_parts_cannot_use_the_same_name(what: str) -> None:
    def make(name: str) -> Method:
        hook = {what: lambda self, given_: {"shared.name": torch.zeros(1)}}
        return type(name, (Method,), hook)()

    composition = parse([make("A"), make("B")])
    with pytest.raises(UserError, match="two parts of 'a\\+b' use the same name 'shared.name'"):
        getattr(composition, what)(None)


def test_two_parts_cannot_draw_under_the_same_name() -> None:
    import numpy as np

    def make(name: str, key: str) -> Method:
        draws = {"plan": lambda self, visit, rng: {key: rng.random((visit.steps, 1), dtype=np.float32)}}
        return type(name, (Method,), draws)()

    for parts in ([make("A", "x"), make("B", "x")], [make("A", "order")], [make("A", "augment.flip")]):
        with pytest.raises((isofed.UserError, isofed.RunError), match="name"):  # "order" is the engine's own
            small(method=parts, rounds=1, augment="flip").fit()


def test_two_parts_cannot_disagree_about_a_tensor() -> None:
    def make(name: str, policy: Policy) -> Method:
        return type(name, (Method,), {"share": lambda self, network: {"head.bias": policy}})()

    with pytest.raises(UserError, match="disagree about the tensor 'head.bias': home and fixed"):
        small(method=[make("A", Policy.HOME), make("B", Policy.FIXED)])
    small(method=[make("A", Policy.HOME), make("B", Policy.HOME)], rounds=1)


def test_two_parts_cannot_ask_the_same_question() -> None:
    def make(name: str) -> Method:
        return type(name, (Method,), {"exchanges": ("count",)})()

    with pytest.raises(UserError, match="count"):
        parse([make("A"), make("B")])


def test_a_server_owner_may_go_with_everything_else() -> None:
    for name in SERVERS:
        assert isinstance(parse(f"{name}+fedprox+fednova+fedbn"), Composition)


def test_hooks_that_nobody_overrides_are_not_called() -> None:
    composition = parse("fedavg+fedprox")
    assert composition._loss == composition._around == composition._aggregate == []
    assert len(composition._gradient) == 1
