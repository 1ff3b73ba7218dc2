"""How long a run may take, as far as others like it tell."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isofed.papers.plan import Job
from isofed.papers.results import Results
from isofed.records import CONFIG, RunFolder

Lines = Sequence[Mapping[str, Any]]
EPOCHS = 5  # that a run has if it does not say


def needed(job: Job, results: Results, runs: Path, begun: Sequence[Job]) -> float:
    """Seconds that a job may still take: after its own rounds, others' that are done, or were begun; 0 if none tell."""
    lines = rounds_of(job, runs)
    left = job.settings.rounds - len(lines)
    own = each_round(lines)
    if own is not None:
        return own * left
    told = expected(job, results)
    if told is not None:
        return told * left / job.settings.rounds
    alike = [other for other in begun if other.kind == job.kind]
    paces = [pace * ratio for o in alike if (pace := each_round(rounds_of(o, runs))) and (ratio := _ratio(job, o))]
    return max(paces, default=0.0) * left


def expected(job: Job, results: Results) -> float | None:
    """Seconds of a whole run, after finished ones of the same data, network, device and precision.

    Those of the same method count where there are some, otherwise the slowest. A round takes as much longer as clients
    train longer in it.
    """
    s, method = job.settings, job.settings.to_dict()["method"]
    found: list[tuple[bool, float]] = []
    for one in results.all():
        c = one.content
        then, how, ratio = c["settings"], c["how"], _work_ratio(dict(s), c["settings"])
        same_kind = (then["data"], then["model"]) == (s.data, s.model)
        if same_kind and (how["device"], how["precision"]) == (s.device, s.precision) and c["rounds"] and ratio:
            rounds, took, after = int(c["rounds"]), float(c["seconds"]), float(c.get("after", 0.0))
            # What the first round took longer than the others is not taken again in every round of a longer run.
            usual = min(one.measures.get("seconds") or took / rounds, took / rounds)
            each = usual + float(c.get("evaluation", 0.0)) / rounds
            setup = took - rounds * usual
            found.append((then["method"] == method, each * ratio * s.rounds + setup + after))
    same = [seconds for mine, seconds in found if mine] or [seconds for _, seconds in found]
    return max(same, default=None)


def rounds_of(job: Job, runs: Path) -> Lines:
    """The rounds of a run that was begun."""
    folder = job.folder(runs)
    return RunFolder(folder).metrics() if (folder / CONFIG).exists() else []


def each_round(lines: Lines) -> float | None:
    """Seconds of a round with its evaluation, the first one aside, which sets things up."""
    taken = [float(line["seconds"]) + float(line.get("evaluate_seconds") or 0.0) for line in lines]
    return statistics.median(taken[1:]) if len(taken) > 1 else None


def _ratio(job: Job, other: Job) -> float | None:
    return _work_ratio(dict(job.settings), dict(other.settings))


def _work_ratio(one: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    """How much more the clients of a round compute; none where one counts epochs and the other steps."""
    amounts = []
    for s in (one, other):
        epochs, steps = s["local_epochs"], s["local_steps"]
        whole = not steps
        amounts.append((whole, (epochs or EPOCHS if whole else steps * (s["clients"] or 1)) * s["participation"]))
    (whole, mine), (theirs_whole, theirs) = amounts
    return mine / theirs if whole == theirs_whole and theirs else None
