"""Reading runs for a page: whole ones, unfinished ones and those that are being written, never writing anything."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isofed import spec
from isofed.config import HOW, show
from isofed.config import settings as make_settings
from isofed.data import partition as partitions
from isofed.data.describe import domains_of
from isofed.engine.world import GIVEN, World
from isofed.errors import IsofedError, UserError
from isofed.experiments import Batch
from isofed.methods import find
from isofed.plugins import is_file_reference
from isofed.records import CONFIG, ENVIRONMENT, METRICS, RESULT, RunFolder
from isofed.report.data_sets import data_sets
from isofed.report.own_files import file_names, with_names
from isofed.result import Result

DIAGNOSTICS, DIAGNOSIS = "diagnostics.jsonl", "diagnosis.json"
_SAME_ROW = HOW | {"seed", "target", "diagnose", "track", "keep", "keep_clients"}
_MOST_CLIENTS = 300  # of a split that is drawn
_MOST_SPLITS = 5  # on a page
_DEPTH = 3  # folders below a given one in which runs are looked for


@dataclass(frozen=True)
class Run:
    """One run folder as it was at one moment."""

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    history: list[dict[str, Any]]
    result: Result | None
    diagnostics: list[dict[str, Any]]
    diagnosis: dict[str, Any]
    created: int  # when its configuration was written, in nanoseconds
    updated: float  # when its last round was, in seconds

    @property
    def seed(self) -> int:
        return int(self.config.get("seed") or 0)

    @property
    def rounds(self) -> int:
        """Rounds that were asked for."""
        return int(self.config.get("rounds") or len(self.history))

    @property
    def full_method(self) -> str:
        """The method as a person would type it; a file goes by its whole path."""
        return self.result.method if self.result else method_text(self.config.get("method"))

    @property
    def method(self) -> str:
        """The same in short; a file goes by its name."""
        return with_names(self.full_method)

    @property
    def measured(self) -> list[dict[str, Any]]:
        """Spectra and alignment by round: as recorded during the run, else as found on the models that it kept."""
        lines = {line["round"]: line for line in _afterwards(self.diagnosis)}
        lines |= {line["round"]: lines.get(line["round"], {}) | line for line in self.diagnostics}
        return [lines[number] for number in sorted(lines)]

    @property
    def flops(self) -> float | None:
        """Of a training sample, forward and backward, if ``isofed diagnose`` has counted them."""
        found = inside(self.diagnosis, "cost", "flops_per_sample")
        return float(found) if isinstance(found, (int, float)) else None

    @property
    def asked(self) -> bool:
        """Whether the final model is another than that of the last round: clients were asked once more after it."""
        return bool(self.result and self.result.exchanges)

    @property
    def on_cpu(self) -> bool:
        return str(self.environment.get("device") or "cpu").startswith("cpu")

    @property
    def pooled(self) -> bool:
        """Whether it is no federation: nothing was sent."""
        return bool(self.history) and not any(line.get("bytes_up") or line.get("bytes_down") for line in self.history)


@dataclass(frozen=True)
class Found:
    """Runs by row of a table and seed; ``problems`` are sentences about folders that could not be read."""

    rows: dict[str, dict[int, Run]]
    target: float | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def runs(self) -> list[Run]:
        return [run for by_seed in self.rows.values() for run in by_seed.values()]

    @property
    def batch(self) -> Batch:
        """The finished runs, for the table of a comparison."""
        done = {row: {s: r.result for s, r in by_seed.items() if r.result} for row, by_seed in self.rows.items()}
        return Batch({row: results for row, results in done.items() if results})

    @property
    def methods(self) -> set[str]:
        """The methods of all runs; different code is another method, whatever its file is called."""
        return set(_methods(self.runs, file_names(self.runs)))

    def common(self) -> dict[str, Any]:
        """The settings that all runs share."""
        first = self.runs[0].config if self.rows else {}
        return {k: v for k, v in first.items() if all(run.config.get(k) == v for run in self.runs)}

    def labels_by_data(self) -> dict[str, list[str]]:
        """The rows that were judged on the same samples, by the name of the data."""
        labels: dict[str, list[str]] = {}
        firsts = {label: next(iter(by_seed.values())) for label, by_seed in self.rows.items()}
        names = dict(zip((run.path for run in self.runs), data_sets(self.runs), strict=True))
        for label, run in firsts.items():
            labels.setdefault(names[run.path], []).append(label)
        return labels

    def by_data(self) -> dict[str, Found]:
        """The runs of each data set by themselves, their rows named without what all of them share."""
        groups = self.labels_by_data()
        if len(groups) < 2:
            return dict.fromkeys(groups, self)
        runs = {name: [r for label in labels for r in self.rows[label].values()] for name, labels in groups.items()}
        return {name: Found(_by_row(of, (), []), self.target) for name, of in runs.items()}


class Reader:
    """Reads folders again and again; a run whose files have not changed is not read twice."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[Any, Run]] = {}

    def read(self, paths: Iterable[Path]) -> Found:
        """All runs in and below these folders."""
        runs: list[Run] = []
        problems: list[str] = []
        listed: list[str] = []
        target: float | None = None
        seen: set[Path] = set()
        for path in paths:
            here = []
            for folder in run_folders(path):
                if folder.resolve() in seen:  # given as itself and as a part of a comparison
                    continue
                seen.add(folder.resolve())
                try:
                    here.append(self._run(folder))
                except (IsofedError, OSError, ValueError) as error:
                    problems.append(f"{folder} cannot be shown: {error}")
            table = _json(path / "comparison.json")
            rows = [row for row in table.get("rows") or [] if isinstance(row, dict)]
            listed += [with_names(str(row.get("method"))) for row in rows]
            target = target or table.get("target")
            runs += sorted(here, key=lambda run: (run.created, run.path))
        targets = {run.config.get("target") for run in runs}
        target = target or (targets.pop() if len(targets) == 1 else None)
        return Found(_by_row(runs, listed, problems), target, problems)

    def _run(self, folder: Path) -> Run:
        stamp = tuple(_stamp(folder / name) for name in (CONFIG, ENVIRONMENT, METRICS, RESULT, DIAGNOSTICS, DIAGNOSIS))
        known = self._known.get(folder)
        if known is None or known[0] != stamp:
            self._known[folder] = known = (stamp, read_run(folder))
        return known[1]


