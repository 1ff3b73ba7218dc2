"""``isofed methods``: what there is and what it costs, and one method explained."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from isofed import spec
from isofed.config import is_setting, read_words
from isofed.diagnostics.cost import SIZE, USUAL, Cost, cost
from isofed.display import text_table
from isofed.errors import UserError
from isofed.methods import Method, find, names
from isofed.methods import parse as parse_method
from isofed.plugins import shorten

_WIDE = 130  # characters: below that, the table leaves out what `isofed methods NAME` tells as well
PLACES = (
    *("build", "share", "send", "plan", "begin", "end", "upload", "batch", "base", "loss", "around", "gradient"),
    *("receive", "combine", "aggregate", "evaluated", "answer"),
)


def places(cls: type[Method]) -> list[str]:
    """Where in a round a method acts: the hooks that it writes itself."""
    return [h for h in PLACES if getattr(cls, h) is not getattr(Method, h)] + (["pooled"] if cls.pooled else [])


def methods(console: Console, words: Sequence[str]) -> None:
    """The list of methods, or some explained; settings among the words choose the network to find the cost on."""
    given = [w for w in words if not is_setting(w)]
    values = read_words(w for w in words if is_setting(w))
    if taken := sorted(values.keys() & {"method", "out", "seeds"}):
        raise UserError(f"'{taken[0]}' means nothing here; write: isofed methods NAME model=resnet56")
    for name in given:
        explain(console, name, values)
    if not given:
        overview(console, values)


def overview(console: Console, values: dict[str, Any]) -> None:
    """All methods in a table, with their costs relative to FedAvg's."""
    wide = console.width >= _WIDE
    table = text_table("method", "what it does", *(["paper", "options"] if wide else []))
    for column in ("models", "MACs", "sent", "at end", "state")[: None if wide else 3]:
        table.add_column(column, justify="right", no_wrap=True)
    base = cost("fedavg", **values)
    known = names()
    status = console.status("") if console.is_terminal else nullcontext()
    with status as shown:
        for n, name in enumerate(known):
            if shown is not None:
                shown.update(f"trying out {name}, {n + 1} of {len(known)}")
            _row(table, name, base, values, wide)
    console.print(table)
    console.print(
        "\nCost of a client, found by running each method on a small ResNet (choose another: isofed methods "
        "model=cnn). Models: what a step reads, in models. MACs: multiply-accumulates forwarded in a step, and sent: "
        "bytes both ways in a round, both relative to fedavg. "
        + (
            "At end: sent once after the last round, in models. "
            "State: kept between rounds by a client / by the server, in models.\n"
            if wide
            else f"Papers, options and more costs are shown at a width of {_WIDE} or more.\n"
        )
        + "\nJoin methods with '+': fedprox:mu=0.1+fedbn. `isofed methods NAME` explains one. "
        "Your own: path/to/file.py:Class.",
        highlight=False,
    )


def _row(table: Table, name: str, base: Cost, values: dict[str, Any], wide: bool) -> None:
    cls = find(name)[1]
    says = _plain((inspect.getdoc(cls) or "").split("\n")[0])
    try:
        cells = relative(cost(name, **values), base)
    except UserError:  # not on this network
        cells = ["-"] * 5
    if wide:
        table.add_row(name, says, cls.paper.split(",")[0], _options(cls), *cells)
    else:
        table.add_row(name, says, *cells[:3])


def relative(found: Cost, base: Cost) -> list[str]:
    """Models held, work and traffic relative to another method's, what is sent at the end, and state, in words."""
    size = found.parameters
    state = f"{_models(found.client_state / size)} / {_models(found.server_state / size)}"
    return [
        _models(found.models),
        f"{found.macs / base.macs:.2f}x",
        f"{(found.up + found.down) / (base.up + base.down):.2f}x",
        _models(found.up_finally / size),
        state if found.client_state or found.server_state else "-",
    ]


