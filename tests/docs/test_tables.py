"""The tables of the documentation and the code say the same."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from isofed import Federation, Method, bench, diagnose, functional, models, privacy_plan, spec
from isofed.config import Settings, show
from isofed.data.augment import AUGMENTATIONS
from isofed.data.partition import KINDS
from isofed.data.sources import SOURCES, source
from isofed.diagnostics.cost import cost
from isofed.explain import places, relative
from isofed.methods import Final, Round, Step, Visit, find, names, parse
from isofed.papers import command as papers
from tests.docs.reading import DOCS, ROOT, blocks, pages, tables

METHODS = DOCS / "methods"


BUILT_IN = [name for name in names() if find(name)[1].__module__.startswith("isofed.")]
FORMULAS = {name: getattr(functional, name) for name in functional.__all__}


def test_every_setting_is_documented_with_its_default() -> None:
    documented = {row[0]: row[1] for table in tables(DOCS / "settings.md", "setting") for row in table}
    defaults = {name: show(name, field.default) for name, field in Settings.model_fields.items()}
    assert documented == defaults | {"out": "a new folder in `runs/"}


def options_of(cls: type) -> dict[str, str]:
    """Options of a choice as they would be typed; one without a default has an empty one."""
    fields = dataclasses.fields(cls)
    return {spec.option(f): "" if f.default is dataclasses.MISSING else spec.show(f.default) for f in fields}


@pages
def test_settings_and_options_that_a_page_names_exist(page: Path) -> None:
    choices = [find(name)[1] for name in BUILT_IN] + [source(name) for name in SOURCES]
    known = {option for cls in [*choices, *KINDS.values(), *AUGMENTATIONS.values()] for option in options_of(cls)}
    known |= {
        *Settings.model_fields,
        "out",
        "seeds",
        "picture",
        "every",
        "at",
        "factor",
    }  # the last three are lr_schedule's
    known |= {f.name for f in dataclasses.fields(papers.Words)}
    known |= {*bench.OWN, *(f.name for f in dataclasses.fields(diagnose.Options)), "figures", "port"}
    known |= set(privacy_plan.OPTIONS)
    known |= set(re.findall(r"^    (\w+): float", page.read_text(encoding="utf-8"), re.MULTILINE))  # of examples
    inline = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    named = {key for text in inline for key in re.findall(r"(?<![\w.])([a-z_0-9]+)=(?!=)", text)}
    python = {"dataset", "mean", "std", "at_least", "above", "at_most", "below"}  # arguments of calls
    python |= {argument for function in FORMULAS.values() for argument in inspect.signature(function).parameters}
    assert named - known - python - {"key"} == set()


def facts(page: Path) -> dict[str, str]:
    """What a method's page says in its list, by the bold word that an item begins with, each on one line."""
    items = re.findall(r"^- \*\*([\w ]+):\*\* (.*(?:\n  .*)*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(dict(items)) == len(items)
    return {key: " ".join(value.split()) for key, value in items}


def test_the_table_of_costs_is_what_running_them_gives() -> None:
    (rows,) = tables(DOCS / "methods.md", "cost of")
    base = cost("fedavg")
    assert rows == [[name, *relative(cost(name), base)] for name in BUILT_IN]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_method_has_a_page_with_its_options_and_places(name: str) -> None:
    page = METHODS / f"{name}.md"
    cls, text, said = find(name)[1], page.read_text(encoding="utf-8"), facts(page)
    assert text.startswith(f"# `{name}`\n")
    (*rows,) = (row for table in tables(page, "option") for row in table)
    assert [row[:2] for row in rows] == [[option, default] for option, default in options_of(cls).items()]
    assert rows or said["Options"].startswith("none")
    assert re.findall(r"`(\w+)`", said["Acts at"]) == places(cls)
    owned, _, given_up = said.get("Owns", "").partition(";")
    assert set(re.findall(r"`(\w+)`", owned)) == cls().owns
    assert all(f"`{how}`" in given_up and f"`{what}`" in given_up for what, how in cls.leaves.items())
    assert [need for need in cls.needs if need not in said.get("Needs", "")] == []
    assert {"Acts at", "Costs", "Helps", "Does not help"} <= said.keys()
    assert name == "central" or cls.paper in said["Source"].replace("*", "")
    assert name == "central" or {"As in the paper", "As in the papers"} & said.keys()
    assert any(block.language in ("console", "python") for block in blocks(page)), "there is nothing to try"


def test_every_method_is_listed_once_and_no_page_is_about_another() -> None:
    assert sorted(page.stem for page in METHODS.glob("*.md")) == sorted(BUILT_IN)
    listed = [row for table in tables(DOCS / "methods.md", "method") for row in table]
    assert sorted(row[0] for row in listed) == sorted(f"[`{name}`](methods/{name}.md)" for name in BUILT_IN)
    for name, row in zip((row[0].split("`")[1] for row in listed), listed, strict=True):
        assert set(re.findall(r"\w+", row[2])) == find(name)[1]().owns
    ((*owners,),) = tables(DOCS / "methods.md", "owner of")
    for what, _, parts in owners:
        assert set(re.findall(r"`(\w+)`", parts)) == {name for name in BUILT_IN if what in find(name)[1]().owns}


def test_the_compositions_of_the_papers_can_be_made() -> None:
    rows = [row for title in ("paper", "row") for table in tables(DOCS / "methods.md", title) for row in table]
    written = [text for row in rows for cell in row for text in re.findall(r"`([^`]+)`", cell)]
    assert len(written) > 30
    for text in written:
        parse(text)


def test_every_formula_is_documented_with_its_arguments() -> None:
    rows = [row for kind in ("function", "result") for table in tables(DOCS / "functional.md", kind) for row in table]
    documented = {row[0].partition("(")[0]: row[0].rstrip(")").partition("(")[2].split(", ") for row in rows}
    assert documented == {name: list(inspect.signature(made).parameters) for name, made in FORMULAS.items()}
    code = "\n".join(line for block in blocks(DOCS / "functional.md") for line in block.body)
    assert [name for name, made in FORMULAS.items() if not isinstance(made, type) and f"F.{name}(" not in code] == []


def test_every_network_is_documented() -> None:
    listed = {name for row in next(tables(DOCS / "networks.md", "model")) for name in re.findall(r"[\w-]+", row[0])}
    assert listed == set(models.names())


def test_every_split_and_source_is_documented_with_its_options() -> None:
    page = DOCS / "own-data.md"
    ((*rows,),) = tables(page, "partition")
    documented = {row[0]: dict(re.findall(r"(\w+)(?:=([\w.]+))?", row[1])) for row in rows}
    assert documented == {name: options_of(kind) for name, kind in KINDS.items()}
    ((*rows,),) = tables(page, "data")
    for row in rows:
        assert dict(re.findall(r"(\w+)=([\w.]+)", row[-1])) == options_of(source(row[0]))
    ((*rows,),) = tables(page, "option")
    assert {row[0]: row[1] for row in rows} == options_of(source("folder")) == options_of(source("domain-folder"))
    ((*rows,),) = tables(page, "column")
    assert [*options_of(source("table"))] == ["size", "channels", *(row[0] for row in rows), "suffix"]
    ((*published,),) = tables(DOCS / "data-sets.md", "data")
    for row in published:
        assert dict(re.findall(r"(\w+)=([\w.]+)", row[-1])) == options_of(source(row[0]))
    text = page.read_text(encoding="utf-8")
    own = set(SOURCES) - {row[0] for row in published}
    assert all(f"`{name}`" in text or f"{name}:" in text or f"data={name}" in text for name in own)
    assert all(f"`{name}" in text for name in AUGMENTATIONS)


def test_every_place_of_a_method_is_documented() -> None:
    page = DOCS / "own-method.md"
    hooks = {row[0].partition("(")[0] for table in tables(page, "hook") for row in table}
    facts = {row[0] for table in tables(page, "class variable") for row in table}
    public = {name: value for name, value in vars(Method).items() if not name.startswith("_")}
    assert hooks == {name for name, value in public.items() if callable(value)}
    assert facts == set(public) - hooks
    for table in tables(page, "hook"):
        for row in table:
            name, _, arguments = row[0].rstrip(")").partition("(")
            code = public[name].__code__
            assert arguments.split(", ") == list(code.co_varnames[1 : code.co_argcount])


@pytest.mark.parametrize(("word", "cls"), [("step", Step), ("visit", Visit), ("round", Round), ("final", Final)])
def test_what_a_method_is_told_to_find_is_there(word: str, cls: type) -> None:
    page = DOCS / "own-method.md"
    (rows,) = tables(page, f"`{word}.`")
    listed = {name for row in rows for name in re.findall(r"(\w+)(?:\([^)]*\))?`?(?:,|$)", row[0])}
    known = {*cls.__annotations__, *(name for name in vars(cls) if not name.startswith("_"))}
    inline = set(re.findall(rf"\b{word}\.(\w+)", page.read_text(encoding="utf-8")))
    assert (listed | inline) - known == set()
    assert word != "final" or listed == known


def test_every_field_of_the_metrics_is_documented() -> None:
    documented = set(re.findall(r"\w+", " ".join(row[0] for t in tables(DOCS / "runs.md", "field") for row in t)))
    small: dict[str, Any] = {
        "data": "synthetic:samples=200,test=50,domains=2",
        "partition": "domain",
        "rounds": 1,
        "local_epochs": 1,
    }
    methods = ("fedavg", "fedbn", "fedbn+gaussian")
    written = {key for method in methods for key in Federation(method=method, **small).fit().history[0]}
    assert documented == written


def test_the_readme_names_the_demo_and_the_tests_as_they_are() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    demo = re.search(r"^DEMO +\?= ((?:.*\\\n)*.*)", makefile, re.MULTILINE)
    assert demo
    wanted = ["isofed", "compare", *demo[1].replace("\\\n", " ").split()]
    assert wanted in [" ".join(block.body).replace("\\", " ").split() for block in blocks(ROOT / "README.md")]
    assert "\nmake demo\n" in readme and "\nmake test\n" in readme
    assert re.search(r"^demo:", makefile, re.MULTILINE) and re.search(r"^test:", makefile, re.MULTILINE)
