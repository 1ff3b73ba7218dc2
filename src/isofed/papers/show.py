"""A table with paper and measured side by side, on the console."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from isofed.display import duration, fits, show_table, simple_table, text_table
from isofed.federation import Federation
from isofed.papers import compare, presets
from isofed.papers.budget import Telling
from isofed.papers.compare import Entry
from isofed.papers.measure import RATIOS, is_percent
from isofed.papers.plan import Job, Length
from isofed.papers.presets import DEFAULT, Cell, Preset
from isofed.papers.published import PAPERS
from isofed.papers.results import Results
from isofed.papers.tiny import TINY
from isofed.words import many


def number(value: float | None, measure: str) -> str:
    """A measured number as a table has it."""
    if value is None:
        return ""
    if is_percent(measure):
        return f"{value:.1f}"
    return f"{value:.2f}x" if measure in RATIOS else f"{value:.4g}"


def printed(entry: Entry) -> str:
    """What the paper prints; for times, relative to the reference."""
    row = entry.row
    if row is None:
        return ""
    if row.mean is None:
        return row.printed.lower()
    if entry.measure in RATIOS:
        return number(entry.paper, entry.measure)
    if row.std is None:
        return row.printed
    decimals = max(len(text.partition(".")[2]) for text in (row.printed, f"{row.std:g}"))
    return f"{row.printed} ± {row.std:.{decimals}f}"


def here(entry: Entry) -> str:
    """What was measured, with the standard deviation where there are several seeds."""
    if entry.diverged:
        return "diverges" if entry.diverged == len(entry.found) else f"{entry.diverged} of {len(entry.found)} diverge"
    if entry.not_finite:
        some = "" if entry.not_finite == len(entry.found) else f"{entry.not_finite} of {len(entry.found)} "
        return f"{some}not finite"
    mean = number(entry.mean, entry.measure)
    if entry.std is None:
        return mean
    if is_percent(entry.measure) or entry.measure in RATIOS or "e" in mean:
        return f"{mean} ± {number(entry.std, entry.measure)}"
    return f"{mean} ± {entry.std:.{len(mean.partition('.')[2])}f}"  # to the decimals of the mean


def difference(entry: Entry) -> str:
    if entry.difference is None:
        return ""
    if is_percent(entry.measure):
        return f"{entry.difference:+.1f}"
    return f"{entry.difference:+.2f}" if entry.measure in RATIOS else f"{entry.difference:+.3g}"


def verdict(entry: Entry) -> str:
    return {True: "yes", False: "no", None: ""}[entry.within]


def show(
    console: Console,
    preset: Preset,
    results: Results,
    cells: Collection[Cell],
    variant: str = DEFAULT,
    tiny: bool = False,
) -> None:
    """Everything that is known about some cells of a preset; or what a trial at a tiny scale has given."""
    console.print(f"[bold]{escape(str(preset))}[/]: {escape(preset.title)}", highlight=False)
    for length in [Length.of(TINY)] if tiny else compare.lengths(preset, results):
        made = [e for e in compare.entries(preset, results, length, variant) if e.cell in cells]
        _show_length(console, made, length, variant)
    places = {(cell.dataset, cell.setting, cell.method) for cell in cells}
    for one, changes in compare.tried(preset, results):
        c = one.content
        if (c["dataset"], c["setting"], c["method"]) not in places:
            continue
        tried = " ".join(f"{k}={v}" for k, v in changes.items())
        value = number(one.measures.get("accuracy"), "accuracy")
        console.print(
            f"tried: {c['dataset']} {c['setting']} {c['method']} {c['length']} seed {one.seed}, {tried}: {value}",
            highlight=False,
            markup=False,
        )


def _show_cells(console: Console, shown: Sequence[Entry]) -> None:
    """Paper and measured side by side; on a narrow terminal the data set and the setting stand above their methods."""
    numbers = ("paper", "here", "seeds", "difference", "within 2 sd")
    whole, narrow = simple_table("data set", "setting", "method", *numbers), simple_table("method", *numbers)
    for column in whole.columns[1:3]:
        column.justify = "left"
    above = None
    for e in shown:
        seeds = str(len(e.found)) if e.found else ""
        cells = [*map(escape, (printed(e), here(e), seeds)), difference(e), verdict(e)]
        whole.add_row(escape(e.cell.dataset), escape(e.setting), escape(e.cell.method), *cells)
        if above != (e.cell.dataset, e.setting):
            above = e.cell.dataset, e.setting
            narrow.add_row(f"[bold]{escape(' '.join(above))}[/]")
        narrow.add_row(f"  {escape(e.cell.method)}", *cells)
    show_table(console, whole if fits(console, whole, fold=False) else narrow)


def _show_length(console: Console, made: Sequence[Entry], length: Length, variant: str) -> None:
    label = [f"variant {variant}"] if variant != DEFAULT else []
    label += [f"shortened, {length.label}: not comparable with the full length"] if length.label else []
    if label:
        console.print(f"\n[bold]{', '.join(label)}[/]", highlight=False)
    ran = [entry for entry in made if entry.found]
    shown = ran if length.label else made  # what the paper prints is worth seeing before anything is run
    if shown:
        _show_cells(console, shown)
    for order in compare.orders(ran):
        same = f"{order.agreeing} of {order.pairs} pairs agree"
        paper, here = (" > ".join(levels(ranking)) for ranking in (order.paper, order.here))
        text = f"{order.dataset} {order.setting}: paper {paper}; here {here}; {same}"
        console.print(text, highlight=False, markup=False)
    missing = not_run(made)
    if missing and not ran:
        console.print("not run: all of it" if not length.label else "nothing of it was run", highlight=False)
    elif missing:
        console.print("not run: " + "; ".join(missing), highlight=False, markup=False)


def levels(ranking: compare.Ranking) -> list[str]:
    """The methods of a ranking, best first; those with the same number side by side."""
    return [" = ".join(level) for level in ranking]


def not_run(made: Sequence[Entry]) -> list[str]:
    """Data sets and settings with the methods that have no result, in few words."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in made:
        groups.setdefault((entry.cell.dataset, entry.cell.setting), []).append(entry)
    found = []
    for (dataset, setting), group in groups.items():
        methods = dict.fromkeys(e.cell.method for e in group)
        missing = [m for m in methods if not any(e.found for e in group if e.cell.method == m)]
        if missing:
            which = "" if len(missing) == len(methods) else f" {', '.join(missing)}"
            found.append(f"{dataset} {setting}{which}")
    return found