def _models(count: float) -> str:
    """A number of models: whole where it is, and never a zero for something."""
    if not count:
        return "-"
    if abs(count - round(count)) < 0.005 and round(count):
        return str(round(count))
    return f"{count:.2f}" if count >= 0.005 else "<0.01"


def _options(cls: type[Method]) -> str:
    return ", ".join(f"{spec.option(f)}={spec.show(f.default)}" for f in dataclasses.fields(cls))


def explain(console: Console, name: str, values: dict[str, Any]) -> None:
    """What a method, or each part of a composition, does; and what the whole costs."""
    composition = parse_method(name)
    for part, method in composition.parts:
        cls = type(method)
        console.print(f"[bold]{escape(shorten(part))}[/]", highlight=False)
        console.print(_plain(inspect.getdoc(cls) or ""), highlight=False, markup=False)
        console.print(f"\nacts at: {', '.join(places(cls)) or 'nothing but the plain round'}", highlight=False)
        if method.owns:
            console.print(f"owns:    {', '.join(sorted(method.owns))}", highlight=False)
        if cls.needs:
            console.print(f"needs:   a network with {', '.join(cls.needs)}", highlight=False)
        for f in dataclasses.fields(cls):
            console.print(f"option:  {spec.option(f)} = {spec.show(getattr(method, f.name))}", highlight=False)
            if said := _meaning(cls, f):
                console.print(Padding(Text(said), (0, 0, 0, 9), expand=False))
        if cls.paper:
            console.print(f"paper:   {cls.paper}", highlight=False, markup=False)
        console.print()
    _print_cost(console, cost(composition, **values), values)


def _meaning(cls: type[Method], field: dataclasses.Field[Any]) -> str:
    """What an option is for, and what it may be where that does not say so already."""
    meaning, values = spec.meaning_of(field), spec.values_of(cls, field)
    told = set(re.findall(r"[\w.]+", values)) - {"or"} <= set(re.findall(r"[\w.]+", meaning))
    return "; ".join(filter(None, [meaning, "" if told else values]))


def _plain(doc: str) -> str:
    """A docstring for the terminal: paragraphs that it can wrap, without the marks of code."""
    paragraphs = [" ".join(p.split()) if "\n " not in p else p for p in doc.replace("``", "").split("\n\n")]
    return "\n\n".join(paragraphs)


def _print_cost(console: Console, found: Cost, values: dict[str, Any]) -> None:
    on = str(values.get("model", "resnet8"))
    size = found.parameters
    lines = [
        ("a step", f"{_count(found.passes, 'pass', 'passes')}, {_short(found.macs)} multiply-accumulates a sample"),
        ("", f"reads {_models(found.models)} times the model's {size:,} weights, trains {found.trained:,}"),
        ("a round", f"receives {_bytes(found.down)}, sends {_bytes(found.up)}"),
    ]
    if found.passes_per_round:
        lines.append(("", f"{_count(found.passes_per_round, 'pass', 'passes')} more over the client's data"))
    if found.down_once:
        lines.append(("once", f"receives {_bytes(found.down_once)} at the first visit"))
    if found.up_finally:
        lines.append(("at end", f"receives {_bytes(found.down_finally)}, sends {_bytes(found.up_finally, 8)}"))
    lines.append(("keeps", f"client {_bytes(found.client_state)}, server {_bytes(found.server_state)} between rounds"))
    side = USUAL if "model" in values else SIZE
    data = values.get("data") or f"pictures of {side}x{side}"
    console.print(
        f"cost of a client with {on} on {data} (choose others: model=cnn data=digits)", highlight=False, markup=False
    )
    for what, text in lines:
        console.print(f"{what:<8} {text}", highlight=False, markup=False)


def _count(number: float, one: str, several: str) -> str:
    return f"{number:g} {one if number == 1 else several}"


def _short(number: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return f"{number:.0f}"


def _bytes(numbers: int, each: int = 4) -> str:
    """As they travel: weights have four bytes each, sums of the last questions eight."""
    size = each * numbers
    if not size:
        return "nothing"
    return f"{_short(size)}B" if size >= 1000 else f"{size} B"
