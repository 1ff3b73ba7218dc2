"""What each command of the command line does."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from isofed import spec, tables
from isofed.config import Settings, is_setting, parts_with, read_words, show
from isofed.config import settings as make_settings
from isofed.data import download, load, summaries
from isofed.data import partition as partitions
from isofed.data.describe import domains_of, picture, table
from isofed.display import (
    CompareDisplay,
    RunDisplay,
    duration,
    percent,
    remarks,
    show_table,
    simple_table,
    text_table,
)
from isofed.engine.choose import check_here
from isofed.engine.world import World
from isofed.errors import RunError, UserError, unknown
from isofed.experiments import (
    Batch,
    Plan,
    final_plans,
    nothing_to_tune,
    plan_comparison,
    plan_tuning,
    run_all,
    seeds_of,
)
from isofed.federation import Federation
from isofed.result import IF_DIVERGES, Result
from isofed.stopping import interruptible, resumable
from isofed.studies import record_comparison, record_tuning
from isofed.words import many


def run(console: Console, words: Sequence[str], resume: str | None, quiet: bool) -> None:
    """One run, new or resumed."""
    values = read_words(words)
    display = RunDisplay(console, quiet)
    named = resume is not None or bool(values.get("out"))
    if resume is not None:
        out = values.pop("out", None)
        if out and Path(str(out)).absolute() != Path(resume).absolute():
            raise UserError(
                f"a run that goes on stays in its folder: leave out= away, or go on with a copy of {resume}"
            )
        federation, folder = Federation.resume(resume, **values), Path(resume)
    else:
        out = values.pop("out", None)
        checked = make_settings(values)
        check_here(checked)
        folder = Path(str(out)) if out else _new_folder(checked)
        with display.showing():
            dataset = load(checked.data, checked.root, display.reading)
        federation = Federation.on(dataset, checked, out=folder)
    try:
        with interruptible(resumable(f"isofed run --resume {shlex.quote(str(folder))}")), display.showing():
            result = federation.fit(display)
    except Exception:
        if not named and federation.folder is not None:  # nobody would look for it under a name that was made up
            federation.folder.remove_if_unused()
        raise
    _print_result(console, result, folder, federation.settings.final_test)


def _new_folder(s: Settings) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    stem = "".join(c if c.isalnum() or c in "+-." else "-" for c in f"{s.method.shown()}-{Path(s.data).stem}")[:60]
    return Path("runs") / f"{stamp}-{stem}-{os.getpid()}"  # two started in one second get two folders


def _print_result(console: Console, result: Result, folder: Path, tested: bool) -> None:
    sent = (result.bytes_up + result.bytes_down) / 1e6
    console.print(
        f"{'test' if tested else 'validation'} accuracy [bold]{percent(result.accuracy)} %[/] after "
        f"{many(result.rounds, 'round')}, best "
        f"{'on the validation part ' if tested and result.validation_accuracy is not None else ''}"
        f"{percent(result.best_accuracy)} %; {duration(result.seconds)} of training, {sent:.1f} MB sent",
        highlight=False,
    )
    before = [line["accuracy"] for line in result.history if line.get("accuracy") is not None][-1]
    for line in result.exchanges:
        console.print(_exchange_line(line, before), highlight=False)
        before = line["accuracy"]
    if result.privacy:
        spent = f"epsilon {result.privacy['epsilon']:.3g} at delta {result.privacy['delta']:g}"
        console.print(f"privacy of a whole client: {spent}, as result.json explains", highlight=False)
    if result.rounds_to_target is not None:
        console.print(f"the target was reached in round {result.rounds_to_target}", highlight=False)
    if result.events:
        are = f"{many(result.events, 'event')} {'is' if result.events == 1 else 'are'}"
        console.print(f"{are} recorded in {folder / 'metrics.jsonl'}", highlight=False)
    if result.diverged:
        console.print(f"training diverges: {IF_DIVERGES}", highlight=False)
    console.print(f"recorded in {folder}", highlight=False, markup=False)


def _exchange_line(line: dict[str, Any], before: float) -> str:
    """What a question after the last round has brought."""
    name, after, suffix = line["exchange"], line["accuracy"], ""
    if "personal_accuracy" in line:
        before, after = line["personal_accuracy_before"], line["personal_accuracy"]
        suffix = " of the clients' own models, in the mean"
    if "condition" in line:
        suffix = f"; condition number {line['condition']:.2g}"
    return f"{name} after the last round: accuracy from {percent(before)} % to {percent(after)} %{suffix}"


def compare(console: Console, words: Sequence[str], quiet: bool) -> None:
    """Methods over seeds, ending in a table."""
    methods = [w for w in words if is_method(w)]
    values = read_words(w for w in words if w not in methods)
    out = values.pop("out", None)
    several, one = values.pop("methods", None), values.pop("method", None)
    if given := methods and (several or one):
        raise UserError(f"methods are given twice, as '{methods[0]}' and as '{_said(given)}'; give all in one way")
    # As everywhere, the parts of a `method` act together; `methods` are set side by side.
    methods = methods or ([several] if isinstance(several, str) else list(several or [])) or ([one] if one else [])
    seeds = seeds_of(values.pop("seeds", 1), spec.convert(values.pop("seed", 0), int, "seed"))
    plans, root = plan_comparison(methods, seeds, values, out)
    batch = _run_all(plans, CompareDisplay(console, quiet))
    s = plans[0].settings
    rows, written = record_comparison(plans, batch, seeds, root)
    later = [plan.row for plan in plans if plan.settings.method.exchanges]
    _print_comparison(console, rows, s, len(seeds), next(iter(later), None))
    for row, by_seed in batch.results.items():
        if any(result.diverged for result in by_seed.values()):
            console.print(f"training of {row} diverges: {IF_DIVERGES}", highlight=False, markup=False)
    said = f"recorded in {root}; this table as {written[0].name} and {written[1].name}"
    console.print(said, highlight=False, markup=False, soft_wrap=True)
    _report_failures(batch)


def _said(methods: Any) -> str:
    """Methods as they are written on the command line."""
    try:
        return show("method", methods)
    except UserError:
        return str(methods)


def _run_all(plans: Sequence[Plan], display: CompareDisplay, beside: Sequence[Plan] = ()) -> Batch:
    """Make the missing runs, showing how far they are."""
    with interruptible(resumable("the same command again does what is missing")), display.showing():
        return run_all(plans, display, beside=beside)


def _print_comparison(
    console: Console, rows: Sequence[tables.Row], s: Settings, seeds: int, later: str | None = None
) -> None:
    """The table; ``later`` is a method that does something after the last round."""
    columns = ["method", "accuracy %", "differ", "95 % interval", "time", "MB"]
    if s.target is not None:
        columns.insert(4, f"to {100 * s.target:g} %")
    private = any(r.epsilon is not None for r in rows)
    out = simple_table(*columns, *(["epsilon"] if private else []))
    best = max((r.accuracy for r in rows if r.accuracy is not None), default=None)
    for r in rows:
        accuracy = percent(r.accuracy) + (f" ± {100 * r.std:.1f}" if r.std is not None else "")
        interval = f"{100 * r.low:+.1f} to {100 * r.high:+.1f}" if r.low is not None and r.high is not None else ""
        cells = [
            escape(r.method) + (f" ({r.failed} failed)" if r.failed else ""),
            f"[bold]{accuracy}[/]" if r.accuracy == best else accuracy,
            f"{100 * r.difference:+.1f}{' *' if r.clear else '  '}" if r.difference is not None else "",
            interval,
            f"{r.relative_seconds:.2f}x" if r.relative_seconds else "-",
            f"{r.megabytes_per_round:.2f}" if r.megabytes_per_round is not None else "-",
        ]
        if s.target is not None:
            cells.insert(4, r.to_target)
        if private:
            cells.append(f"{r.epsilon:.3g}" if r.epsilon is not None else "-")
        out.add_row(*cells)
    console.print()
    show_table(console, out)
    base = escape(rows[0].method)
    over = f"{many(seeds, 'seed')}{', less those that failed' if any(r.failed for r in rows) else ''}"
    deltas = sorted({f"{r.delta:g}" for r in rows if r.delta is not None})
    spent = f" Epsilon is that of a whole client, at delta {' or '.join(deltas)}." if private else ""
    to_target = ""
    if s.target is not None:
        partly = next((r for r in rows if r.partly), None)
        enough = f"means that they were enough for {partly.reached} of {partly.seeds} seeds" if partly else ""
        some = f"; '{partly.to_target}' {enough}" if partly else ""
        after = f", before what {escape(later)} does after the last one" if later else ""
        to_target = f" 'To {100 * s.target:g} %' counts rounds{after}{some}."
    none = ", and there is none where differences have no spread" if any(r.no_spread for r in rows) else ""
    part = "" if s.final_test else "on the validation part, "
    console.print(
        f"\n{escape(f'{s.data}, {s.partition}')}, {many(s.rounds, 'round')}; {part}"
        f"mean ± standard deviation over {over}. "
        f"'Differ' is to {base}, in points, paired by seed; * marks an interval that excludes zero{none}.{to_target} "
        f"Time is that of a round relative to {base}'s, MB what all clients send and receive in a round.{spent}",
        highlight=False,
    )


def tune(console: Console, words: Sequence[str], quiet: bool) -> None:
    """A grid on the validation part, then the chosen point on the test part."""
    method_options = [w for w in words if _OPTION.match(w)]
    methods = [w for w in words if w not in method_options and is_method(w)]
    plain = read_words(w for w in words if w not in methods and w not in method_options)
    method = methods[0] if methods else plain.pop("method", None)
    if apart := next((w for w in words if w.endswith(",")), None):
        raise UserError(f"'{apart}' ends with a comma: write values without blanks between them, as in lr=0.01,0.1")
    if method is None or len(methods) > 1 or "method" in plain:
        raise UserError("tune takes one method, for example: isofed tune fedprox lr=0.01,0.1")
    out = plain.pop("out", None)
    seeds = seeds_of(plain.pop("seeds", 1), spec.convert(plain.pop("seed", 0), int, "seed"))
    grid = {k: _values(v) for k, v in plain.items() if len(_values(v)) > 1 or "." in k}
    grid |= {k: _values(v) for k, _, v in (w.partition("=") for w in method_options)}
    if not grid:
        if found := _WITH_VALUES.search(str(method)):
            part, option, tried = found.groups()
            raise UserError(f"values of an option are tried as isofed tune {part} {part}.{option}={tried}")
        single = [(key, value) for key, given in plain.items() for value in _values(given)]
        unclear = (f"{k}={v}" for k, v in single if any("=" not in piece for piece in v.split(",")[1:]))
        raise nothing_to_tune(next(unclear, None))
    for key, tried in grid.items():
        if not tried:
            raise UserError(f"'{key}=' names no value to try; write several, such as {key}=0.01,0.1")
    for key in [k for k in grid if k not in Settings.model_fields and "." not in k]:
        for part in parts_with(method, key):
            raise UserError(f"there is no setting '{key}'; the option of {part} is tuned as {part}.{key}={plain[key]}")
    values = {k: v for k, v in plain.items() if k not in grid}
    plans, root = plan_tuning(method, grid, seeds, values, Path(str(out)) if out else None)
    display = CompareDisplay(console, quiet)
    batch = _run_all(plans, display)
    trials = tables.tuning(batch, list(dict.fromkeys(p.row for p in plans)))
    _print_trials(console, trials, len(seeds))
    chosen = next(t for t in trials if t.chosen)
    finals = final_plans(plans, chosen.setting, root)
    final = _run_all(finals, CompareDisplay(console, quiet=True), beside=plans)
    row = tables.comparison(final, [finals[0].row])[0]
    spread = f" ± {100 * row.std:.1f}" if row.std is not None else ""
    console.print(
        f"\nchosen: [bold]{escape(chosen.setting)}[/]; trained on the whole training part, its test accuracy is "
        f"[bold]{percent(row.accuracy)}{spread} %[/]",
        highlight=False,
    )
    record_tuning(method, trials, row, seeds, root)
    console.print(f"recorded in {root}", highlight=False, markup=False)
    _report_failures(batch)


_WITH_VALUES = re.compile(r"([A-Za-z_]\w*):([A-Za-z_]\w*)=([^,=+]+(?:,[^,=+]+)+)")  # fedprox:mu=0.1,1
_OPTION = re.compile(r"^[A-Za-z_]\w*\.[A-Za-z_]\w*=")  # fedprox.mu=..., an option of a part of the method


def is_method(word: str) -> bool:
    """Whether a word of the command line stands for itself: neither key=value nor a YAML file."""
    return not is_setting(word) and not word.endswith((".yaml", ".yml"))


def _values(given: Any) -> list[str]:
    return [str(v) for v in given] if isinstance(given, list) else spec.several(str(given))


def _print_trials(console: Console, trials: Sequence[tables.Trial], seeds: int) -> None:
    out = simple_table("setting", "validation accuracy %", "")
    for t in trials:
        spread = f" ± {100 * t.std:4.1f}" if t.std is not None else ""
        failed = f"{t.failed} of {seeds} failed" if t.failed else ""
        out.add_row(escape(t.setting), percent(t.validation_accuracy) + spread, "chosen" if t.chosen else failed)
    console.print()
    show_table(console, out)


def _report_failures(batch: Batch) -> None:
    count = sum(len(by_seed) for by_seed in batch.failures.values())
    if count:
        row, by_seed = next(iter(batch.failures.items()))
        raise RunError(
            f"{count} of the runs could not be finished; '{row}' stopped because {next(iter(by_seed.values()))}"
        )


def data(console: Console, words: Sequence[str]) -> None:
    """What a data set holds and who gets what; ``get`` fetches one first."""
    if words and words[0] == "get":
        get_data(console, words[1:])
        return
    given = [w for w in words if is_method(w)]
    values = read_words(w for w in words if w not in given)
    chart = values.pop("picture", None)
    if len(given) > 1:
        raise UserError(f"data shows one data set at a time, not {len(given)}: {' '.join(given)}")
    if given:
        values["data"] = given[0]
    if "data" not in values:
        out = text_table("data", "what it is")
        for name, summary in summaries().items():
            out.add_row(name, summary)
        console.print(out)
        out = text_table("partition", "what it is")
        for name, summary in partitions.kinds().items():
            out.add_row(name, summary)
        console.print()
        console.print(out)
        console.print("\nShow a split: isofed data digits partition=dirichlet:0.1 clients=10", highlight=False)
        console.print("Fetch a set:  isofed data get cifar100 root=FOLDER", highlight=False)
        return
    s = make_settings(values)
    display = RunDisplay(console)
    with display.showing():
        world = World.create(s, load(s.data, s.root, display.reading))
    _print_split(console, world)
    if chart:
        counts = partitions.counts(world.clients, world.parts["train"].labels, len(world.dataset.classes))
        title = f"{world.dataset.name}, {s.partition}, seed {s.seed}"
        try:
            written = picture(counts, world.dataset.classes, str(chart), title)
        except OSError as error:
            raise UserError(f"the picture {chart} cannot be written: {error.strerror}") from None
        console.print(f"\npicture: {written}", highlight=False, markup=False)


def get_data(console: Console, words: Sequence[str]) -> None:
    """Fetch a data set from its publisher."""
    names = [w for w in words if is_method(w)]
    values = read_words(w for w in words if w not in names)
    root = Path(str(values.pop("root", None) or os.environ.get("ISOFED_DATA") or "data")).expanduser()
    if len(names) != 1 or values:
        wrong = f", not {' '.join(words)}" if words else ""
        raise UserError(
            f"data get takes one name and root=FOLDER{wrong}: it fetches {', '.join(download.OFFERS)} "
            f"and says where to find {', '.join(download.BY_HAND)}"
        )
    command = f"isofed data get {names[0]} root={shlex.quote(str(root))}"
    with interruptible(resumable(command)), download_bar(console) as tell:
        folder = download.get(names[0], root, tell)
    said = f"{names[0]} is in {folder}; use it with: data={names[0]} root={shlex.quote(str(root))}"
    console.print(said, highlight=False, markup=False, soft_wrap=True)  # to be copied, so never cut


@contextmanager
def download_bar(console: Console) -> Iterator[download.Tell]:
    """A line for each file with its rate and the time left, on a terminal; elsewhere one plain line when it starts."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def tell(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total, completed=done)
                if not console.is_terminal:
                    size = "" if total is None else f" ({total / 1e6:,.1f} MB)"
                    console.print(f"downloading {name}{size}", highlight=False, markup=False)
            bar.update(tasks[name], completed=done, total=total)

        yield tell


