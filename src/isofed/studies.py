"""Comparing and tuning from Python: what ``isofed compare`` and ``isofed tune`` do, with plain values at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isofed import spec, tables
from isofed.data import Dataset
from isofed.data.base import check_dataset
from isofed.engine.world import GIVEN
from isofed.errors import UserError
from isofed.experiments import Batch, BatchWatcher, Plan, final_plans, plan_comparison, plan_tuning, run_all, seeds_of
from isofed.methods import Composition, Method
from isofed.records import COMPARISON, TUNING
from isofed.result import Result


@dataclass(frozen=True)
class Comparison:
    """Methods over the same seeds: a row of the table for each, and every run by method and seed."""

    rows: list[tables.Row]
    results: dict[str, dict[int, Result]]


@dataclass(frozen=True)
class Tuning:
    """The points of a grid, judged on a validation part, and the best of them, judged on the test part once."""

    trials: list[tables.Trial]
    chosen: str
    row: tables.Row


def compare(
    methods: Sequence[Any] | Method | Composition,
    *,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    dataset: Dataset | None = None,
    watcher: BatchWatcher | None = None,
    **settings: Any,
) -> Comparison:
    """Compare methods over seeds, on the same splits and initial weights; the others are compared with the first.

    >>> found = compare(["fedavg", "fedprox:mu=1"], data="synthetic:samples=100,test=20", model="mlp", clients=2,
    ...                 partition="iid", rounds=1, executor="serial")
    >>> [row.method for row in found.rows]
    ['fedavg', 'fedprox:mu=1']

    Args:
        methods: each as in a run; one alone may stand without a list.
        seeds: 3 means three seeds from ``seed`` on; a list means those.
        out: the folder that keeps the runs and the table, and goes on with those that are there; none are kept without.
        dataset: data of your own; where ``data`` is given as well, it must name the same.
        watcher: hears how far it is.
        settings: everything else, as in a run.
    """
    values = _values(settings, dataset)
    chosen = seeds_of(seeds, int(values.pop("seed", 0)))
    with _folder(out) as folder:
        listed = [methods] if isinstance(methods, (str, Method, Composition)) else methods
        plans, root = plan_comparison(listed, chosen, values, folder)
        batch = run_all(plans, watcher or BatchWatcher(), dataset)
        rows, _ = record_comparison(plans, batch, chosen, root)
    kept = batch.results if out else {m: _unrecorded(by_seed) for m, by_seed in batch.results.items()}
    return Comparison(rows, kept)


def tune(
    method: Any,
    grid: Mapping[str, Sequence[Any]],
    *,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    dataset: Dataset | None = None,
    watcher: BatchWatcher | None = None,
    **settings: Any,
) -> Tuning:
    """Try every point of a grid on a validation part, then judge the best on the test part, once.

    Args:
        method: as in a run.
        grid: the values to try of each setting; ``fedprox.mu`` means the option ``mu`` of the part ``fedprox``.
        seeds, out, dataset, watcher, settings: as for :func:`compare`.
    """
    values = _values(settings, dataset)
    chosen_seeds = seeds_of(seeds, int(values.pop("seed", 0)))
    points = _points(grid)
    with _folder(out) as folder:
        plans, root = plan_tuning(method, points, chosen_seeds, values, folder)
        watch = watcher or BatchWatcher()
        batch = run_all(plans, watch, dataset)
        trials = tables.tuning(batch, list(dict.fromkeys(p.row for p in plans)))
        chosen = next(t.setting for t in trials if t.chosen)
        finals = final_plans(plans, chosen, root)
        row = tables.comparison(run_all(finals, watch, dataset, beside=plans), [chosen])[0]
        record_tuning(method, trials, row, chosen_seeds, root)
    return Tuning(trials, chosen, row)


def record_comparison(
    plans: Sequence[Plan], batch: Batch, seeds: list[int], root: Path
) -> tuple[list[tables.Row], tuple[Path, Path]]:
    """The table of a comparison whose runs are there, and the files that it was written to."""
    s = plans[0].settings
    rows = tables.comparison(batch, list(dict.fromkeys(p.row for p in plans)), s.target)
    more = {"data": s.data, "partition": s.partition, "rounds": s.rounds, "seeds": seeds, "target": s.target}
    return rows, tables.write(rows, root, COMPARISON, more)


def record_tuning(method: Any, trials: list[tables.Trial], row: tables.Row, seeds: list[int], root: Path) -> None:
    """Write down the points of a grid, and what the chosen one reached on the test part."""
    more = {"method": str(method), "chosen": row.method, "test_accuracy": row.accuracy, "seeds": seeds}
    tables.write(trials, root, TUNING, more)


def _points(grid: Any) -> dict[str, list[str]]:
    """The values to try of each setting, as texts."""
    if not isinstance(grid, Mapping):
        raise UserError("the grid must be a dict with the values to try, such as {'lr': [0.01, 0.1]}")
    for key, tried in grid.items():
        if isinstance(tried, str) or not isinstance(tried, Iterable):
            raise UserError(f"the values to try of '{key}' must be a list, such as [{spec.show(tried)}]")
    points = {key: [str(value) for value in tried] for key, tried in grid.items()}
    for key, texts in points.items():
        if not texts:
            raise UserError(f"'{key}' has no value to try: give at least one")
    return points


def _values(settings: Mapping[str, Any], dataset: Dataset | None) -> dict[str, Any]:
    check_dataset(dataset)
    given = {} if dataset is None else {"data": f"{GIVEN}:{dataset.name}"}
    return {**given, **settings}


@contextmanager
def _folder(out: str | Path | None) -> Iterator[Path]:
    if out is not None:
        yield Path(out)
        return
    with tempfile.TemporaryDirectory(prefix="isofed-") as folder:
        yield Path(folder) / "runs"


def _unrecorded(by_seed: Mapping[int, Result]) -> dict[int, Result]:
    return {seed: replace(result, folder=None) for seed, result in by_seed.items()}
