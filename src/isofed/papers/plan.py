"""What a cell becomes when it is run: settings, a length, a seed, and a key that tells whether it was run before."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from isofed.config import Settings, keep_rule, read_words
from isofed.config import settings as make_settings
from isofed.errors import UserError
from isofed.experiments import apply_point
from isofed.methods.compose import parse as parse_method
from isofed.papers import tiny
from isofed.papers.measure import RATIOS
from isofed.papers.presets import Cell
from isofed.papers.tiny import TINY

# How a run is computed and what is recorded of it. None of this makes another run of it, so a result counts for every
# cell with the same key, in whichever table it was run.
HOW = {"device", "executor", "workers", "slots", "actors", "precision", "deterministic"}
RECORD = {"evaluate_every", "train_loss", "target", "stop_at_target", "diagnose", "track", "keep", "keep_clients"}


@dataclass(frozen=True)
class Length:
    """How much of a cell is run: all of its rounds, a part with a schedule of its own, or hardly anything."""

    scale: float | None = 1.0  # none: tiny

    @classmethod
    def of(cls, text: str) -> Length:
        if text == TINY:
            return cls(None)
        try:
            scale = float(text)
        except ValueError:
            scale = math.nan
        if not 0 < scale <= 1:
            raise UserError(f"scale={text} must be above 0 and at most 1, as in scale=0.3, or be 'tiny'")
        return cls(scale)

    @property
    def label(self) -> str:
        """Empty for the full length; otherwise what must stand wherever the result is shown."""
        return "" if self.scale == 1.0 else TINY if self.scale is None else f"scale={self.scale:g}"

    def shorten(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of the shortened run. Schedules run over the rounds that there are."""
        if self.scale is None:
            return tiny.settings(values)
        rounds = int(values.get("rounds", Settings.model_fields["rounds"].default))
        shorter = {k: self._every(str(values[k])) for k in ("diagnose", "keep") if k in values}
        return {**values, **shorter, "rounds": max(1, round(self.scale * rounds))}

    def diagnosis(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options of ``isofed diagnose`` after the run; a Hessian is probed a third as often after a shortened one."""
        if self.scale is None:
            return tiny.options(options)
        fewer = {"probes": max(1, int(options["probes"]) // 3)} if self.scale < 1 and "probes" in options else {}
        return {**options, **fewer}

    def _every(self, text: str) -> str:
        """``every:20`` of a run of 60 rounds is ``every:6`` of one of 18."""
        every = keep_rule(text, "diagnose")
        return f"every:{max(1, round((self.scale or 1.0) * every))}" if every else text


@dataclass(frozen=True)
class Job:
    """A cell with a seed, ready to run."""

    cell: Cell
    seed: int
    length: Length = field(default_factory=Length)
    probe: tuple[tuple[str, str], ...] = ()  # changes to try something out; such results never enter a table
    how: tuple[tuple[str, str], ...] = ()
    root: str | None = None

    @cached_property
    def settings(self) -> Settings:
        """The settings of the run, checked."""
        values = self.length.shorten(self.cell.values)
        values |= read_words(f"{k}={v}" for k, v in self.probe if "." not in k)
        values = apply_point(values, {k: v for k, v in self.probe if "." in k})
        if self.root is not None:
            values["root"] = self.root
        return make_settings({**values, **dict(self.how), "seed": self.seed})

    @property
    def kind(self) -> tuple[str, str]:
        """The data and the network of the cell, known without checking all settings."""
        values = self.length.shorten(self.cell.values)
        return str(values["data"]), str(values["model"])

    @property
    def timing(self) -> bool:
        """Whether a round's time is all that is asked for."""
        return set(self.cell.measures.values()) <= RATIOS

    @property
    def key(self) -> str:
        """The same for all runs that must give the same result, but for the device, its precision and the seed."""
        what = (self.length, self.probe)
        if what not in self.cell.keys:
            self.cell.keys[what] = self._key()
        return self.cell.keys[what]

    def _key(self) -> str:
        s = self.settings
        changed = _changed(s.to_dict(), HOW | RECORD | {"root", "seed", "method"})
        text = json.dumps([str(s.method), changed, self.length.label == TINY], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def name(self) -> str:
        """A folder's name that tells a person what it holds."""
        cell, probe = self.cell, ",".join(f"{k}={v}" for k, v in self.probe)
        words = [cell.dataset, cell.setting, cell.method, *([cell.variant] if cell.variant != "default" else [])]
        words += [w for w in (self.length.label, probe) if w]
        return f"{slug('_'.join(words))}_{self.key[:6]}"

    def folder(self, runs: Path) -> Path:
        """The run folder."""
        return runs / self.cell.paper / self.cell.preset / self.name / f"seed-{self.seed}"

    def __str__(self) -> str:
        more = [self.length.label, *(f"{k}={v}" for k, v in self.probe), f"seed {self.seed}"]
        return f"{self.cell}, {', '.join(word for word in more if word)}"


def _changed(values: Mapping[str, Any], skipped: set[str]) -> dict[str, Any]:
    """Settings that are not the default, so that a new setting does not make everything another run."""
    known = {name: f.default for name, f in Settings.model_fields.items()}
    return {k: v for k, v in values.items() if k not in skipped and k in known and v != known[k]}


def round_of(values: Mapping[str, Any]) -> str:
    """The same for all settings whose rounds take equally long, however many there are and whatever their rate."""
    changed = _changed(values, HOW | RECORD | {"root", "seed", "rounds", "lr_schedule", "method"})
    return json.dumps([changed, method_of(values)], sort_keys=True)


def method_of(values: Mapping[str, Any]) -> Any:
    """A method without the options that have their default: one that was added later makes no other method."""
    try:
        return str(parse_method(values["method"]))
    except UserError:  # with an option that was taken away since
        return values["method"]


def slug(text: str) -> str:
    """A text as a file's name."""
    return "".join(c if c.isalnum() or c in "+=.,-_" else "-" for c in text).strip("-")[:120]


def plain_text(text: str) -> str:
    """Letters and digits alone, to look for words however they are written: ``CIFAR-100`` is ``cifar100``."""
    return "".join(c for c in text.lower() if c.isalnum() or c in "=.+")


def matching(cells: Iterable[Cell], only: str = "", methods: str = "") -> list[Cell]:
    """Those cells that have every word of ``only`` in them, and whose method is one of ``methods``."""
    words = [plain_text(w) for w in only.split(",") if w.strip()]
    chosen = {plain_text(w) for w in methods.split(",") if w.strip()}
    return [
        cell
        for cell in cells
        if all(_holds(plain_text(f"{cell.dataset} {cell.setting} {cell.method}"), word) for word in words)
        and (not chosen or plain_text(cell.method) in chosen)
    ]


def _holds(text: str, word: str) -> bool:
    """Whether a word is in a text, its number whole: ``cifar10`` is not in ``cifar100``, nor ``E=1`` in ``E=10``."""
    return re.search(re.escape(word) + (r"(?!\d)" if word[-1:].isdigit() else ""), text) is not None


def covering(cells: Iterable[Cell]) -> list[Cell]:
    """A few of the cells in which every data set, every part of a setting and every method on each network occurs."""
    seen: set[tuple[str, str]] = set()
    chosen = []
    for cell in cells:
        # Two rows may have the same name in two settings and still be different methods.
        method = f"{cell.values['method']} on {cell.values['model']}"
        terms = cell.setting.split(";")
        parts = {("data", cell.dataset), ("row", cell.method), ("method", method), *(("term", term) for term in terms)}
        if parts - seen:
            seen |= parts
            chosen.append(cell)
    return chosen
