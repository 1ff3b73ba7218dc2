"""What a person sees while runs go on: live tables on a terminal, a few plain lines anywhere else."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from isofed.engine.world import World
from isofed.experiments import BatchWatcher, Plan
from isofed.federation import Federation
from isofed.result import Result
from isofed.words import many

_BORDER = re.compile(r"(?<=[\s+:,;/])(?=[^\s+:,;/])")  # where a long name may go on in the next line
_FEW = 3  # clients with the same trouble up to which each is named


def percent(value: float | None) -> str:
    """``87.3`` for 0.873; a dash for what is not known."""
    return "-" if value is None else f"{100 * value:.1f}"


def duration(seconds: float) -> str:
    """``4.2 s``, ``42 s``, ``3:05``, ``1:02:03``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 and seconds != whole else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def note(text: str) -> Text:
    """A sentence that a person should know, as it is shown."""
    return Text.assemble(("note: ", "yellow"), text)


def _of_clients(clients: Sequence[int], event: str) -> list[str]:
    """What happened to some clients: a sentence for each of a few, one for all of many."""
    if len(clients) <= _FEW:
        return [f"client {client} {event}" for client in clients]
    return [f"client {clients[0]} {event}; the same of {many(len(clients) - 1, 'other client')}"]


def remarks(world: World) -> list[str]:
    """What a person should know about the data of a run: what was read, and what of it nobody has."""
    left = len(world.parts["train"]) - world.samples
    nobody = [f"{many(left, 'training sample')} {'is' if left == 1 else 'are'} with nobody"] if left else []
    return [*world.dataset.notes, *nobody]


def _marked(markup: str) -> Text:
    """A text with markup, in which ``:M:`` is no picture of an M."""
    return Text.from_markup(markup, emoji=False)


class Name:
    """A name in a table, with markup. Where it is too long it goes on in the next line, between two of its words."""

    def __init__(self, markup: str) -> None:
        self._markup, self._text = markup, _marked(markup)
        self._indent = len(self._text.plain) - len(self._text.plain.lstrip())

    def __str__(self) -> str:
        return self._markup

    def lines(self, width: int) -> list[Text]:
        """The name in lines of this width; a word that is longer stays whole."""
        borders = [found.start() for found in _BORDER.finditer(self._text.plain) if found.start() > self._indent]
        first, *words = self._text.divide(borders)
        lines = [first]
        for word in words:
            longer = lines[-1] + word
            longer.rstrip()
            if longer.cell_len <= width:
                lines[-1] += word
            else:  # further to the right, so that it is not taken for another name
                lines.append(Text(" " * (self._indent + 2)) + word)
        for line in lines:
            line.rstrip()
        return lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n").join(self.lines(options.max_width))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(line.cell_len for line in self.lines(0)), self._text.cell_len)


class NamedTable(Table):
    """A table whose first column holds names."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        name, *others = cells
        super().add_row(Name(str(name)), *others, **options)


def simple_table(*columns: str, title: str | None = None) -> Table:
    """A table with names to the left and numbers to the right."""
    table = NamedTable(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for n, column in enumerate(columns):
        # A long name is folded rather than a number cut.
        table.add_column(column, justify="left" if n == 0 else "right", no_wrap=n > 0, overflow="fold")
    return table


def fits(console: Console, table: Table, fold: bool = True) -> bool:
    """Whether there is room for all numbers of a table, with its names folded between words or as they are."""
    first, *others = ([str(cell) for cell in (column.header, *column.cells)] for column in table.columns)
    widest = [max(_marked(cell).cell_len for cell in cells) for cells in others]
    names = [line for cell in first for line in (Name(cell).lines(0) if fold else [_marked(cell)])]
    return max(line.cell_len for line in names) + sum(widest) + 2 * len(widest) <= console.width


def show_table(console: Console, table: Table) -> None:
    """Print a table of numbers whole, since a cut number is a wrong one: if need be, each row as a paragraph."""
    if fits(console, table):
        console.print(table)
    else:
        show_paragraphs(console, table)


def show_paragraphs(console: Console, table: Table) -> None:
    """Print each row of a table as a paragraph, for a terminal that is too narrow for it."""
    heads = [str(column.header) for column in table.columns[1:]]
    for name, *cells in zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True):
        if name:
            console.print(f"[bold]{name}[/]", highlight=False)
        facts = "; ".join(
            f"{head} {cell.strip()}".strip() for head, cell in zip(heads, cells, strict=True) if cell.strip()
        )
        console.print(Padding(facts, (0, 0, 0, 2)), highlight=False)


def text_table(*columns: str) -> Table:
    """A table of words: everything to the left, long texts wrapped."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for n, column in enumerate(columns):
        table.add_column(column, no_wrap=n == 0, overflow="fold")
    return table


class Clock:
    """Time left, from the work done since the start."""

    def __init__(self) -> None:
        self._began, self._done = time.monotonic(), 0.0

    def left(self, done: float, total: float, known: float = 0.0) -> str:
        """What is left of a total. If work is reckoned in seconds, ``known`` of them are taken for as many of its own.

        The first bit of work alone says little, and may take a hundred times what it should.
        """
        spent, more = time.monotonic() - self._began + known, total - done
        done += known
        return duration(round(spent / done * more)) if done > 0 and spent > 0.5 else "-"


