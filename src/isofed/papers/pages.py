"""The pages of the documentation that show all results, made from the result files and nothing else."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from isofed.files import write_atomic, write_error
from isofed.papers import compare, presets, show
from isofed.papers.compare import Entry
from isofed.papers.measure import RATIOS
from isofed.papers.plan import Length
from isofed.papers.presets import DEFAULT, Preset
from isofed.papers.published import PAPERS
from isofed.papers.results import Finished, Results

NOTES = "notes"
TOLD = ("unreadable", "time not accuracy")  # remarks on printed numbers that the table makes by itself
COLUMNS = ("data set", "setting", "method", "paper", "here", "seeds", "difference", "within 2 sd")
INTRODUCTION = """\
# The papers' tables, run again

Every table of the five papers is a preset: `isofed paper` lists them, and any of them can be run by anyone. What has
been run so far is on these pages, whether it agrees with the papers or not. Each number of a table comes from a small
file in `results/` with its configuration, seed, versions, device and curve; what the text beside it tells may come from
runs that left no such file.

```text
isofed paper feduv table1 only=cifar100 seeds=3 budget=25m data_root=datasets device=cuda
isofed paper feduv table1 --show
isofed paper pages
```

The first runs what is missing and stops when its time is up; the same command goes on later. The second prints a table,
the third writes these pages anew. Several tables and figures of a paper may be named at once, and `isofed paper all`
runs everything. What a run may be told:

| word | meaning |
|---|---|
| `only=A,B` | cells with all of these words in data set, setting or method; a part of a word will do, not of a number |
| `methods=A,B` | these rows |
| `seeds=3` | three seeds, from 0 on; `seeds=0,4` means those |
| `variant=paper` | with something changed on purpose (`default,paper`: both); the page of a paper lists its variants |
| `scale=0.3` | this part of the rounds, with a schedule of its own; always labelled |
| `scale=tiny` | two rounds of a thin network on a few pictures, made-up ones if need be; kept apart, beside its runs |
| `budget=25m` | stop cleanly after this time (`90s`, `1.5h`), counted from the start of the command |
| `whole=true` | run only what can be expected to end within the budget, and put off the rest |
| `data_root=F` | the folder of the data sets; without it `ISOFED_DATA` |
| `results=F`, `runs=F` | where results and run folders are; `results/` and `runs/papers/` |
| `pages=F` | where `isofed paper pages` writes; `docs/results/` |
| `keep_runs=true` | leave checkpoints and models of finished runs in place |
| `alone=false` | something else is run on the machine at the same time: accuracies are kept, times are not compared |
| `device`, `precision`, `executor`, `slots` and the like | how it is computed, recorded with the result |
| any other setting | `lr=0.1` or `feduv.lam=2.5` tries something out; such results are kept apart |

**How to read the tables.** *Paper* is what is printed, with its standard deviation where there is one, or *unreadable*
where it cannot be made out in the copy that was read; *here* is the mean over seeds, with the standard deviation
between them. *Within 2 sd* says whether the two differ by at most two of the paper's standard deviations; where the
paper prints none, by at most two of ours, or one point if that is more. Counted costs agree if they differ by at most 2
%. Times are relative to FedAvg's, of runs on the same device, computed in the same way by the same code; a run without
such a partner has no time here. All methods of a seed have the same split and the same initial weights. A shortened run
(fewer rounds, with a schedule of its own) is always labelled, and is no test of the paper's number.
"""


def write(results: Path, folder: Path) -> list[Path]:
    """Write all pages into a folder."""
    made = build(results)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from error
    for name, text in made.items():
        write_atomic(folder / name, text.encode())
    return [folder / name for name in made]


def build(folder: Path) -> dict[str, str]:
    """The text of every page, by its file's name."""
    results = Results(folder)
    every = {paper: [presets.load(paper, name) for name in presets.names(paper)] for paper in PAPERS}
    pages = {"index.md": _index(results, every)}
    for paper, own in every.items():
        notes = read_notes(folder / NOTES / f"{paper}.md")
        parts = [f"# {PAPERS[paper]}: paper and measured", _wrapped(presets.about(paper))]
        parts += [notes[""]] if notes.get("") else []
        parts += _variants(own)
        parts += [part for preset in own for part in _preset(preset, results, notes.get(preset.name, ""))]
        parts += _data(results, own)
        pages[f"{paper}.md"] = "\n\n".join(parts) + "\n"
    return pages