def _print_split(console: Console, world: World) -> None:
    dataset, train = world.dataset, world.parts["train"]
    channels, height, width = dataset.shape
    parts = ", ".join(f"{len(part):,} {name}" for name, part in world.parts.items())
    groups = [f"{len(p.groups.unique()):,} {name}" for name, p in world.parts.items() if p.groups is not None]
    console.print(
        f"[bold]{escape(dataset.name)}[/]: {parts}; {many(len(dataset.classes), 'class')}; pictures {height}x{width}"
        f"x{channels}{'; domains ' if dataset.domains else ''}{escape(', '.join(dataset.domains))}"
        f"{'; groups ' if groups else ''}{', '.join(groups)}",
        highlight=False,
    )
    split = f"split: {escape(world.settings.partition)}, seed {world.settings.seed}"
    console.print(split, highlight=False, soft_wrap=True)
    for text in remarks(world):
        console.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True)
    console.print()
    counts = partitions.counts(world.clients, train.labels, len(dataset.classes))
    domains = None
    if train.domains is not None:
        domains = domains_of(partitions.counts(world.clients, train.domains, len(dataset.domains)), dataset.domains)
    made = table(counts, dataset.classes, domains)
    widths = [max(map(len, column)) + 1 for column in zip(made.columns, *made.rows, strict=True)]
    whole = len(made.columns)
    if sum(widths) > console.width:  # without the classes, rather than with numbers cut off
        made = table(counts, dataset.classes, domains, most_classes=0)
    roomy = sum(widths) + 12 <= console.width
    out = simple_table(*map(escape, made.columns), *([""] if roomy else []))
    out.padding = (0, 1, 0, 0)
    largest = max(1, int(counts.sum(1).max()))
    sizes = {str(c): int(n) for c, n in enumerate(counts.sum(1))}
    for row in made.rows:
        bar = "█" * int(np.ceil(12 * sizes[row[0]] / largest)) if row[0] in sizes else ""
        out.add_row(*map(escape, row), *([f"{bar:<12}"] if roomy else []))
    console.print(out)
    if len(made.columns) < whole:
        console.print("what of each class a client has is shown on a wider terminal", highlight=False)


def settings(console: Console, words: Sequence[str] = ()) -> None:
    """Every setting with its default, or those whose names have one of these words in them."""
    fields = {name: (show(name, f.default), f.description or "") for name, f in Settings.model_fields.items()}
    fields["out"] = ("a new folder in runs/", "the run folder")
    for word in words:
        if not any(word.lower() in name for name in fields):
            raise unknown("setting", word, fields)
    out = text_table("setting", "default", "what it means")
    for name, told in fields.items():
        if not words or any(word.lower() in name for word in words):
            out.add_row(name, *told)
    console.print(out)
