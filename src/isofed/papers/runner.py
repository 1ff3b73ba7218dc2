"""Running what is missing within a time budget, on any machine, from wherever it stopped."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from isofed.data import Dataset
from isofed.diagnose import NOT_FINITE, Diagnosis, Options, diagnosed, missing
from isofed.engine.choose import check_here
from isofed.errors import RunError, UserError
from isofed.federation import Federation
from isofed.memory import shortage
from isofed.papers import budget as budgets
from isofed.papers import figures, pace, presets
from isofed.papers.budget import Budget, BudgetOver, Telling, Timed
from isofed.papers.compare import untimed
from isofed.papers.data import Data
from isofed.papers.measure import Run, measured
from isofed.papers.plan import HOW, Job
from isofed.papers.presets import DEFAULT
from isofed.papers.results import Results, code_version, head
from isofed.records import CHECKPOINTS, CONFIG, KEPT, METRICS, MODEL, RunFolder
from isofed.stopping import terminated

RESUMED = HOW - {"precision", "deterministic"}  # what may change when a run goes on


@dataclass
class Outcome:
    """What a call of :func:`run` has done."""

    finished: int = 0
    missing: int = 0  # jobs that are still to be run, here or elsewhere
    failures: dict[str, str] = field(default_factory=dict)
    over: bool = False  # whether the budget ended it
    put_off: dict[str, float] = field(default_factory=dict)  # jobs that would not have ended in time: seconds they need


def run(
    jobs: Sequence[Job],
    results: Results,
    runs: Path,
    budget: Budget,
    tell: Telling,
    *,
    whole: bool = False,
    keep: bool = False,
    alone: bool = True,
    data: Data | None = None,
) -> Outcome:
    """Run the jobs that have no result yet, in order, for as long as the budget lasts.

    Args:
        runs: the folder of the run folders, which hold what is needed to go on.
        whole: run only what can be expected to be finished within the budget, and put off the rest.
        keep: leave checkpoints and models of finished runs where they are; otherwise only their records stay.
        alone: whether nothing else is run on the machine, so that times may be compared.
        data: data sets that were read before, for calls one after another.
    """
    outcome, data, begun = Outcome(), data or Data(tell.reading), list[Job]()
    todo = [job for job in jobs if _missing(job, jobs, results) and (alone or not job.timing)]
    _check(todo, results)
    absent: dict[str, str] = {}
    with terminated():
        for number, job in enumerate(todo, 1):
            if not _missing(job, jobs, results):  # another cell of this table was the same run
                outcome.finished += 1
                continue
            if job.settings.data in absent:
                continue
            try:
                budget.check()
                needed = _needed(job, jobs, results, runs, begun) if whole else 0.0
                if budget.left < needed + budgets.RESERVE:
                    _put_off(job, needed, outcome, budget, tell)
                    continue
                dataset = data.get(job)
            except BudgetOver:
                outcome.over = True
                break
            except UserError as error:
                absent[job.settings.data] = str(error)
                continue
            tell.cell(number, len(todo), job)
            begun.append(job)
            try:
                _one(job, jobs, dataset, results, runs, budget, tell, whole, alone)
            except BudgetOver:
                if whole:  # something shorter may still fit
                    _put_off(job, _needed(job, jobs, results, runs, begun), outcome, budget, tell)
                    continue
                outcome.over = True
                break
            except RunError as error:
                outcome.failures[str(job)] = str(error)
                tell.failed(job, str(error))
            else:
                outcome.finished += 1
                if not keep:
                    _tidy(job, todo, results, runs)
    outcome.over = outcome.over or bool(outcome.put_off)
    outcome.missing = sum(1 for job in jobs if _missing(job, jobs, results))
    if todo and len(absent) and outcome.missing == len(todo) and not outcome.over and not outcome.failures:
        raise UserError("; ".join(absent.values()))
    for name, why in absent.items():
        tell.left_out(name, sum(job.settings.data == name for job in todo), why)
    return outcome


def _check(todo: Sequence[Job], results: Results) -> None:
    """Refuse what could not be run here, or not be written, before anything is read."""
    if todo:
        results.check()
    for job in todo:
        check_here(job.settings)


def _missing(job: Job, jobs: Sequence[Job], results: Results) -> bool:
    """Whether a job has to be run."""
    return results.of(job) is None or untimed(job, jobs, results)


def _one(
    job: Job,
    jobs: Sequence[Job],
    dataset: Dataset,
    results: Results,
    runs: Path,
    budget: Budget,
    tell: Telling,
    whole: bool,
    alone: bool,
) -> None:
    """One job from wherever it is to its result."""
    folder = job.folder(runs)
    if job.timing and (folder / CONFIG).exists():
        with RunFolder(folder).lock():  # a time is of one process, so what another has left is begun anew
            shutil.rmtree(folder)
    federation = _take_up(job, jobs, dataset, runs)
    before = len(pace.rounds_of(job, runs))
    made = head(job, federation.settings) | ({"resumed": before} if before else {})
    if before >= federation.settings.rounds:  # what is left to do says nothing about how it was trained
        config = RunFolder.open(folder).config
        made["how"] |= {name: config[name] for name in made["how"] if name in config}
        if (known := results.undiagnosed(job)) is not None:
            made = {**head(job, federation.settings), "how": made["how"]}
            made |= {name: known.content[name] for name in ("resumed", "alone") if name in known.content}
    made |= {} if alone else {"alone": False}
    try:
        result = federation.fit(Timed(tell, budget, whole))
    except RunError as error:
        if "NaN" not in str(error):
            raise
        written = RunFolder.open(folder)
        more = {"failure": str(error), "measures": {}, **_record(written, written.metrics())}
        results.write(job, made | more)
        tell.failed(job, f"it diverged, which is recorded as its result: {error}")
        return
    ended, written = time.monotonic(), RunFolder.open(folder)
    names, lines = [*job.cell.measures.values(), *job.cell.also], written.diagnostics()
    content = made | {"measures": {}, **_record(written, result.history), "after": 0.0, "executor": result.executor}
    content |= {"exchanges": [_brief(line) for line in result.exchanges], "notes": result.notes}
    if job.cell.diagnose:
        # That may take long: whatever becomes of it, and of the run's folder, what is known by now stays known.
        so_far = measured(Run(federation.world, result, {}), names)
        so_far = {name: value for name, value in so_far.items() if value is not None}
        results.write(job, content | {"measures": so_far, "undiagnosed": True})
    diagnosis = _diagnose(job, dataset, folder, budget, whole, tell)
    measures = measured(Run(federation.world, result, diagnosis), names) | figures.measured(lines, diagnosis)
    content |= {"measures": measures, "after": float(f"{time.monotonic() - ended:.5g}")}
    if strange := diagnosis.get(NOT_FINITE):
        content[NOT_FINITE] = strange
        for section, why in strange.items():
            tell.note(f"{section} of {job} is {missing(diagnosis, section)}: {why}")
    results.write(job, content | figures.numbers(lines, diagnosis, job.cell.figure.get("diagnosis", [])))
    tell.finished(job, measures)


def _needed(job: Job, jobs: Sequence[Job], results: Results, runs: Path, begun: Sequence[Job]) -> float:
    """Seconds that a job may still take, as far as others like it tell."""
    base = _base(job, jobs)
    if base and not (job.folder(runs) / CONFIG).exists() and _ended(base.folder(runs), job):
        return 0.0  # it only has to ask what follows the last round
    return pace.needed(job, results, runs, begun)


def _put_off(job: Job, needed: float, outcome: Outcome, budget: Budget, tell: Telling) -> None:
    outcome.put_off[str(job)] = needed
    tell.put_off(job, needed, budget.left - budgets.RESERVE)


def _take_up(job: Job, jobs: Sequence[Job], dataset: Dataset, runs: Path) -> Federation:
    """The run as its folder has it; a new one, or one that branches off from the end of another, if there is none."""
    folder, s = job.folder(runs), job.settings
    if not (folder / CONFIG).exists():
        base = _base(job, jobs)
        ended = base.folder(runs) if base else None
        if ended is None or not _branch(ended, folder, job):
            return Federation.on(dataset, s, out=folder)
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
    base = _ended(ended, job)
    last = base.latest() if base else None
    if base is None or last is None or (folder / CHECKPOINTS).exists():
        return False
    # Made beside its place and then put there: a kill on the way must not leave half a run.
    beside, settings = folder.with_name(f"{folder.name}.new"), job.settings.to_dict()
    shutil.rmtree(beside, ignore_errors=True)
    made = RunFolder.create(beside, settings, base.environment)
    shutil.copytree(ended / CHECKPOINTS, made.path / CHECKPOINTS)
    shutil.copy(ended / METRICS, made.path / METRICS)
    made.checkpoint(last.round, last.tensors, last.info | {"settings": settings})  # it is this run's state now
    shutil.rmtree(folder, ignore_errors=True)  # at most what a run leaves that was killed before it began
    beside.rename(folder)
    return True


def _ended(folder: Path, job: Job) -> RunFolder | None:
    """A finished run with the rounds and the precision of a job, whose last state is still there."""
    if not (folder / CONFIG).exists():
        return None
    base, s = RunFolder.open(folder), job.settings
    last = base.latest()
    same = (base.config["precision"], base.config["deterministic"]) == (s.precision, s.deterministic)
    return base if last and last.round == s.rounds and base.result() is not None and same else None


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


def _diagnose(job: Job, dataset: Dataset, folder: Path, budget: Budget, whole: bool, tell: Telling) -> dict[str, Any]:
    """What is measured after the last round; if the budget ends before it does, it is begun anew another time."""
    if not job.cell.diagnose:
        return {}
    given = {key: str(value) for key, value in job.length.diagnosis(job.cell.diagnose).items()}
    options = Options.of(given | {"device": job.settings.device})
    known = RunFolder.open(folder).diagnosis()
    if set(options.sections) <= set(known):
        return known

    if job.settings.keep_clients != "none" and not any((folder / KEPT).glob("*client*")):
        raise RunError(f"the clients' models that are to be measured are gone from {folder}; remove it to train anew")

    def heard(section: str, done: int, of: int) -> None:
        if budget.left < budgets.RESERVE / 2:
            raise BudgetOver
        tell.diagnosing(section, done, of)

    def begun(run: Diagnosis, section: str) -> Callable[[int, int], None]:
        heard(section, 0, 1)
        return partial(heard, section)

    try:
        diagnosis = Diagnosis(folder, options, dataset=dataset)
        if whole:
            budget.check(sum(diagnosis.seconds(name, diagnosis.a_pass) for name in options.sections))
        return diagnosed(diagnosis, begun)
    except (UserError, ValueError) as error:  # such as a missing package
        raise RunError(f"the run is finished but cannot be diagnosed: {error}") from error
    except (RuntimeError, MemoryError) as error:
        if (why := shortage(error)) is None:
            raise
        raise RunError(f"the run is finished but cannot be diagnosed: {why}") from error


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
    evaluation = float(f"{sum(line.get('evaluate_seconds') or 0.0 for line in history):.5g}")
    times = {"seconds": seconds, "evaluation": evaluation}
    return {"environment": environment, "rounds": len(history), **times, "events": events, "curve": curve}


def _brief(line: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in line.items() if k not in ("class_accuracy", "client_accuracy")}