def run_folders(path: Path) -> list[Path]:
    """The run folders that a path stands for: itself, or those below it."""
    if (path / CONFIG).is_file():
        return [path]
    below = {file.parent for depth in range(1, _DEPTH + 1) for file in path.glob("*/" * depth + CONFIG)}
    return sorted(below)


def read_run(path: Path) -> Run:
    """One run folder, finished or not; a half-written last line is left out."""
    folder = RunFolder.open(path)
    history = [line for line in folder.metrics() if isinstance(line.get("round"), int)]
    done, result = folder.result(), None
    if done is not None and history:
        known = {f.name for f in dataclasses.fields(Result)}  # a newer version may record more
        result = Result.from_dict({k: v for k, v in done.items() if k in known}, history, path)
    created = (path / CONFIG).stat().st_mtime_ns
    last = _stamp(path / METRICS) or _stamp(path / CONFIG)
    return Run(
        path,
        folder.config,
        folder.environment,
        history,
        result,
        _lines(path / DIAGNOSTICS),
        _json(path / DIAGNOSIS),
        created,
        last[0] / 1e9 if last else 0.0,
    )


def method_text(given: Any) -> str:
    """A method from a record as a person would type it: without options at their defaults, running no file of it."""
    parts = []
    for choice in spec.parse(given, "method"):
        options = choice.options
        if not is_file_reference(choice.name):
            with suppress(UserError):
                fields = dataclasses.fields(find(choice.name)[1])
                defaults = {spec.option(f): f.default for f in fields}
                options = tuple((k, v) for k, v in options if k not in defaults or defaults[k] != v)
        parts.append(str(spec.Choice(choice.name, options)))
    return "+".join(parts)


def _by_row(runs: Sequence[Run], listed: Sequence[str], problems: list[str]) -> dict[str, dict[int, Run]]:
    """Runs that differ only by seed are one row, named by its method and whatever else is not the same everywhere."""
    files = file_names(runs)
    shown = [_shown(run, names) for run, names in zip(runs, files, strict=True)]
    keys = {k for settings in shown for k in settings} - _SAME_ROW - {"method"}
    if any(settings.get("stop_at_target") for settings in shown):  # elsewhere a target is only read against
        keys |= {"target"}
    differing = [k for k in sorted(keys) if len({json.dumps(settings.get(k), default=str) for settings in shown}) > 1]
    names = data_sets(runs)
    labels = [
        " ".join([method, *(f"{k}={show(k, settings.get(k))}" for k in differing)])
        for method, settings in zip(_methods(runs, files), shown, strict=True)
    ]
    judged: dict[str, set[str]] = {}
    for label, name in zip(labels, names, strict=True):
        judged.setdefault(label, set()).add(name)
    rows: dict[str, dict[int, Run]] = {}
    data_of: dict[str, int] = {}
    place = {method: n for n, method in reversed(list(enumerate([] if differing else listed)))}
    place_of: dict[str, int] = {}
    for run, plain, name in zip(runs, labels, names, strict=True):
        label = plain if len(judged[plain]) == 1 else f"{plain} on {name}"  # settings alike, data changed in between
        data_of[label], place_of[label] = names.index(name), place.get(run.method, len(place))
        if run.seed in rows.setdefault(label, {}):
            problems.append(f"there are two runs of {label} with seed {run.seed}; the one in {run.path} is shown")
        rows[label][run.seed] = run
    # Data set by data set; and stable: the rest stays as it was found.
    order = sorted(rows, key=lambda label: (data_of[label], place_of[label]))
    return {label: dict(sorted(rows[label].items())) for label in order}


