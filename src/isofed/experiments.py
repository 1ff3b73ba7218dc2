"""Many runs as one: comparing methods over seeds, and tuning settings on a validation part.

Both keep every run in a folder of its own and do only what is missing there, so a command that was interrupted, or
is given one more method or seed, goes on from where it was.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isofed import spec
from isofed.config import HOW, Settings, show
from isofed.config import settings as make_settings
from isofed.data import Dataset, load
from isofed.engine.choose import available_cores, check_here, may_use_workers, steps_beside, worth_workers
from isofed.engine.serial import failure
from isofed.engine.workers import Pool
from isofed.engine.world import World, check_given
from isofed.errors import RunError, UserError, unknown
from isofed.federation import Federation
from isofed.methods import Composition, Method
from isofed.methods import parse as parse_method
from isofed.plugins import is_file_reference
from isofed.progress import Watcher
from isofed.records import COMPARISON, CONFIG, RESULT, TUNING, RunFolder
from isofed.result import Result
from isofed.resuming import check_data, check_files

if TYPE_CHECKING:
    from isofed.engine.ray_actors import Cluster


def _ignored(s: Settings) -> frozenset[str]:
    """Settings that do not make another run: how it is computed, and a target that it is only read against."""
    return HOW if s.stop_at_target else HOW | {"target"}


@dataclass(frozen=True)
class Plan:
    """One run to be made: its row in the table, its settings and its folder."""

    row: str
    settings: Settings
    folder: Path


@dataclass
class Batch:
    """Runs that have been made, by row and seed; ``failures`` holds the sentence of those that could not be."""

    results: dict[str, dict[int, Result]] = field(default_factory=dict)
    failures: dict[str, dict[int, str]] = field(default_factory=dict)


class BatchWatcher(Watcher):
    """A watcher that also hears which run is meant."""

    def batch(self, plans: Sequence[Plan]) -> None:
        """All runs of the batch."""

    def run(self, plan: Plan) -> None:
        """The run that the next calls are about."""

    def failed(self, plan: Plan, why: str) -> None:
        """The run could not be finished."""


def seeds_of(given: Any, first: int = 0) -> list[int]:
    """``3`` means three seeds from the first on; ``1,5,9`` or a list means those."""
    if isinstance(given, (list, tuple, range)) or "," in str(given):
        listed = given if isinstance(given, (list, tuple, range)) else [s for s in str(given).split(",") if s.strip()]
        seeds = [spec.convert(s, int, "seeds") for s in listed]
        if not seeds or len(set(seeds)) < len(seeds):
            raise UserError(f"seeds={spec.show(given)} must list at least one seed, and each only once")
        return seeds
    count = spec.convert(given, int, "seeds")
    if count < 1:
        raise UserError(f"seeds must be at least 1, not {count}")
    return list(range(first, first + count))


def plan_comparison(
    methods: Sequence[Any], seeds: Sequence[int], values: Mapping[str, Any], out: str | Path | None
) -> tuple[list[Plan], Path]:
    """The runs of a comparison, every one of them checked before the first starts."""
    if not methods:
        raise UserError("a comparison needs at least one method, for example: isofed compare fedavg fedprox seeds=3")
    built = [make_settings({**values, "method": m, "seed": s}) for s in seeds for m in methods]
    rows = [s.method.shown() for s in built]
    names = rows[: len(methods)]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"the method '{name}' is given twice; name each method once")
    root = Path(out) if out else Path("runs") / f"compare-{_short([_what(built[0])])}"
    _check_root(root, "comparison", TUNING)
    plans = [
        Plan(row, s, root / _slug(_stable(s.method)) / f"seed-{s.seed}") for row, s in zip(rows, built, strict=True)
    ]
    return plans, root


def plan_tuning(
    method: Any, grid: Mapping[str, Sequence[str]], seeds: Sequence[int], values: Mapping[str, Any], out: Path | None
) -> tuple[list[Plan], Path]:
    """A run for each point of a grid and each seed, judged on a validation part; the test part is left alone."""
    if not grid:
        raise nothing_to_tune()
    if not spec.convert(values.get("final_test", True), bool, "final_test"):
        raise UserError(
            "tune ends with the chosen setting on the test part; to leave that alone, compare settings with "
            "isofed compare ... validation=0.1 final_test=false"
        )
    base = {"validation": 0.1, **values, "final_test": False}
    if not float(spec.convert(base["validation"], float, "validation")) > 0:
        raise UserError("tuning needs a validation part; leave validation out (0.1 is then held out) or set it above 0")
    tried = [list(dict.fromkeys(values)) for values in grid.values()]  # a value that is given twice is tried once
    points = [dict(zip(grid, point, strict=True)) for point in itertools.product(*tried)]
    plans = []
    for point in points:
        row = " ".join(f"{k}={v}" for k, v in point.items())
        for seed in seeds:
            changed = apply_point({**base, "method": method, "seed": seed}, point)
            plans.append(Plan(row, make_settings(changed), Path(_slug(row)) / f"seed-{seed}"))
    digest = _short([p.settings.to_dict() for p in plans[:1]] + [dict(grid)])
    root = Path(out) if out else Path("runs") / f"tune-{digest}"
    _check_root(root, "tuning", COMPARISON)
    return [Plan(p.row, p.settings, root / p.folder) for p in plans], root


def nothing_to_tune(single: str | None = None) -> UserError:
    """The error for a grid of one point; ``single`` is a text with commas that was taken for one value."""
    said = "nothing to tune: give at least one setting several values, such as lr=0.01,0.03,0.1"
    if single:
        said += f"; '{single}' is one value, in which commas stand between options: several are written with those "
        said += "without options first, and each of the others by its name, as in augment=none,crop:2,crop:4"
    return UserError(said)


def _check_root(root: Path, what: str, other: str) -> None:
    """A folder is of one run, of one comparison or of one tuning."""
    if (root / CONFIG).exists():
        raise UserError(f"{root} holds a single run, with which a {what} would be mixed: choose another out=")
    if (root / f"{other}.json").exists():
        raise UserError(f"{root} holds a {other}, with which a {what} would be mixed: choose another out=")


def apply_point(values: Mapping[str, Any], point: Mapping[str, str]) -> dict[str, Any]:
    """Settings with a grid point put in; ``fedprox.mu`` means the option ``mu`` of the part ``fedprox``."""
    changed = dict(values)
    for key, value in point.items():
        part, dot, option = key.partition(".")
        if not dot:
            changed[key] = value
            continue
        if _has_objects(changed["method"]):
            changed["method"] = _changed(parse_method(changed["method"]), part, option, value)
            continue
        choices = spec.parse(changed["method"], "method")
        names = [c.name for c in choices]
        chosen = [n for n in names if n == part or n.endswith(f":{part}")]  # a class of a file goes by its own name
        if not chosen:
            raise unknown(f"part of the method '{changed['method']}' called", part, names)
        changed["method"] = "+".join(str(_with(c, option, value) if c.name in chosen else c) for c in choices)
    return changed


def _with(choice: spec.Choice, option: str, value: str) -> spec.Choice:
    others = [(k, v) for k, v in choice.options if k != option]
    return spec.Choice(choice.name, (*others, (option, value)))


def _has_objects(method: Any) -> bool:
    parts = method if isinstance(method, (list, tuple)) else [method]
    return any(isinstance(part, (Method, Composition)) for part in parts)


def _changed(method: Composition, part: str, option: str, value: str) -> Composition:
    """The same where a method was given as objects, whose parts also go by the names of their classes."""
    chosen = [name for name, one in method.parts if part in (name, type(one).__name__)]
    if not chosen:
        raise unknown(f"part of the method '{method.shown()}' called", part, [name for name, _ in method.parts])
    return Composition(
        tuple(
            (name, spec.make(type(one), _with(spec.describe(one, name), option, value), "method"))
            if name in chosen
            else (name, one)
            for name, one in method.parts
        )
    )


def final_plans(plans: Sequence[Plan], chosen: str, root: Path) -> list[Plan]:
    """The runs of a grid's chosen point on the whole training part, judged on the test part."""
    return [
        replace(
            p,
            settings=make_settings({**dict(p.settings), "validation": 0.0, "final_test": True}),
            folder=root / "chosen" / p.folder.parent.name / f"seed-{p.settings.seed}",
        )
        for p in plans
        if p.row == chosen
    ]


