"""Paper and measured, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from isofed import spec
from isofed.diagnose import NOT_FINITE
from isofed.papers.measure import RATIOS, is_percent
from isofed.papers.plan import RECORD, Job, Length, method_of
from isofed.papers.presets import DEFAULT, Cell, Preset
from isofed.papers.published import Published
from isofed.papers.results import Finished, Results, made_now
from isofed.papers.tiny import TINY
from isofed.stats import mean_std

COUNTED = {"macs", "gigamacs", "stored", "classifier_megabytes", "classifier_gflop"}  # the same on every machine
CLOSE = 0.02  # relative, for what is counted


@dataclass(frozen=True)
class Entry:
    """One number of a table: what the paper prints, and what was measured here."""

    cell: Cell
    setting: str  # as published
    measure: str
    row: Published | None
    paper: float | None  # the printed number; for times, relative to the reference method's
    found: tuple[Finished, ...]  # one for each seed
    values: tuple[float, ...]  # measured, likewise
    diverged: int = 0
    not_finite: int = 0  # of the seeds: those whose run was finished, but what is to be measured of it is no number

    @property
    def mean(self) -> float | None:
        return mean_std(self.values)[0] if self.values else None

    @property
    def std(self) -> float | None:
        return mean_std(self.values)[1] if self.values else None

    @property
    def difference(self) -> float | None:
        return None if self.mean is None or self.paper is None else self.mean - self.paper

    @property
    def tolerance(self) -> float | None:
        """Two standard deviations: the paper's, or where it prints none, ours and at least one point."""
        if self.paper is None:
            return None
        if self.measure in COUNTED:
            return CLOSE * self.paper
        if not is_percent(self.measure):
            return None
        if self.row is not None and self.row.std is not None:
            return 2 * self.row.std
        return max(1.0, 2 * (self.std or 0.0))

    @property
    def within(self) -> bool | None:
        """Whether the difference is within the tolerance; none where that cannot be said, as of a shortened run."""
        if self.measure not in COUNTED and any(one.content["length"] for one in self.found):
            return None
        if self.row is not None and self.row.printed == "DIVERGES" and self.found:
            return self.diverged == len(self.found)
        if self.difference is None or self.tolerance is None:
            return None
        return abs(self.difference) <= self.tolerance + 1e-9


Ranking = tuple[tuple[str, ...], ...]  # methods from best to worst, those with the same number together


@dataclass(frozen=True)
class Order:
    """The methods of one data set and setting from best to worst, there and here."""

    dataset: str
    setting: str
    paper: Ranking
    here: Ranking

    @property
    def pairs(self) -> int:
        methods = len(_places(self.paper))
        return methods * (methods - 1) // 2

    @property
    def agreeing(self) -> int:
        """Pairs of methods that stand in the same order: one before the other in both, or level in both."""
        there, here = _places(self.paper), _places(self.here)
        # `there` goes from best to worst, so that b never stands before a
        return sum(here[a] < here[b] if there[a] < there[b] else here[a] == here[b] for a, b in combinations(there, 2))


def _places(ranking: Ranking) -> dict[str, int]:
    return {method: n for n, level in enumerate(ranking) for method in level}


def _ranking(scores: Mapping[str, float]) -> Ranking:
    levels: dict[float, list[str]] = {}
    for method, score in scores.items():
        levels.setdefault(round(score, 6), []).append(method)  # the same share of pictures, whatever was added up first
    return tuple(tuple(levels[score]) for score in sorted(levels, reverse=True))


def entries(preset: Preset, results: Results, length: Length | None = None, variant: str = DEFAULT) -> list[Entry]:
    """Every number of a preset at one length, in the order of its cells."""
    made = [entry for cell in preset.of(variant) for entry in _of(cell, results, length or Length())]
    return [_relative(e, preset, variant, results, length or Length()) if e.measure in RATIOS else e for e in made]


def _of(cell: Cell, results: Results, length: Length) -> Iterable[Entry]:
    job = Job(cell, 0, length)
    for setting, measure in cell.measures.items():
        row, found = cell.rows.get(setting), results.by_seed(job, measure)
        whole = [(one, one.measures.get(measure)) for one in found.values()]
        values = tuple(value for _, value in whole if value is not None)
        diverged = sum(one.content.get("failure") is not None for one, _ in whole)
        strange = sum(value is None and bool(one.content.get(NOT_FINITE)) for one, value in whole)
        finished = tuple(one for one, _ in whole)
        yield Entry(cell, setting, measure, row, row.mean if row else None, finished, values, diverged, strange)


def _relative(entry: Entry, preset: Preset, variant: str, results: Results, length: Length) -> Entry:
    """A time relative to the reference method's, of pairs that were measured in the same circumstances.

    Where a variant does not change the reference, it is the default's.
    """
    own = entry.cell
    for cell in (*preset.of(variant), *preset.cells):
        same = (cell.dataset, cell.setting, cell.measures.get(entry.setting))
        if cell.method != preset.reference or same != (own.dataset, own.setting, entry.measure):
            continue
        printed = cell.rows[entry.setting].mean if entry.setting in cell.rows else None
        paper = entry.paper / printed if entry.paper is not None and printed else None
        found = comparable(Job(own, 0, length), Job(cell, 0, length), results)
        values = tuple(_seconds(one) / _seconds(base) for one, base in found.values())
        return replace(entry, paper=paper, found=tuple(one for one, _ in found.values()), values=values)
    return replace(entry, paper=None, found=(), values=())