def _methods(runs: Sequence[Run], files: Sequence[Mapping[str, str]]) -> list[str]:
    """What the methods of runs are called, with these names of files.

    The record of an unfinished run has every option of a method of the user's own. Which of them are at their defaults
    a finished run of the same method says.
    """
    known = {json.dumps(run.config.get("method")): run.full_method for run in runs if run.result}
    texts = [run.full_method if run.result else known.get(json.dumps(run.config.get("method"))) for run in runs]
    return [with_names(t or run.full_method, names) for t, run, names in zip(texts, runs, files, strict=True)]


def _shown(run: Run, names: Mapping[str, str]) -> dict[str, Any]:
    """The settings of a run with its files by these names, so that other code is another setting."""
    named = {k: with_names(str(run.config[k]), names) for k in ("model", "partition") if k in run.config}
    return run.config | named


def inside(content: Mapping[str, Any], outer: str, inner: str) -> Any:
    """A value one level down, or none where the level is not there."""
    value = content.get(outer)
    return value.get(inner) if isinstance(value, dict) else None


def _afterwards(diagnosis: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sections of a diagnosis that go by rounds, in the form in which a run records them."""
    lines: dict[int, dict[str, Any]] = {}

    def at(found: Any) -> dict[str, Any]:
        number = found.get("round") if isinstance(found, dict) else None
        return lines.setdefault(number, {"round": number}) if isinstance(number, int) else {}

    for model in _listed(inside(diagnosis, "spectra", "models")):
        if model.get("client") is None:
            at(model).update({k: v for k, v in model.items() if k not in ("round", "client")})
        else:
            at(model).setdefault("local", []).append(model)
    for found in _listed(diagnosis.get("alignment")):
        at(found)["alignment"] = found
    return list(lines.values())


def _listed(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is none that can be read."""
    with suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return content
    return {}


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSON-lines file that can be read, one for each round: a resumed run may write one again."""
    found: dict[int, dict[str, Any]] = {}
    with suppress(OSError):
        for raw in path.read_bytes().splitlines():
            with suppress(ValueError):
                line = json.loads(raw)
                if isinstance(line, dict) and isinstance(line.get("round"), int):
                    found[line["round"]] = line
    return [found[number] for number in sorted(found)]


class Splits:
    """Who holds what, made again from the settings, once for each split."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def of(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        """The splits of these runs, those not yet known being made; pooled runs have none."""
        while missing := self.missing(runs):
            self._known[self._key(missing[0])] = _split(missing[0])
        return self.known(runs)

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        """Runs whose split is still to be made, as long as there are not too many to look at."""
        if len(self.known(runs)) >= _MOST_SPLITS:
            return []
        return [run for run in runs if not run.pooled and self._key(run) not in self._known]

    def known(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        """Those that have been made already."""
        keys = dict.fromkeys(self._key(run) for run in runs if not run.pooled)
        return [self._known[key] for key in keys if key in self._known]

    @staticmethod
    def _key(run: Run) -> str:
        return json.dumps([run.config.get(k) for k in _SPLIT] + [run.environment.get("data")], default=str)


_SPLIT = ("data", "root", "partition", "clients", "validation", "seed")


def _split(run: Run) -> dict[str, Any]:
    name = f"{Path(str(run.config.get('data'))).name}, {run.config.get('partition')}, seed {run.seed}"
    if str(run.config.get("data")).startswith(f"{GIVEN}:"):
        return {"name": name, "problem": "The data were handed over in Python, so the split cannot be made again here."}
    try:
        world = World.create(make_settings({k: run.config[k] for k in _SPLIT if k in run.config}))
    except (IsofedError, OSError) as error:
        return {"name": name, "problem": f"The split cannot be made again here: {error}."}
    dataset, train = world.dataset, world.parts["train"]
    if run.environment.get("data") is not None and not world.has_data(run.environment["data"]):
        return {"name": name, "problem": "The data have changed since the run, so its split is not shown."}
    counts = partitions.counts(world.clients, train.labels, len(dataset.classes))
    made: dict[str, Any] = {
        "name": name,
        "classes": list(dataset.classes),
        "counts": counts[:_MOST_CLIENTS].tolist(),
        "clients": len(counts),
    }
    if train.domains is not None:
        held = partitions.counts(world.clients, train.domains, len(dataset.domains))
        made["domains"] = domains_of(held[:_MOST_CLIENTS], dataset.domains)
    return made