def listing(console: Console, results: Results, papers: Sequence[str] = tuple(PAPERS)) -> None:
    """All presets with what is done of them."""
    table = text_table("preset", "cells", "done", "shortened", "what it shows")
    for column in table.columns[1:4]:
        column.justify = "right"
    for paper in papers:
        for name in presets.names(paper):
            preset = presets.load(paper, name)
            full, some, every = compare.done(preset, results)
            shorter = str(some - full) if some > full else ""
            table.add_row(f"{paper} {name}", str(every), str(full), shorter, preset.title)
    console.print(table)
    console.print(
        "\nRun one:  isofed paper feduv table1 only=cifar100 seeds=3 budget=25m data_root=FOLDER\n"
        "Show one: isofed paper feduv table1 --show",
        highlight=False,
    )


class Progress(Telling):
    """Plain lines: one when a cell begins, a few on its way, one when it is done, with the time that is left."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self._console, self._quiet = console, quiet
        self._number, self._of = 0, 0
        self._costs: list[float] = []
        self._said: set[str] = set()

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def cell(self, number: int, of: int, job: Job) -> None:
        self._number, self._of, self._began, self._section = number, of, time.monotonic(), ""
        self._say(f"[{number}/{of}] {job}: {job.settings.method.shown()}, {many(job.settings.rounds, 'round')}")

    def start(self, run: Federation) -> None:
        self._first, self._rounds, self._told = run.round, run.settings.rounds, time.monotonic()
        self._since = self._told
        if run.round:
            self._say(f"    going on after round {run.round}")

    def round(self, line: dict[str, Any]) -> None:
        now, number = time.monotonic(), int(line["round"])
        if now - self._told < 30 and number % max(1, self._rounds // 5):
            return
        self._told, each = now, (now - self._since) / (number - self._first)
        accuracy = "" if line.get("accuracy") is None else f" accuracy {100 * line['accuracy']:.1f} %,"
        left = duration(each * (self._rounds - number))
        self._say(f"    round {number}/{self._rounds},{accuracy} {each:.2f} s a round, {left} left of this run")

    def diagnosing(self, section: str, done: int, of: int) -> None:
        now = time.monotonic()
        if section != self._section:
            self._section, self._since, self._told = section, now, now
            self._say(f"    measuring: {section}")
        elif now - self._told >= 30 and done:
            self._told = now
            left = duration((now - self._since) * (of - done) / done)
            self._say(f"    measuring: {section}, {100 * done / of:.0f} %, at most {left} left of it")

    def note(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(f"    note: {text}")

    def finished(self, job: Job, measures: Mapping[str, float | None]) -> None:
        self._costs.append(time.monotonic() - self._began)
        left = sum(self._costs) / len(self._costs) * (self._of - self._number)
        more = f"; the other {many(self._of - self._number, 'run')}: about {duration(left)}" if left else ""
        found = ", ".join(f"{name} {value:.4g}" for name, value in measures.items() if value is not None)
        self._say(f"    done in {duration(self._costs[-1])}: {found}{more}")

    def failed(self, job: Job, why: str) -> None:
        self._say(f"    stopped: {why}")

    def left_out(self, data: str, count: int, why: str) -> None:
        self._say(f"left out, {many(count, 'run')} on {data}: {why}")

    def put_off(self, job: Job, needed: float, left: float) -> None:
        still = f"needs about {duration(needed)} more" if needed else "would not end in time"
        self._say(f"put off: {job} {still}, and {duration(max(0.0, left))} are left")
