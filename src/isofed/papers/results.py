"""Results that last: one small JSON file for each finished cell and seed. Nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from isofed.config import Settings, in_todays_words
from isofed.errors import UserError
from isofed.files import plain, write_atomic, write_error
from isofed.papers.measure import RATIOS
from isofed.papers.plan import HOW, Job, round_of
from isofed.records import environment

FORMAT = 1
# What every file of a result has, and of which kind it is; what else there is may be missing.
SHAPE: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("paper", "preset", "dataset", "setting", "method", "variant", "length", "key"), str),
    **dict.fromkeys(("settings", "how", "measures", "environment"), dict),
    **dict.fromkeys(("seed", "rounds"), int),
    "seconds": (int, float),
}
INSIDE = {
    "settings": ("data", "model", "method"),
    "how": ("device", "precision"),
    "environment": ("device_name", "data"),
}
# If it is there at all.
MAYBE: dict[str, type] = {"probe": dict, "curve": dict, "not_finite": dict, "exchanges": list, "notes": list}
LENGTH = re.compile(r"|tiny|scale=[0-9]+(\.[0-9]+)?(e-[0-9]+)?")
ROUNDS = 3  # from which on the median of all but the first is a round's time


@dataclass(frozen=True)
class Finished:
    """What one file says."""

    path: Path
    content: Mapping[str, Any] = field(repr=False)

    @property
    def key(self) -> str:
        return str(self.content["key"])

    @property
    def seed(self) -> int:
        return int(self.content["seed"])

    @property
    def probe(self) -> dict[str, str]:
        return dict(self.content.get("probe") or {})

    @property
    def measures(self) -> dict[str, float | None]:
        return dict(self.content["measures"])

    @property
    def device(self) -> str:
        return str(self.content["environment"]["device_name"])

    @property
    def precision(self) -> str:
        return str(self.content["how"]["precision"])

    @property
    def circumstances(self) -> str:
        """What a time depends on besides what is run: two times can be compared where this is the same.

        ``executor`` is what came of ``how``: how many clients train at once may be chosen anew in each run.
        """
        c, e = self.content, self.content["environment"]
        same = [self.seed, c["how"], c.get("executor"), *(e.get(name) for name in ("device_name", "torch", "code"))]
        return json.dumps(same, sort_keys=True)


class Results:
    """All results in a folder, found by what they are results of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[str, list[Finished]] = {}
        self._kinds: set[tuple[str, str]] = set()
        self._rounds: dict[str, list[Finished]] = {}  # by what a round of theirs is
        for path in sorted(folder.rglob("*.json")) if folder.is_dir() else []:
            self._add(Finished(path, _read(path)))

    def _add(self, finished: Finished) -> None:
        settings = finished.content["settings"]
        self._kinds.add((settings["data"], settings["model"]))
        known = self._found.setdefault(finished.key, [])
        known[:] = [*(one for one in known if one.path != finished.path), finished]
        if not finished.probe and int(finished.content["rounds"]) >= ROUNDS and _timed(finished):
            self._rounds.setdefault(round_of(settings), []).append(finished)

    def of(self, job: Job) -> Finished | None:
        """The result of a job, if there is one."""
        return self.by_seed(job).get(job.seed)

    def by_seed(self, job: Job, measure: str | None = None) -> dict[int, Finished]:
        """The results of a job's cell, with whichever seed, in which every measure is that the cell needs.

        With a measure also those that have it, and were stopped while the others were being measured. Of several with
        one seed, that of the cell itself counts, or else the first that was found.
        """
        found: dict[int, Finished] = {}
        if job.kind not in self._kinds and not job.probe:
            return found  # without working out the key, which is slow for a thousand cells
        for one in self._found.get(job.key, []):
            own = one.path.parent == self.path(job).parent and one.path.name.startswith(job.name)
            partly = bool(one.content.get("undiagnosed") and job.cell.diagnose)
            if partly and measure is None:
                continue
            needed = [measure] if partly and measure else job.cell.measures.values()
            if _has(one, needed) and (one.seed not in found or own):
                found[one.seed] = one
        if job.timing and not job.probe and not job.length.label:
            # Where a round's time is all that is asked for, a longer run of the same tells it as well.
            for one in self._rounds.get(round_of(json.loads(json.dumps(job.settings.to_dict()))), []):
                found.setdefault(one.seed, one)
        return dict(sorted(found.items()))

    def undiagnosed(self, job: Job) -> Finished | None:
        """What was known of a job before it was diagnosed, where that was not brought to an end."""
        own = (one for one in self._found.get(job.key, []) if one.path == self.path(job))
        return next((one for one in own if one.content.get("undiagnosed")), None)

    def timed(self, job: Job) -> list[Finished]:
        """All results that tell how long a round of a job takes, its own first, with whichever seed."""
        if job.kind not in self._kinds and not job.probe:
            return []
        found = {one.path: one for one in self._found.get(job.key, []) if _timed(one)}
        if not job.probe and not job.length.label:
            longer = self._rounds.get(round_of(json.loads(json.dumps(job.settings.to_dict()))), [])
            found |= {one.path: one for one in longer if one.path not in found}
        return list(found.values())

    def all(self) -> list[Finished]:
        """Every result."""
        return [one for same in self._found.values() for one in same]

    def check(self) -> None:
        """Say that results cannot be written before anything is trained for them."""
        there = next(folder for folder in (self.folder, *self.folder.absolute().parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "its folder is not writable" if there.is_dir() else f"{there} is a file"
            raise UserError(
                f"results cannot be written to {self.folder}: {why}; "
                "give another results=, or with scale=tiny another runs="
            )

    def path(self, job: Job) -> Path:
        """Where the result of a job is written."""
        return self.folder / job.cell.paper / job.cell.preset / f"{job.name}_seed{job.seed}.json"

    def write(self, job: Job, content: Mapping[str, Any]) -> Finished:
        """Write a result down."""
        path = self.path(job)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(path, error) from error
        write_atomic(path, text_of(plain(dict(content))).encode())
        finished = Finished(path, _read(path))
        self._add(finished)
        return finished


def _has(finished: Finished, measures: Iterable[str], whole: bool = False) -> bool:
    """Whether a result has these measures, or none because it diverged, unless that does not do."""
    return (finished.content.get("failure") is not None and not whole) or set(measures) <= set(finished.measures)


def _timed(finished: Finished) -> bool:
    """Whether the times of a result's rounds are of one process that had the machine for itself, as far as is known."""
    c = finished.content
    return _has(finished, RATIOS, whole=True) and not c.get("resumed") and bool(c.get("alone", True))


def _is_whole(content: Any) -> bool:
    """Whether something is what a result's file holds, as far as anything here relies on it."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return False
    if not all(isinstance(content.get(key), kind) for key, kind in SHAPE.items()):
        return False
    if not all(name in content[key] for key, names in INSIDE.items() for name in names):
        return False
    if not all(isinstance(content.get(key, kind()), kind) for key, kind in MAYBE.items()):
        return False
    numbers = all(value is None or isinstance(value, int | float) for value in content["measures"].values())
    return numbers and LENGTH.fullmatch(content["length"]) is not None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        content = None
    if not _is_whole(content):
        raise UserError(f"{path} is not a result that this version of isofed wrote; move it away or mend it")
    return {**content, "settings": in_todays_words(content["settings"])}


def text_of(content: Mapping[str, Any]) -> str:
    """JSON with one line for each key at the top: short, and a change is easy to see."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in content.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def head(job: Job, ran: Settings | None = None) -> dict[str, Any]:
    """What a result is of; ``ran`` are the settings of its run, which may have been begun in another precision."""
    cell, values = job.cell, (ran or job.settings).to_dict()
    return {
        "format": FORMAT,
        "paper": cell.paper,
        "preset": cell.preset,
        "dataset": cell.dataset,
        "setting": cell.setting,
        "method": cell.method,
        "variant": cell.variant,
        "seed": job.seed,
        "length": job.length.label,
        "probe": dict(job.probe),
        "key": job.key,
        # The folder of the data is the machine's own affair; their fingerprint is in the environment.
        "settings": {k: v for k, v in values.items() if k not in HOW | {"root"}},
        "how": {k: values[k] for k in sorted(HOW)},
    }


def made_now(one: Finished, job: Job) -> bool:
    """Whether a result was made with the code, the device and the way to compute that a job would have now."""
    values, then = job.settings.to_dict(), one.content["environment"]
    here = environment(job.settings.device, "") | {"code": code_version()}
    same = all(then.get(name) == here[name] for name in ("device_name", "torch", "code"))
    return same and one.content["how"] == {k: values[k] for k in sorted(HOW)}


@cache
def code_version() -> str:
    """A digest of the package's source, because a copy of it has no commit to name."""
    package, digest = Path(__file__).parents[1], hashlib.blake2b(digest_size=8)
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()