def run_all(
    plans: Sequence[Plan], watcher: BatchWatcher, dataset: Dataset | None = None, beside: Sequence[Plan] = ()
) -> Batch:
    """Make every run that is not there yet; a run that fails does not stop the others.

    ``dataset`` are data of the user's own, instead of those that the settings name; ``beside`` are runs that were made
    before, and that must be of the same data.
    """
    batch = Batch()
    for plan in plans:
        _check_folder(plan)
    for plan in _missing(plans):
        check_here(plan.settings)
    for s in {(p.settings.data, p.settings.root): p.settings for p in plans}.values():
        check_given(s, dataset)
    watcher.batch(plans)
    data = _Data(watcher, dataset)
    _check_data([*beside, *plans], data)
    with _pool(plans, _check_rows(plans, data)) as pool:
        for plan in plans:
            watcher.run(plan)
            try:
                result = _run(plan, data, pool, watcher)
            except UserError:
                raise
            except Exception as error:  # also what a method of the user's own may raise
                why = str(error) if isinstance(error, RunError) else f"it {failure(error)}"
                batch.failures.setdefault(plan.row, {})[plan.settings.seed] = why
                watcher.failed(plan, why)
            else:
                batch.results.setdefault(plan.row, {})[plan.settings.seed] = result
    if not batch.results:
        raise RunError(f"not one run could be finished; the first stopped because {next(_failures(batch))}")
    return batch


