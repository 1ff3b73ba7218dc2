"""Running what is missing within a time budget, on any machine, from wherever it stopped."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isofed.data import Dataset
from isofed.diagnose import Diagnosis, Options, diagnosed
from isofed.engine.world import World
from isofed.errors import RunError, UserError
from isofed.federation import Federation
from isofed.papers import figures, presets, tiny
from isofed.papers.budget import Budget, BudgetOver, Telling, Timed, terminated
from isofed.papers.data import Data
from isofed.papers.measure import Run, measured
from isofed.papers.plan import HOW, Job
from isofed.papers.presets import DEFAULT
from isofed.papers.results import Results, code_version, head
from isofed.records import CHECKPOINTS, CONFIG, KEPT, METRICS, MODEL, RunFolder

RESUMED = HOW - {"precision", "deterministic"}  # what may change when a run goes on


@dataclass
class Outcome:
    """What a call of :func:`run` has done."""

    finished: int = 0
    missing: int = 0  # jobs that are still to be run, here or elsewhere
    failures: dict[str, str] = field(default_factory=dict)
    over: bool = False  # whether the budget ended it


def run(
    jobs: Sequence[Job],
    results: Results,
    runs: Path,
    budget: Budget,
    tell: Telling,
    *,
    whole: bool = False,
    keep: bool = False,
) -> Outcome:
    """Run the jobs that have no result yet, in order, for as long as the budget lasts.

    Args:
        runs: the folder of the run folders, which hold what is needed to go on.
        whole: begin only what can be expected to be finished within the budget.
        keep: leave checkpoints and models of finished runs where they are; otherwise only their records stay.
    """
    outcome, data = Outcome(), Data(tell.reading)
    todo = [job for job in jobs if results.of(job) is None]
    absent: dict[str, str] = {}
    with terminated():
        for number, job in enumerate(todo, 1):
            if results.of(job) is not None:  # another cell of this table was the same run
                outcome.finished += 1
                continue
            if job.settings.data in absent:
                continue
            try:
                budget.check(_needed(job, results, runs) if whole else 0.0)
                dataset = data.get(job)
            except BudgetOver:
                outcome.over = True
                break
            except UserError as error:
                absent[job.settings.data] = str(error)
                waiting = sum(1 for other in todo if other.settings.data == job.settings.data)
                tell.left_out(job.settings.data, waiting, str(error))
                continue
            tell.cell(number, len(todo), job)
            try:
                _one(job, jobs, dataset, results, runs, budget, tell, whole)
            except BudgetOver:
                outcome.over = True
                break
            except RunError as error:
                outcome.failures[str(job)] = str(error)
                tell.failed(job, str(error))
            else:
                outcome.finished += 1
                if not keep:
                    _tidy(job, todo, results, runs)
    outcome.missing = sum(1 for job in jobs if results.of(job) is None)
    if todo and len(absent) and outcome.missing == len(todo) and not outcome.over and not outcome.failures:
        raise UserError(next(iter(absent.values())))
    return outcome


def _one(
    job: Job,
    jobs: Sequence[Job],
    dataset: Dataset,
    results: Results,
    runs: Path,
    budget: Budget,
    tell: Telling,
    whole: bool,
) -> None:
    """One job from wherever it is to its result."""
    folder, began = job.folder(runs), time.monotonic()
    federation = _take_up(job, jobs, dataset, runs)
    try:
        result = federation.fit(Timed(tell, budget, whole))
    except RunError as error:
        if "NaN" not in str(error):
            raise
        written = RunFolder.open(folder)
        more = {"failure": str(error), "measures": {}, **_record(written, written.metrics())}
        results.write(job, head(job) | more)
        tell.failed(job, f"it diverged, which is recorded as its result: {error}")
        return
    if time.monotonic() - began > 1 and job.cell.diagnose:
        budget.check()
    written = RunFolder.open(folder)
    diagnosis = _diagnose(job, dataset, folder)
    made = Run(World.create(federation.settings, dataset), result, diagnosis)
    lines = written.diagnostics()
    measures = measured(made, [*job.cell.measures.values(), *job.cell.also]) | figures.measured(lines, diagnosis)
    content = head(job) | {"measures": measures, **_record(written, result.history)}
    content |= {"exchanges": [_brief(line) for line in result.exchanges], "notes": result.notes}
    results.write(job, content | figures.numbers(lines, diagnosis, job.cell.figure.get("diagnosis", [])))
    tell.finished(job, measures)


def _needed(job: Job, results: Results, runs: Path) -> float:
    """Seconds that a run may still take, as far as others like it tell."""
    expected = results.expected(job) or 0.0
    lines = RunFolder(job.folder(runs)).metrics() if (job.folder(runs) / CONFIG).exists() else []
    return expected * (1 - len(lines) / job.settings.rounds)


def _take_up(job: Job, jobs: Sequence[Job], dataset: Dataset, runs: Path) -> Federation:
    """The run as its folder has it; a new one, or one that branches off from the end of another, if there is none."""
    folder, s = job.folder(runs), job.settings
    if not (folder / CONFIG).exists():
        base = _base(job, jobs)
        ended = base.folder(runs) if base else None
        if ended is None or not _branch(ended, folder, job):
            return Federation(out=folder, dataset=dataset, **dict(s))
    return Federation.resume(folder, dataset=dataset, **{k: getattr(s, k) for k in RESUMED})


def _base(job: Job, jobs: Sequence[Job]) -> Job | None:
    """The job with the same training, if what follows the last round is all that differs.

    A variant may be such a row too; it then differs from the default variant's, which need not be among the jobs.
    """
    cell = job.cell
    if cell.after is None:
        return None
    cells = [other.cell for other in jobs]
    if cell.variant != DEFAULT:
        cells += presets.load(cell.paper, cell.preset).cells
    for c in cells:
        same = (c.paper, c.preset, c.dataset, c.setting) == (cell.paper, cell.preset, cell.dataset, cell.setting)
        if same and c.method == cell.after and c.after is None:
            return replace(job, cell=c)
    return None


def _branch(ended: Path, folder: Path, job: Job) -> bool:
    """Copy the last state of a finished run, so that only what follows it is done anew."""
    if not (ended / CONFIG).exists():
        return False
    base = RunFolder.open(ended)
    last = base.latest()
    if last is None or last.round != job.settings.rounds or base.result() is None:
        return False
    made = RunFolder.create(folder, job.settings.to_dict(), base.environment)
    shutil.copytree(ended / CHECKPOINTS, made.path / CHECKPOINTS)
    shutil.copy(ended / METRICS, made.path / METRICS)
    return True


def _tidy(job: Job, todo: Sequence[Job], results: Results, runs: Path) -> None:
    """Remove the models of finished runs that nobody is going to branch off from."""
    base = _base(job, todo)
    for one in (job, base) if base else (job,):
        waiting = [other for other in todo if results.of(other) is None and _base(other, todo) == one]
        folder = one.folder(runs)
        if waiting or results.of(one) is None or not folder.is_dir():
            continue
        for name in (CHECKPOINTS, KEPT):
            shutil.rmtree(folder / name, ignore_errors=True)
        with suppress(OSError):
            (folder / MODEL).unlink()


def _diagnose(job: Job, dataset: Dataset, folder: Path) -> dict[str, Any]:
    if not job.cell.diagnose:
        return {}
    given = tiny.options(job.cell.diagnose) if job.length.label == tiny.TINY else job.cell.diagnose
    options = Options.of({key: str(value) for key, value in given.items()} | {"device": job.settings.device})
    known = RunFolder.open(folder).diagnosis()
    if set(options.sections) <= set(known):
        return known
    try:
        return diagnosed(Diagnosis(folder, options, dataset=dataset))
    except (UserError, ValueError) as error:  # such as a missing package, or a Hessian that is not finite
        raise RunError(f"the run is finished but cannot be diagnosed: {error}") from error


def _record(folder: RunFolder, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a run was made with, and its curve."""
    judged = [line for line in history if line.get("accuracy") is not None]
    curve = {"round": [line["round"] for line in judged]}
    for name in ("accuracy", "loss", "train_loss"):
        if judged and judged[-1].get(name) is not None:
            curve[name] = [float(f"{line[name]:.5g}") if line[name] is not None else None for line in judged]
    known = ("isofed", "python", "torch", "numpy", "device", "device_name", "data")
    environment = {k: folder.environment[k] for k in known} | {"code": code_version()}
    events = sum(len(line["events"]) for line in history)
    seconds = float(f"{sum(line['seconds'] for line in history):.5g}")
    return {"environment": environment, "rounds": len(history), "seconds": seconds, "events": events, "curve": curve}


def _brief(line: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in line.items() if k not in ("class_accuracy", "client_accuracy")}
