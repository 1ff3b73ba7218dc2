"""What ``isofed paper`` does."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from rich.console import Console

from isofed.config import Settings, is_setting
from isofed.errors import RunError, UserError, unknown
from isofed.experiments import seeds_of
from isofed.papers import pages, presets, show
from isofed.papers.budget import RESERVE, Budget
from isofed.papers.data import Data
from isofed.papers.plan import HOW, Job, Length, covering, matching, plain_text
from isofed.papers.presets import DEFAULT, Cell, Preset
from isofed.papers.published import PAPERS
from isofed.papers.results import Results
from isofed.papers.runner import run
from isofed.papers.tiny import TINY
from isofed.stopping import interruptible
from isofed.words import many

_OPTION = re.compile(r"^[A-Za-z_]\w*\.[A-Za-z_]\w*$")


@dataclass(frozen=True)
class Words:
    """What was asked for, besides the preset."""

    only: str = ""
    methods: str = ""
    variant: str = DEFAULT
    seeds: str = ""
    scale: str = "1"
    budget: str = ""
    whole: str = "false"
    keep_runs: str = "false"
    alone: str = "true"
    data_root: str = ""
    runs: str = "runs/papers"
    results: str = "results"
    pages: str = "docs/results"
    how: tuple[tuple[str, str], ...] = ()
    probe: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, words: Sequence[str]) -> Words:
        made, own = cls(), [f.name for f in fields(cls) if f.name not in ("how", "probe")]
        tried = set(Settings.model_fields) - HOW - {"data", "root", "method", "seed"}
        for word in words:
            key, _, text = word.partition("=")
            if key in own:
                made = replace(made, **{key: text})  # type: ignore[arg-type]
            elif key in HOW:
                made = replace(made, how=(*made.how, (key, text)))
            elif key in tried or _OPTION.match(key):
                made = replace(made, probe=(*made.probe, (key, text)))
            else:
                raise unknown("option of paper", key, [*own, *HOW, *tried])
        return made

    @property
    def length(self) -> Length:
        return Length.of(self.scale)

    @property
    def tiny(self) -> bool:
        return self.length.label == TINY

    @property
    def folders(self) -> tuple[Path, Path]:
        """Where runs and results go; a trial of the machinery has its own, for nothing of it belongs among results."""
        runs = Path(self.runs)
        return (runs / TINY, runs / TINY / "results") if self.tiny else (runs, Path(self.results))

    def each_variant(self) -> list[Words]:
        """The same of one variant at a time."""
        return [replace(self, variant=name) for name in dict.fromkeys(self.variant.split(","))]

    def cells(self, preset: Preset) -> list[Cell]:
        """The cells that were chosen, of one variant."""
        rows = dict.fromkeys(cell.method for cell in preset.cells)
        for word in filter(str.strip, self.methods.split(",")):
            if plain_text(word) not in map(plain_text, rows):
                raise unknown(f"row of {preset.paper} {preset.name}", word.strip(), list(rows))
        cells = matching(preset.of(self.variant), self.only, self.methods)
        if not cells:
            raise UserError(
                f"no cell of {preset.paper} {preset.name} fits {self.only or self.methods}; "
                f"its first one is '{preset.cells[0]}'"
            )
        return cells

    def jobs(self, preset: Preset) -> list[Job]:
        """The cells that were chosen, each with every seed: all of the first seed come first."""
        cells = self.cells(preset)
        if self.scale == TINY and not self.only and not self.methods:
            cells = covering(cells)  # enough to see that everything runs
        seeds = seeds_of(self.seeds or (1 if self.scale == TINY else preset.seeds))
        root = str(Path(self.data_root).expanduser().absolute()) if self.data_root else None
        return [Job(cell, seed, self.length, self.probe, self.how, root) for seed in seeds for cell in cells]


def paper(console: Console, words: Sequence[str], shows: bool, quiet: bool) -> None:
    """List, show or run presets, or write the pages that show all results."""
    names = [word for word in words if not is_setting(word) and not _OPTION.match(word.partition("=")[0])]
    asked = Words.of([word for word in words if word not in names])
    if names == ["pages"]:
        if replace(asked, results="", pages="", runs="") != Words(results="", pages="", runs=""):
            raise UserError("'paper pages' shows all results, and takes results= and pages= alone")
        if not Path(asked.results).is_dir():
            raise UserError(f"there is no folder {asked.results} with results; say results=FOLDER")
        written = pages.write(Path(asked.results), Path(asked.pages))
        console.print(f"written: {', '.join(map(str, written))}", highlight=False, markup=False, soft_wrap=True)
        return
    results = Results(asked.folders[1])
    if not names or (len(names) == 1 and names != ["all"] and not shows):
        for name in names:
            presets.names(name)
        show.listing(console, results, names or tuple(PAPERS))
        _say_where(console, results)
        return
    budget = Budget.of_command(seconds_of(asked.budget) if asked.budget else None)
    failures: dict[str, str] = {}
    data = Data(show.Progress(console, quiet).reading)
    parts = _parts(_chosen(names), asked)
    if shows:
        for preset, one in parts:
            _show(console, preset, results, one)
        _say_where(console, results)
        return
    todo = [(preset, one, one.jobs(preset)) for preset, one in parts]
    for job in (job for *_, jobs in todo for job in jobs):
        _ = job.settings  # whatever is wrong with one is said before any of them starts
    for preset, one, jobs in todo:
        failures |= _run(console, preset, one, jobs, budget, data, quiet)
    if failures:
        which, why = next(iter(failures.items()))
        raise RunError(f"{many(len(failures), 'run')} could not be finished; '{which}' stopped because {why}")


def _chosen(names: Sequence[str]) -> list[Preset]:
    """The presets that words name: a paper and its tables, a paper alone, or all."""
    if names[0] == "all":
        return list(presets.every())
    return [presets.load(names[0], name) for name in names[1:] or presets.names(names[0])]


def _say_where(console: Console, results: Results) -> None:
    """Elsewhere than where results are, it looks as if nothing had been run."""
    if not results.folder.is_dir():
        note = f"note: there is no folder {results.folder} with results here; results=FOLDER says where they are"
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def _parts(chosen: Sequence[Preset], asked: Words) -> list[tuple[Preset, Words]]:
    """Each preset with each variant that was asked for; of several presets, those without such cells are left out."""
    parts: list[tuple[Preset, Words]] = []
    refused: dict[str, list[UserError]] = {}
    for preset, one in itertools.product(chosen, asked.each_variant()):
        try:
            one.cells(preset)
        except UserError as error:
            refused.setdefault(one.variant, []).append(error)
        else:
            parts.append((preset, one))
    for errors in refused.values():
        if len(errors) == len(chosen):
            raise errors[0]
    return parts


def _run(
    console: Console, preset: Preset, asked: Words, jobs: Sequence[Job], budget: Budget, data: Data, quiet: bool
) -> dict[str, str]:
    """Run what is missing of a preset and show its table; what failed, with its sentence."""
    runs, folder = asked.folders
    results = Results(folder)
    alone = _yes("alone", asked.alone)
    if not alone and all(job.timing for job in jobs):
        raise UserError(
            f"these cells of {preset.paper} {preset.name} are about nothing but time, which alone=false does not keep; "
            "leave it out and the machine alone"
        )
    with interruptible("Nothing is lost; the same command goes on"):
        outcome = run(
            jobs,
            results,
            runs,
            budget,
            show.Progress(console, quiet),
            whole=_yes("whole", asked.whole),
            keep=_yes("keep_runs", asked.keep_runs),
            alone=alone,
            data=data,
        )
    how = "the budget is spent" if outcome.over else "done"
    left = f"; {many(outcome.missing, 'run')} still missing: the same command goes on" if outcome.missing else ""
    if outcome.put_off:
        left += f" ({len(outcome.put_off)} of them put off, which would not have ended in time)"
    console.print(
        f"{how}: {many(outcome.finished, 'run')} finished{left}; results in {folder}", highlight=False, markup=False
    )
    if data.made_up:
        console.print(f"made-up pictures stood in for {', '.join(sorted(data.made_up))}", highlight=False, markup=False)
    if not quiet:
        _show(console, preset, Results(folder), asked)
    return outcome.failures


def _show(console: Console, preset: Preset, results: Results, asked: Words) -> None:
    """The table; or, with settings that were only tried out, what came of them, which is in no table."""
    if not asked.probe:
        show.show(console, preset, results, asked.cells(preset), asked.variant, asked.tiny)
        return
    known = [(job, results.of(job)) for job in asked.jobs(preset)]
    console.print("tried out, and so in no table:", highlight=False)
    for job, found in known:
        value = found and found.measures.get("accuracy")
        said = "not run" if found is None else "no accuracy" if value is None else f"accuracy {value:.1f}"
        console.print(f"  {job}: {said}", highlight=False, markup=False, soft_wrap=True)


def seconds_of(text: str) -> float:
    """``90``, ``90s``, ``25m``, ``1.5h`` or ``1h30m`` in seconds."""
    found = re.fullmatch(r"(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s?)?", text.strip())
    try:
        hours, minutes, seconds = (float(part or 0) for part in found.groups()) if found else (0.0, 0.0, 0.0)
    except ValueError:
        hours = minutes = seconds = 0.0
    total = 3600 * hours + 60 * minutes + seconds
    if total <= 0:
        raise UserError(f"budget={text} is no time; write it as 90s, 25m or 1.5h")
    if total < 3 * RESERVE:
        raise UserError(f"budget={text} is too short: {RESERVE:.0f} s of it are kept to stop in time; give 1m or more")
    return total


def _yes(key: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise UserError(f"{key}={text} must be true or false")
    return text == "true"
