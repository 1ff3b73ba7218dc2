"""Presets: what to run for each table and figure of the papers, read from the YAML files beside this module.

A preset is a list of *blocks*; a block is every combination of its data sets, settings and methods, and each
combination is a *cell*. What a name stands for is written once, in the paper's ``base.yaml``:

- ``common``: settings of every cell
- ``datasets``, ``terms``, ``methods``: settings that a data set, a part of a setting (``alpha=0.1;E=20`` has two) or a
  method brings; ``*`` in a term stands for any text and is put in for ``*`` in its values
- ``methods_on``: what a method is on one of the data sets, where that differs
- ``variants``: changes to any of these under another name, such as ``paper`` where the default follows public code
- ``about``: what a reader must know, of the paper's presets, of one, or of a variant

A preset may change any of them for itself. Later ones win: common, data set, terms, method, block; and within each of
these the paper's, the preset's, the variant's.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from isofed.errors import UserError, unknown
from isofed.papers.published import PAPERS, Published, rows

FOLDER = Path(__file__).parent
PARTS = ("common", "datasets", "terms", "methods", "methods_on")
DEFAULT = "default"


@dataclass(frozen=True)
class Cell:
    """One thing to run: a row of a table on one of its data sets and settings."""

    paper: str  # feduv
    preset: str  # table1
    dataset: str
    setting: str
    method: str  # as the paper names it
    variant: str
    values: Mapping[str, Any] = field(repr=False)  # settings of the run, as for isofed.config.settings
    measures: Mapping[str, str] = field(repr=False)  # the published setting's text, and what is measured for it
    rows: Mapping[str, Published] = field(repr=False)  # the published numbers, by the same text
    diagnose: Mapping[str, Any] = field(repr=False)  # options of ``isofed diagnose``; empty: nothing to diagnose
    figure: Mapping[str, Any] = field(repr=False, default_factory=dict)  # what of its diagnostics is kept
    also: tuple[str, ...] = ()  # measures that other tables need of the same run
    after: str | None = None  # the method with the same training, from whose last round this one only differs

    keys: dict[Any, str] = field(repr=False, compare=False, default_factory=dict)  # of its jobs, once they are known

    def __str__(self) -> str:
        variant = "" if self.variant == DEFAULT else f" ({self.variant})"
        return f"{self.dataset} {self.setting} {self.method}{variant}"


@dataclass(frozen=True)
class Preset:
    """A table or a figure."""

    paper: str
    name: str  # table1, figure2
    title: str
    about: str
    seeds: int
    cells: tuple[Cell, ...] = field(repr=False)  # of the default variant
    variants: Mapping[str, tuple[Cell, ...]] = field(repr=False)  # those cells that another variant changes
    explained: Mapping[str, str] = field(repr=False, default_factory=dict)  # what a variant changes, in words
    reference: str = "FedAvg"  # what times are relative to

    def __str__(self) -> str:
        return f"{PAPERS[self.paper]} {self.name[:-1] if self.name[-1].isdigit() else self.name} {_number(self.name)}"

    def of(self, variant: str) -> tuple[Cell, ...]:
        """The cells of a variant."""
        if variant == DEFAULT:
            return self.cells
        if variant not in self.variants:
            raise unknown(f"variant of {self.paper} {self.name}", variant, [DEFAULT, *self.variants])
        return self.variants[variant]


def _number(name: str) -> str:
    return re.sub(r"\D", "", name)


def names(paper: str) -> list[str]:
    """The presets of a paper, tables first, by number."""
    if paper not in PAPERS:
        raise unknown("paper", paper, PAPERS)
    found = [path.stem for path in (FOLDER / paper).glob("*.yaml") if path.stem != "base"]
    return sorted(found, key=lambda name: (not name.startswith("table"), int(_number(name))))


def every() -> Iterator[Preset]:
    """All presets of all papers."""
    for paper in PAPERS:
        for name in names(paper):
            yield load(paper, name)


def load(paper: str, name: str) -> Preset:
    """One preset, by paper and table or figure; ``t1`` and ``1`` stand for ``table1``, ``f2`` for ``figure2``."""
    known = names(paper)
    short = re.fullmatch(r"(t|f|tab|fig)?(\d+)", name.lower())
    if short and name not in known:
        name = f"{'figure' if (short[1] or 't').startswith('f') else 'table'}{short[2]}"
    if name not in known:
        raise unknown(f"table or figure of {paper}", name, known)
    return _load(paper, name)


@cache
def _load(paper: str, name: str) -> Preset:
    text, base = _read(FOLDER / paper / f"{name}.yaml"), _base(paper)
    variants = _merged(base.get("variants", {}), text.get("variants", {}))
    cells = tuple(_cells(paper, name, text, [base, text], DEFAULT))
    changed = {}
    for variant, change in variants.items():
        made = _cells(paper, name, text, [base, text, change], variant)
        differ = tuple(b for a, b in zip(cells, made, strict=True) if dict(a.values) != dict(b.values))
        if differ:
            changed[variant] = differ
    seeds = int(text.get("seeds", base.get("seeds", 1)))
    explained = {variant: _about(variants[variant]) for variant in changed}
    return Preset(paper, name, text["title"], _about(text), seeds, cells, changed, explained)


def about(paper: str) -> str:
    """What is to be known about all presets of a paper: what they follow where it is silent or public code differs."""
    return _about(_base(paper))


def _about(said: Mapping[str, Any]) -> str:
    return " ".join(str(said.get("about", "")).split())


@cache
def _base(paper: str) -> dict[str, Any]:
    own = _read(FOLDER / paper / "base.yaml")
    if "base" not in own:
        return own
    other = _base(own["base"])
    return {**other, **own, **{part: _merged(other.get(part, {}), own.get(part, {})) for part in (*PARTS, "variants")}}


def _read(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return read


def _merged(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    """Both, the second one's values in place of the first one's, mappings joined one level down."""
    out = dict(one)
    for key, value in two.items():
        before = out.get(key)
        out[key] = {**before, **value} if isinstance(value, Mapping) and isinstance(before, Mapping) else value
    return out


def _cells(
    paper: str, name: str, text: Mapping[str, Any], layers: Sequence[Mapping[str, Any]], variant: str
) -> Iterator[Cell]:
    """All cells of a preset, with what the layers say, later ones over earlier ones."""
    for block in text["blocks"]:
        for dataset, setting, method in itertools.product(block["datasets"], block["settings"], block["methods"]):
            said = _method(method, dataset, block, layers)
            after = said.pop("after", None)
            values: dict[str, Any] = {}
            for layer in layers:
                values |= layer.get("common", {})
            values |= _known(layers, "datasets", dataset, paper, name)
            for term in setting.split(";"):
                values |= _term(layers, term, paper, name)
            values |= {**said, **block.get("common", {})}
            measures = {
                key.replace("{setting}", setting): measure
                for key, measure in block.get("measures", {"{setting}": "accuracy"}).items()
            }
            place = (PAPERS[paper], f"T{_number(name)}" if name.startswith("table") else "", dataset)
            found = {key: rows()[*place, key, method] for key in measures if (*place, key, method) in rows()}
            diagnose, kept = block.get("diagnose", text.get("diagnose", {})), text.get("figure", {})
            also = tuple(layers[0].get("also", ()))
            yield Cell(
                paper, name, dataset, setting, method, variant, values, measures, found, diagnose, kept, also, after
            )


def _method(method: str, dataset: str, block: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a method's name stands for: the text of a method, and settings of its own."""
    own = block["methods"] if isinstance(block["methods"], Mapping) else {}
    of_layers = [(layer.get("methods", {}), layer.get("methods_on", {}).get(dataset, {})) for layer in layers]
    (plain, special), *later = of_layers
    said: dict[str, Any] = {}
    for given in (plain, special, *itertools.chain(*later), own):
        if method in given:
            said |= {"method": given[method]} if isinstance(given[method], str) else given[method]
    return said


def _known(layers: Sequence[Mapping[str, Any]], part: str, key: str, paper: str, name: str) -> dict[str, Any]:
    found = [layer[part][key] for layer in layers if key in layer.get(part, {})]
    if not found:
        raise UserError(f"the preset {paper}/{name}.yaml speaks of '{key}', which none of the {part} explain")
    return {k: v for values in found for k, v in values.items()}


def _term(layers: Sequence[Mapping[str, Any]], term: str, paper: str, name: str) -> dict[str, Any]:
    """What a part of a setting says: by its own name, or by one with ``*`` that fits."""
    for layer in reversed(layers):
        for pattern, values in layer.get("terms", {}).items():
            head, star, tail = pattern.partition("*")
            if term == pattern or (star and term.startswith(head) and term.endswith(tail)):
                word = term[len(head) : len(term) - len(tail)]
                return {k: v.replace("*", word) if star and isinstance(v, str) else v for k, v in values.items()}
    return _known(layers, "terms", term, paper, name)