def read_notes(path: Path) -> dict[str, str]:
    """Hand-written text by table; a heading ``## table1`` begins a table's, what stands before the first is general."""
    if not path.exists():
        return {}
    pieces = re.split(r"^## (\w+)\s*$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        "": pieces[0].strip(),
        **{name: text.strip() for name, text in zip(pieces[1::2], pieces[2::2], strict=True)},
    }


def _variants(own: Iterable[Preset]) -> list[str]:
    """What ``variant=`` can name, whether it was run or not."""
    known = {name: about for preset in own for name, about in preset.explained.items()}
    lines = [_wrapped(f"- `{name}`: {about}", "  ") for name, about in known.items()]
    return ["**Variants**, to be run with `variant=` and the name:", "\n".join(lines)] if lines else []


def _index(results: Results, every: dict[str, list[Preset]]) -> str:
    table = [_row("preset", "cells", "run", "within 2 sd", "shortened", "what it shows"), _row(*["---"] * 6)]
    for paper, own in every.items():
        for preset in own:
            full, some, count = compare.done(preset, results)
            judged = [e for e in compare.entries(preset, results) if e.within is not None] if full else []
            good = f"{sum(bool(e.within) for e in judged)} of {len(judged)}" if judged else ""
            name = f"[{preset}]({paper}.md#{preset.name[:-1]}-{preset.name[-1]})"
            table.append(_row(name, str(count), str(full), good, str(some - full) if some > full else "", preset.title))
    nothing = [] if results.all() else ["**Nothing has been run so far**; `--show` prints the papers' numbers alone."]
    parts = [INTRODUCTION.rstrip(), *nothing, "\n".join(table), *_data(results, itertools.chain(*every.values()))]
    return "\n\n".join(parts) + "\n"


def _data(results: Results, own: Iterable[Preset]) -> list[str]:
    """What is to be known about the data of results: by fingerprint where that is told, otherwise by name."""
    path = results.folder / NOTES / "data.yaml"
    known: dict[str, str] = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
    used = {
        (str(one.content["settings"]["data"]), str(one.content["environment"]["data"]))
        for preset in own
        for one in _results_of(preset, results)
    }
    lines = []
    for data, fingerprint in sorted(used):
        said = known.get(fingerprint) or known.get(data.partition(":")[0])
        lines.append(_wrapped(f"- `{data}`, fingerprint `{fingerprint[:12]}`{f': {said}' if said else ''}", "  "))
    return ["## Data", "\n".join(lines)] if lines else []


def _results_of(preset: Preset, results: Results) -> Iterable[Finished]:
    """All that a preset's tables show."""
    for length, variant in itertools.product(compare.lengths(preset, results), (DEFAULT, *preset.variants)):
        for entry in compare.entries(preset, results, length, variant):
            yield from entry.found
    yield from (one for one, _ in compare.tried(preset, results))


def _preset(preset: Preset, results: Results, note: str) -> Iterable[str]:
    yield f"## {preset.name[:-1].capitalize()} {preset.name[-1]}"
    yield f"**{preset.title}.**"
    if preset.about:
        yield _wrapped(preset.about)
    if note:
        yield note
    every = compare.lengths(preset, results)
    for length in every:
        yield from _length(compare.entries(preset, results, length), length, DEFAULT)
    ran = {one.content["variant"] for one in results.all()}
    for variant in (name for name in preset.variants if name in ran):
        for length in every:
            made = [e for e in compare.entries(preset, results, length, variant) if e.found and not _base_alone(e)]
            if made:
                yield from _length(made, length, variant, preset.explained[variant])
    tried = [_tried(one, changes) for one, changes in compare.tried(preset, results)]
    if tried:
        yield "**Tried besides**, each a single run with something changed:"
        yield "\n".join(tried)