class Display(BatchWatcher):
    """What both displays share."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet
        self._live: Live | None = None
        self._said: set[tuple[int, str]] = set()

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Show progress for the time of a block."""
        if self.console.is_terminal and not self.quiet:
            with Live(console=self.console, refresh_per_second=8, transient=True) as self._live:
                yield
            self._live = None
        else:
            yield

    def _new(self, line: dict[str, Any]) -> list[str]:
        """The events of a round that have not been shown before; what happens every round is said once."""
        clients: dict[str, list[int]] = {}
        for e in line.get("events", []):
            if (e["client"], e["event"]) not in self._said:
                clients.setdefault(e["event"], []).append(e["client"])
        self._said |= {(client, event) for event, some in clients.items() for client in some}
        return [text for event, some in clients.items() for text in _of_clients(some, event)]

    def reading(self, done: int, of: int) -> None:
        if self._live is not None:
            self._live.update(f"reading pictures {done:,}/{of:,}")

    def note(self, text: str) -> None:
        if not self.quiet:
            self.console.print(note(text))


class RunDisplay(Display):
    """Shows one run: a live line on a terminal, otherwise about ten plain lines."""

    def start(self, run: Federation) -> None:
        s = run.settings
        self._clock, self._total, self._first = Clock(), s.rounds, run.round
        self._line: dict[str, Any] = run.history[-1] if run.history else {"round": 0}
        self._clients = (0, 1)
        if not self.quiet:
            clients, split = len(run.world.clients), "pooled" if s.method.pooled else s.partition
            self.console.print(
                f"[bold]{escape(s.method.shown())}[/] on {escape(run.world.dataset.name)}: {many(clients, 'client')} "
                f"({escape(split)}), {escape(s.model)}, {many(s.rounds, 'round')}, seed {s.seed}",
                highlight=False,
            )
        for text in remarks(run.world):
            self.note(text)
        if run.round and not self.quiet:
            self.console.print(f"going on after round {run.round}")

    def client(self, done: int, of: int) -> None:
        self._clients = (done, of)
        self._refresh()

    def round(self, line: dict[str, Any]) -> None:
        if line.get("accuracy") is None:  # not judged this time: show the last that was
            line = {**line, "accuracy": self._line.get("accuracy"), "loss": self._line.get("loss")}
        self._line, self._clients = line, (0, 1)
        for event in self._new(line):
            self.note(f"round {line['round']}: {event}")
        every = max(1, self._total // 10)
        if self._live is None and not self.quiet and (line["round"] % every == 0 or line["round"] == self._total):
            self.console.print(self._text(), highlight=False)
        self._refresh()

    def _text(self) -> str:
        line, (done, of) = self._line, self._clients
        progress = line["round"] - self._first + done / of
        left = self._clock.left(progress, self._total - self._first)
        accuracy, loss = percent(line.get("accuracy")), _number(line.get("loss"))
        number = f"{line['round']:>{len(str(self._total))}}/{self._total}"
        return f"round {number}   accuracy {accuracy:>5} %   loss {loss}   {left} left"

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._text())


class CompareDisplay(Display):
    """Shows many runs: a row per method on a terminal, otherwise a line per finished run."""

    def batch(self, plans: Sequence[Plan]) -> None:
        self._rows = list(dict.fromkeys(p.row for p in plans))
        self._runs = {row: sum(1 for p in plans if p.row == row) for row in self._rows}
        self._finished: dict[str, list[float]] = {row: [] for row in self._rows}
        self._total, self._done, self._now = float(len(plans)), 0.0, 0.0
        self._clock = Clock()
        self._current, self._accuracy = "", {row: None for row in self._rows}
        self._remarked: set[str] = set()

    def run(self, plan: Plan) -> None:
        self._current, self._now, self._seed = plan.row, 0.0, plan.settings.seed
        self._rounds, self._began = plan.settings.rounds, time.monotonic()
        self._refresh()

    def start(self, run: Federation) -> None:
        self._said = set()
        for text in remarks(run.world):
            if text not in self._remarked:  # each of a data set once
                self.note(text)
        self._remarked |= {*remarks(run.world)}

    def client(self, done: int, of: int) -> None:
        self._refresh()

    def round(self, line: dict[str, Any]) -> None:
        self._now = line["round"] / self._rounds
        if line.get("accuracy") is not None:
            self._accuracy[self._current] = line["accuracy"]
        for event in self._new(line):
            self.note(f"{self._current}, seed {self._seed}, round {line['round']}: {event}")
        self._refresh()

    def end(self, result: Result) -> None:
        self._finished[self._current].append(result.accuracy)
        self._advance(f"accuracy {percent(result.accuracy):>5} %")

    def failed(self, plan: Plan, why: str) -> None:
        self.note(f"{plan.row}, seed {plan.settings.seed} stopped: {why}")
        self._advance("failed")

    def _advance(self, outcome: str) -> None:
        self._done, self._now = self._done + 1, 0.0
        if self._live is None and not self.quiet:
            left = self._clock.left(self._done, self._total)
            width = max(map(len, self._rows))
            self.console.print(
                f"[{int(self._done):>{len(str(int(self._total)))}}/{int(self._total)}] {self._current:<{width}}  "
                f"seed {self._seed}  {outcome}  {left} left",
                highlight=False,
                markup=False,
                soft_wrap=True,  # a name is not broken in the middle
            )
        self._refresh()

    def _refresh(self) -> None:
        if self._live is None:
            return
        table = simple_table("", "runs", "accuracy now", "progress")
        for row in self._rows:
            done, of = len(self._finished[row]), self._runs[row]
            share = (done + (self._now if row == self._current else 0)) / of
            mark = "[bold]> " if row == self._current else "  "
            bar = "#" * round(20 * share) + "." * (20 - round(20 * share))
            table.add_row(f"{mark}{escape(row)}", f"{done}/{of}", percent(self._accuracy[row]), bar)
        left = self._clock.left(self._done + self._now, self._total)
        table.caption = f"{int(self._done)} of {int(self._total)} runs, {left} left"
        self._live.update(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