def _check_data(plans: Sequence[Plan], data: _Data) -> None:
    """Runs on data that have changed since do not stand in one table with others.

    Where nothing is missing, and all runs were made on the same data, which lie where they did, nothing is read.
    """
    groups: dict[tuple[str, str | None], list[Plan]] = {}
    for plan in plans:
        groups.setdefault((plan.settings.data, plan.settings.root), []).append(plan)
    for group in groups.values():
        made = [(p.settings, RunFolder.open(p.folder)) for p in group if (p.folder / CONFIG).exists()]
        noted = {folder.environment.get("data") for _, folder in made}
        moved = any(folder.config.get(key) != getattr(s, key) for s, folder in made for key in ("data", "root"))
        if len(noted) < 2 and not moved and not _missing(group):
            continue
        for s, folder in made:
            now = data.get(s)
            if folder.environment.get("data") != now.fingerprint:
                what = "be compared with runs on what they are now: put them back, or choose another out="
                check_data(folder, World.create(s, now), what)


def _check_rows(plans: Sequence[Plan], data: _Data) -> dict[str, float]:
    """A method that this network or these data do not suit is refused before any work.

    Gives about how many steps a run of each row takes that worker processes could take side by side.
    """
    steps: dict[str, float] = {}
    divided: set[tuple[Any, ...]] = set()  # by what decides who has what
    for plan in _missing(plans):
        s = plan.settings
        split = tuple(getattr(s, key) for key in ("data", "root", "partition", "clients", "validation", "seed"))
        if plan.row in steps and split in divided:
            continue
        try:
            if plan.row in steps:
                World.create(s, data.get(s))
            else:
                unrecorded = s.model_copy(update={"track": "none"})
                steps[plan.row] = steps_beside(Federation.on(data.get(s), unrecorded).world)
        except UserError as error:
            raise type(error)(f"{error} (with seed {s.seed})" if divided else str(error)) from error
        except Exception:  # a mistake in code of the user's own is this row's alone
            steps[plan.row] = 0.0
        divided.add(split)
    return steps


def _failures(batch: Batch) -> Iterator[str]:
    for by_seed in batch.failures.values():
        yield from by_seed.values()


