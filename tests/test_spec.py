"""The text form of choices: what is read, what is printed, and what is said about mistakes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from isofed.errors import UserError
from isofed.spec import Choice, convert, describe, make, parse, parse_one, several, show, to_yaml


@dataclass(frozen=True)
class Thing:
    strength: float = 0.5
    count: int = 3
    loud: bool = False
    mode: Literal["near", "far", 7] = "near"
    start: float | None = None
    label: str = "x"


@dataclass(frozen=True)
class Needy:
    alpha: float
    beta: int = 1


@dataclass(frozen=True)
class Bare:
    pass


WORDS = st.text("abcdefghijklmnopqrstuvwxyzABC_-./0123456789", min_size=1, max_size=12).filter(
    lambda w: w.lower() != "none" and ".py:" not in w and not re.search("[0-9.]e$", w, re.IGNORECASE)
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=True)
THINGS = st.builds(
    Thing,
    strength=NUMBERS,
    count=st.integers(-(2**53), 2**53),
    loud=st.booleans(),
    mode=st.sampled_from(["near", "far", 7]),
    start=st.none() | NUMBERS,
    label=WORDS,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(THINGS, min_size=1, max_size=3), st.booleans())
def test_any_values_survive_the_text(things: list[Thing], full: bool) -> None:
    text = "+".join(str(describe(t, "thing", full)) for t in things)
    choices = parse(text, "thing")
    assert [make(Thing, c, "thing") for c in choices] == things


@settings(max_examples=100, deadline=None)
@given(st.lists(THINGS, min_size=1, max_size=3), st.booleans())
def test_any_values_survive_yaml(things: list[Thing], full: bool) -> None:
    written = yaml.safe_dump(to_yaml(tuple(describe(t, "thing", full) for t in things)))
    choices = parse(yaml.safe_load(written), "thing")
    assert [make(Thing, c, "thing") for c in choices] == things


def test_whole_numbers_of_any_size_are_kept() -> None:
    # 2^53 + 1 is the first one that a float cannot hold.
    assert convert(str(2**53 + 1), int, "count") == 2**53 + 1
    assert convert(2**60 + 1, int, "count") == 2**60 + 1


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a", [Choice("a")]),
        (" a + b ", [Choice("a"), Choice("b")]),
        ("a:x=1", [Choice("a", (("x", "1"),))]),
        ("a: x = 1 , y = 2", [Choice("a", (("x", "1"), ("y", "2")))]),
        ("a:0.1", [Choice("a", (("", "0.1"),))]),
        ("a:0.1,y=2+b:3", [Choice("a", (("", "0.1"), ("y", "2"))), Choice("b", (("", "3"),))]),
        ("a:x=1e+5+b", [Choice("a", (("x", "1e+5"),)), Choice("b")]),
        ("a:x=2E+5,y=1e-3+b", [Choice("a", (("x", "2E+5"), ("y", "1e-3"))), Choice("b")]),
        ("a:x=v2e+b", [Choice("a", (("x", "v2e"),)), Choice("b")]),
        ("a:x=1.e+5+b", [Choice("a", (("x", "1.e+5"),)), Choice("b")]),
        ("my/file.py:Class", [Choice("my/file.py:Class")]),
        ("my/file.py:Class:x=1,2", [Choice("my/file.py:Class", (("x", "1"), ("", "2")))]),
        ("a+my/file.py:Class:x=1+b", [Choice("a"), Choice("my/file.py:Class", (("x", "1"),)), Choice("b")]),
        ("a:", [Choice("a")]),
        (["a", {"b": {"x": 1}}, {"c": None}, {"d": 0.5}, "e:y=2"],
         [Choice("a"), Choice("b", (("x", 1),)), Choice("c"), Choice("d", (("", 0.5),)), Choice("e", (("y", "2"),))]),
        ({"b": {"x": 1}}, [Choice("b", (("x", 1),))]),
    ],
)  # fmt: skip
def test_what_is_read(text: Any, wanted: list[Choice]) -> None:
    assert list(parse(text, "thing")) == wanted


@pytest.mark.parametrize("given", ["", " ", "a+", "+a", "a++b", ":x=1", None, 3, [], [3], [["a"]], [{"a": 1, "b": 2}]])
def test_what_cannot_be_read_is_one_sentence(given: Any) -> None:
    with pytest.raises(UserError) as caught:
        parse(given, "thing")
    assert "thing" in str(caught.value) and "\n" not in str(caught.value)


def test_one_choice_and_no_more() -> None:
    assert parse_one("a:1", "thing") == Choice("a", (("", "1"),))
    with pytest.raises(UserError, match="takes one choice, not 2"):
        parse_one("a+b", "thing")


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (False, "false"), (None, "none"), (0.01, "0.01"), (1e-05, "1e-05"), (3, "3"), (1.0, "1"),
     (0.1 + 0.2, "0.30000000000000004"), (math.inf, "inf"), (1e300, "1e+300"), ("near", "near")],
)  # fmt: skip
def test_values_are_shown_as_they_are_typed(value: Any, text: str) -> None:
    assert show(value) == text


@pytest.mark.parametrize(
    ("text", "thing"),
    [
        ("t", Thing()),
        ("t:0.25", Thing(strength=0.25)),
        ("t:0.25,4", Thing(strength=0.25, count=4)),
        ("t:count=4,0.25", Thing(strength=0.25, count=4)),
        ("t:loud=yes", Thing(loud=True)),
        ("t:loud=off", Thing(loud=False)),
        ("t:loud=TRUE,mode=FAR", Thing(loud=True, mode="far")),
        ("t:mode=7", Thing(mode=7)),
        ("t:start=none", Thing()),
        ("t:start=2", Thing(start=2.0)),
        ("t:count=1e3", Thing(count=1000)),
        ("t:strength=inf", Thing(strength=math.inf)),
    ],
)
def test_options_become_fields(text: str, thing: Thing) -> None:
    made = make(Thing, parse_one(text, "thing"), "thing")
    assert made == thing
    assert [type(v) for v in vars(made).values()] == [type(v) for v in vars(thing).values()]


@pytest.mark.parametrize(
    ("cls", "text", "said"),
    [
        (Thing, "t:strenght=1", "there is no option of thing 't' called 'strenght': did you mean 'strength'?"),
        (Thing, "t:count=1.5", "count of thing 't' must be a whole number, not '1.5'"),
        (Thing, "t:count=many", "must be a whole number, not 'many'"),
        (Thing, "t:count=inf", "must be a whole number"),
        (Thing, "t:count=", "must be a whole number"),
        (Thing, "t:strength=strong", "strength of thing 't' must be a number, not 'strong'"),
        (Thing, "t:strength=nan", "must be a number"),
        (Thing, "t:loud=maybe", "must be true or false, not 'maybe'"),
        (Thing, "t:mode=middle", "must be one of near, far, 7, not 'middle'"),
        (Thing, "t:start=x", "must be a number, not 'x'"),
        (Thing, "t:strength=1,strength=2", "got 'strength' twice"),
        (Thing, "t:1,2,true,far,none,x,7", "takes 6 options, '7' is one too many"),
        (Bare, "t:1", "takes 0 options, '1' is one too many"),
        (Bare, "t:x=1", "has no options, so 'x' means nothing to it"),
        (Needy, "t", "needs alpha: write 't:alpha=...'"),
        (Needy, "t:beta=2", "needs alpha"),
    ],
)
def test_mistakes_are_named(cls: type, text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        make(cls, parse_one(text, "thing"), "thing")
    assert said in str(caught.value)


def test_yaml_truth_is_not_a_number() -> None:
    for field in ("strength", "count"):
        with pytest.raises(UserError, match="must be a"):
            make(Thing, Choice("t", ((field, True),)), "thing")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0.1, 0.2,,0.3", ["0.1", "0.2", "0.3"]),
        ("none,crop:1,crop:2,pad=reflect", ["none", "crop:1", "crop:2,pad=reflect"]),
        ("mlp,nets.py:simple", ["mlp", "nets.py:simple"]),
        ("iid,dirichlet:0.5", ["iid", "dirichlet:0.5"]),
        ("dirichlet:alpha=0.5, min=5", ["dirichlet:alpha=0.5,min=5"]),
        ("dirichlet:0.5,iid", ["dirichlet:0.5,iid"]),  # as crop:4,reflect: what follows may be an option
        ("crop:4+flip,crop:2+flip", ["crop:4+flip", "crop:2+flip"]),
        (",", []),
    ],
)
def test_several_values(text: str, values: list[str]) -> None:
    assert several(text) == values


def test_describing_leaves_out_defaults_but_not_what_is_required() -> None:
    assert str(describe(Thing(), "t")) == "t"
    assert str(describe(Thing(count=4, start=0.0), "t")) == "t:count=4,start=0"
    assert str(describe(Needy(1.0), "t")) == "t:alpha=1"
    assert to_yaml((describe(Needy(1.0), "t", full=True), Choice("u"))) == [{"t": {"alpha": 1.0, "beta": 1}}, "u"]