def comparable(job: Job, reference: Job, results: Results) -> dict[int, tuple[Finished, Finished]]:
    """Times of a job's cell and of the reference's from the same circumstances, one pair for each seed."""
    bases: dict[str, Finished] = {}
    for base in results.timed(reference):
        bases.setdefault(base.circumstances, base)
    found: dict[int, tuple[Finished, Finished]] = {}
    for one in results.timed(job):
        if one.circumstances in bases:
            found.setdefault(one.seed, (one, bases[one.circumstances]))
    return dict(sorted(found.items()))


def untimed(job: Job, jobs: Sequence[Job], results: Results) -> bool:
    """Whether a job that is about nothing but time has to be run, though there is a result, to be compared with others.

    The reference has to be if there is one that it cannot be compared with, unless it was timed as it would be now.
    """
    if not job.timing:
        return False
    place = (job.cell.dataset, job.cell.setting, job.seed)
    same = [other for other in jobs if other.timing and (other.cell.dataset, other.cell.setting, other.seed) == place]
    reference = next((other for other in same if other.cell.method == Preset.reference), None)
    if reference is None:
        return False
    if job is not reference:
        return job.seed not in comparable(job, reference, results)
    apart = any(job.seed not in comparable(other, job, results) for other in same)
    return apart and not any(one.seed == job.seed and made_now(one, job) for one in results.timed(job))


def _seconds(one: Finished) -> float:
    value = one.measures["seconds"]
    assert value  # no round takes no time
    return value


def orders(made: Sequence[Entry]) -> list[Order]:
    """The ordering of methods by accuracy, wherever at least two have both a printed and a measured number."""
    found = []
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in made:
        if is_percent(entry.measure) and entry.paper is not None and entry.mean is not None:
            groups.setdefault((entry.cell.dataset, entry.setting), []).append(entry)
    for (dataset, setting), group in groups.items():
        if len(group) > 1:
            paper = _ranking({e.cell.method: e.paper or 0.0 for e in group})
            here = _ranking({e.cell.method: e.mean or 0.0 for e in group})
            found.append(Order(dataset, setting, paper, here))
    return found


def lengths(preset: Preset, results: Results) -> list[Length]:
    """The lengths at which a preset has results: the full one first, whether it has any or not."""
    keys = {}
    for one in results.all():
        label = str(one.content["length"])
        if label.startswith("scale=") and not one.probe:
            keys[label] = Length(float(label.removeprefix("scale=")))
    shorter = sorted(keys.values(), key=lambda length: -(length.scale or 0.0))
    some = [one for one in shorter if any(entry.found for entry in entries(preset, results, one))]
    return [Length(), *some]


def tried(preset: Preset, results: Results) -> list[tuple[Finished, dict[str, str]]]:
    """Results on a preset's cells with something changed, and what: probes, and what an earlier preset had."""
    current: dict[tuple[str, str, str, str], Cell] = {}
    for variant in (DEFAULT, *preset.variants):
        current |= {(c.dataset, c.setting, c.method, c.variant): c for c in preset.of(variant)}
    found = []
    for one in results.all():
        c = one.content
        if (c["paper"], c["preset"]) != (preset.paper, preset.name) or c["length"] == TINY:
            continue
        cell = current.get((c["dataset"], c["setting"], c["method"], c["variant"]))
        changes = one.probe or _changes(one, cell)
        if changes:
            found.append((one, changes))
    return sorted(found, key=lambda pair: str(pair[0].path))


def _changes(one: Finished, cell: Cell | None) -> dict[str, str]:
    """In which settings a result differs from what its cell is now; nothing where it is still the cell's."""
    if cell is None:
        return {"preset": "no longer has this cell"}
    label = str(one.content["length"])
    job = Job(cell, one.seed, Length.of(label.removeprefix("scale=")) if label else Length())
    if job.key == one.key:
        return {}
    now = job.settings.to_dict()
    then = {k: v for k, v in one.content["settings"].items() if k in now and k not in RECORD | {"seed"}}
    different = {k: spec.show(v) for k, v in then.items() if k != "method" and v != json.loads(json.dumps(now[k]))}
    if method_of(then) != method_of(now):
        different["method"] = str(method_of(then))
    return different or {"settings": "of an earlier version"}


def done(preset: Preset, results: Results) -> tuple[int, int, int]:
    """Cells with a number of the full length, with one of any length, and all cells.

    A run is not enough where a number is a ratio: it counts once it can be compared with the reference's.
    """
    shown = [
        {str(entry.cell) for entry in entries(preset, results, length) if entry.found}
        for length in lengths(preset, results)
    ]
    names = [str(cell) for cell in preset.cells]
    return sum(name in shown[0] for name in names), sum(name in set().union(*shown) for name in names), len(names)