def _run(plan: Plan, data: _Data, pool: Pool | Cluster | None, watcher: Watcher) -> Result:
    how = {k: getattr(plan.settings, k) for k in HOW}
    if (plan.folder / CONFIG).exists():
        folder = RunFolder.open(plan.folder)
        done = folder.result()
        if done is not None:
            result = Result.from_dict(done, folder.metrics(), folder.path)
            watcher.end(result)
            return result
        return Federation.resume(plan.folder, dataset=data.get(plan.settings), pool=pool, **how).fit(watcher)
    return Federation.on(data.get(plan.settings), plan.settings, pool=pool, out=plan.folder).fit(watcher)


def _check_folder(plan: Plan) -> None:
    """A folder that holds a run already must hold this one."""
    if not (plan.folder / CONFIG).exists():
        return
    wanted, folder = json.loads(json.dumps(plan.settings.to_dict())), RunFolder.open(plan.folder)
    check_files(folder, plan.settings)
    for key, value in folder.config.items():
        if key in _ignored(plan.settings) or _lies_elsewhere(key, value, wanted.get(key)):
            continue
        if wanted.get(key) != value:
            raise UserError(
                f"{plan.folder} holds a run with {key}={show(key, value)}, not {show(key, wanted.get(key))}; "
                "choose another out="
            )


def _lies_elsewhere(key: str, before: Any, now: Any) -> bool:
    """Whether a setting only says that data lie in another place now; that they are the same is checked."""
    if key != "data":
        return key == "root"
    paths = [str(value) for value in (before, now)]
    options = {path.rpartition(":")[2] if "=" in path.rpartition(":")[2] else "" for path in paths}
    return all(map(os.path.isabs, paths)) and len(options) == 1


class _Data:
    """The last data set that was needed, so that it is read once for many runs."""

    def __init__(self, watcher: Watcher, given: Dataset | None) -> None:
        self._watcher, self._given = watcher, given
        self._key: tuple[str, str | None] | None = None
        self._dataset: Dataset | None = None

    def get(self, s: Settings) -> Dataset:
        if self._given is not None:
            return self._given
        if self._dataset is None or self._key != (s.data, s.root):
            self._dataset, self._key = load(s.data, s.root, self._watcher.reading), (s.data, s.root)
        return self._dataset


def _missing(plans: Sequence[Plan]) -> list[Plan]:
    """The runs that are still to be made."""
    return [p for p in plans if not (p.folder / RESULT).exists()]


@contextmanager
def _pool(plans: Sequence[Plan], steps: Mapping[str, float]) -> Iterator[Pool | Cluster | None]:
    """One set of worker processes or actors for all runs that are still to be made, where they are worth it together.

    ``steps`` are those of a run of each row.
    """
    missing = [p.settings for p in _missing(plans)]
    able = [p for p in _missing(plans) if may_use_workers(p.settings)]
    total = sum(steps[p.row] for p in able)
    if any(s.executor == "ray" for s in missing):
        from isofed.engine.ray_actors import Cluster

        shared: Pool | Cluster = Cluster(missing[0].actors, missing[0].device != "cpu")
    elif any(worth_workers(p.settings, total) for p in able):
        shared = Pool(missing[0].workers or available_cores())
    else:
        yield None
        return
    with closing(shared):
        yield shared


def _slug(text: str) -> str:
    """A text as a folder name that still tells a person what it is."""
    plain = "".join(c if c.isalnum() or c in "+=.,-" else "_" for c in text.replace(":", "-").replace(" ", ","))
    return plain if len(plain) <= 80 else f"{plain[:60]}-{_short([text])}"


def _what(s: Settings) -> dict[str, Any]:
    """What the runs of a comparison have in common, whoever computes them: what its folder is named by."""
    return {k: v for k, v in s.to_dict().items() if k not in _ignored(s) | {"method", "seed"}}


def _stable(method: Composition) -> str:
    """A method's text that is the same from whichever folder it is looked at; files go by name and a digest."""
    files = [name for name, _ in method.parts if is_file_reference(name)]
    parts = [spec.describe(m, Path(n).name if n in files else n) for n, m in method.parts]
    return "+".join(map(str, parts)) + (f"-{_short(files)}" if files else "")


def _short(things: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(things, sort_keys=True, default=str).encode(), digest_size=4).hexdigest()