def _base_alone(entry: Entry) -> bool:
    """Whether a number tells of another method's training only: the time of a round before what is done after it."""
    return entry.cell.after is not None and entry.measure in RATIOS


def _length(made: Sequence[Entry], length: Length, variant: str, about: str = "") -> Iterable[str]:
    ran = [entry for entry in made if entry.found]
    missing = show.not_run(made)
    label = [f"variant `{variant}`"] if variant != DEFAULT else []
    label += [f"shortened to {length.label.removeprefix('scale=')} of the rounds"] if length.label else []
    if label:
        words = ", ".join(label)
        yield _wrapped(f"**{words[0].upper()}{words[1:]}**{f': {about}' if about else ''}")
    if ran:
        lines = [_row(*COLUMNS), _row(*["---"] * len(COLUMNS))]
        for e in ran:
            texts = (e.cell.dataset, e.setting, e.cell.method, show.printed(e), show.here(e), str(len(e.found)))
            lines.append(_row(*texts, show.difference(e), show.verdict(e)))
        yield "\n".join(lines)
        yield _made_with(ran)
        yield from _remarks(ran)
        for order in compare.orders(ran):
            yield _wrapped(
                f"{order.dataset}, {order.setting}, best first. Paper: {', '.join(show.levels(order.paper))}. "
                f"Here: {', '.join(show.levels(order.here))}. {order.agreeing} of {order.pairs} pairs agree."
            )
    if missing and not length.label:
        yield _wrapped(f"Not run{'' if ran else ' yet'}: {'; '.join(missing)}.")


def _remarks(ran: Sequence[Entry]) -> Iterable[str]:
    """What is to be known about printed numbers: misprints, and those that were hard to read."""
    found: dict[str, list[str]] = {}
    for e in ran:
        if e.row is not None and e.row.note not in ("", *TOLD):
            found.setdefault(e.row.note, []).append(f"{e.cell.dataset} {e.setting} {e.cell.method}")
    if found:
        said = "; ".join(f"{', '.join(places)}: {note}" for note, places in found.items())
        yield _wrapped(f"Of the printed numbers: {said}.")


def _made_with(ran: Sequence[Entry]) -> str:
    found = [one for entry in ran for one in entry.found]
    trained = {one.path: one for entry in ran if entry.cell.after is None for one in entry.found}
    devices = sorted({f"{one.device} in {one.precision}" for one in found})
    versions = sorted({str(one.content["environment"]["torch"]) for one in found})
    return _wrapped(f"On {', '.join(devices)}; torch {', '.join(versions)}; {_took(list(trained.values()))}.")


def _took(trained: Sequence[Finished]) -> str:
    """How long training took, of the runs that had the machine for themselves: the time of the others says nothing."""
    if not trained:
        return "no training besides that of the runs that it goes on from"
    alone = [float(one.content["seconds"]) for one in trained if one.content.get("alone", True)]
    beside = len(trained) - len(alone)
    hours = f"{sum(alone) / 3600:.2f} hours of training" if alone else ""
    others = f"{beside} {'run' if beside == 1 else 'runs'} beside other work, not timed" if beside else ""
    return " and ".join(filter(None, (hours, others)))


def _tried(one: Finished, changed: Mapping[str, str]) -> str:
    c, changes = one.content, ", ".join(f"`{k}={v}`" for k, v in changed.items())
    what = " ".join(filter(None, (c["dataset"], c["setting"], c["method"], c["length"])))
    if c.get("failure"):
        return f"- {what}, seed {one.seed}, {changes}: diverges"
    on = " on the validation part" if c["settings"].get("validation") and not c["settings"].get("final_test") else ""
    accuracy, first = one.measures["accuracy"], one.measures.get("before")
    before = f" (before the refit {first:.1f})" if c.get("exchanges") and first is not None else ""
    return f"- {what}, seed {one.seed}, {changes}: {accuracy:.1f}{on}{before}"


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
