"""What ``isofed diagnose`` does: measure runs, show how far it is, write and print what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from isofed import __version__
from isofed.config import is_setting
from isofed.diagnose.options import Options
from isofed.diagnose.sections import Diagnosis, Tell
from isofed.display import Clock, show_table, simple_table
from isofed.errors import NotFinite, UserError
from isofed.files import plain
from isofed.report.gather import run_folders
from isofed.report.measured import between_clients
from isofed.stopping import interruptible

NOT_FINITE = "not_finite"  # where a diagnosis says why a section of it is empty


def diagnose(console: Console, words: Sequence[str]) -> None:
    """Measure runs, print a table, and write ``diagnosis.json`` into each run folder."""
    given = [word for word in words if not is_setting(word)]
    options = Options.of(dict(word.split("=", 1) for word in words if is_setting(word)))
    paths = [folder for word in given for folder in (run_folders(Path(word)) or [Path(word)])]
    if not paths:
        raise UserError("diagnose needs at least one run folder, for example: isofed diagnose runs/mine")
    runs = _with_models(console, [Diagnosis(path, options) for path in dict.fromkeys(paths)])
    found: dict[str, dict[str, Any]] = {}
    with interruptible("What was measured is written."), _Progress(console, runs).showing() as progress:
        for run in runs:
            found[str(run.folder.path)] = diagnosed(run, progress.section)
    _print(console, found)
    where = next(iter(found)) if len(found) == 1 else f"each of the {len(found)} run folders"
    console.print(f"written: diagnosis.json in {where}", highlight=False, markup=False, soft_wrap=True)


def _with_models(console: Console, runs: list[Diagnosis]) -> list[Diagnosis]:
    """The runs that can be measured: of a comparison, some may have failed in their first round."""
    found = [run for run in runs if run.has_model]
    for run in runs if found else []:
        if run not in found:
            note = f"note: {run.folder.path} has no model yet and is left out"
            console.print(note, highlight=False, markup=False, soft_wrap=True)
    return found or runs


def diagnosed(run: Diagnosis, section: Callable[[Diagnosis, str], Tell] | None = None) -> dict[str, Any]:
    """All that was asked for, written into the run folder beside what was found before.

    A section of numbers that are not finite is empty, or holds those that are, and ``not_finite`` says why: that is
    what there is to know about the run, and the next section may still be measured.
    """
    content: dict[str, Any] = {"isofed": __version__, "method": run.settings.method.shown(), "seed": run.settings.seed}
    content = run.folder.diagnosis() | content
    why: dict[str, str] = content.get(NOT_FINITE) or {}
    for name in run.options.sections:
        tell = section(run, name) if section else lambda done, of: None
        why.pop(name, None)
        try:
            content[name] = plain(run.measure(name, tell))
        except NotFinite as error:
            content[name], why[name] = plain(error.rest), str(error)
        content = {k: v for k, v in content.items() if k != NOT_FINITE} | ({NOT_FINITE: why} if why else {})
        run.folder.write_diagnosis(content)  # each time: what is done stays when the next one is stopped
    return content


def missing(content: Mapping[str, Any], section: str) -> str:
    """What a section is in which some numbers are not finite."""
    return "left out" if content.get(section) is None else "not complete"


_KNOWN = 20  # seconds of work, by which the first sections' times are judged


class _Progress:
    """How far it is: on a terminal a line with the time left, elsewhere a line for each section."""

    def __init__(self, console: Console, runs: Sequence[Diagnosis]) -> None:
        self.console, self._clock = console, Clock()
        self._live: Live | None = None
        a_pass = runs[0].a_pass
        self._todo = [(run, name, run.seconds(name, a_pass)) for run in runs for name in run.options.sections]
        self._total, self._number, self._share = sum(seconds for _, _, seconds in self._todo), 0, 0.0

    @contextmanager
    def showing(self) -> Iterator[_Progress]:
        if not self.console.is_terminal:
            yield self
            return
        with Live(console=self.console, refresh_per_second=8, transient=True) as self._live:
            yield self

    def section(self, run: Diagnosis, name: str) -> Tell:
        """The next section begins."""
        self._number, self._share = self._number + 1, 0.0
        self._current = f"[{self._number}/{len(self._todo)}] {run.folder.path}: {name}"
        if self._live is None:
            self.console.print(self._text(), highlight=False, markup=False)
        self._tell(0, 1)
        return self._tell

    def _tell(self, done: int, of: int) -> None:
        self._share = done / of
        if self._live is not None:
            self._live.update(escape(self._text()))

    def _text(self) -> str:
        *before, now = (seconds for _, _, seconds in self._todo[: self._number])
        done = sum(before) + self._share * now
        share = f" {100 * self._share:.0f} %" if self._share else ""
        return f"{self._current}{share}, {self._clock.left(done, self._total, _KNOWN)} left"


def _print(console: Console, found: Mapping[str, Mapping[str, Any]]) -> None:
    rows = {path: _numbers(content) for path, content in found.items()}
    columns = [name for name in next(iter(rows.values())) if any(row[name] for row in rows.values())]
    out = simple_table("run", *columns)
    for path, row in rows.items():
        label = f"{found[path]['method']}, seed {found[path]['seed']}"
        out.add_row(escape(label), *(row[name] or "-" for name in columns))
    show_table(console, out)
    for path, content in found.items():
        for section, why in content.get(NOT_FINITE, {}).items():
            note = f"note: {section} of {path} is {missing(content, section)}: {why}"
            console.print(note, highlight=False, markup=False, soft_wrap=True)
    if any(between_clients(content.get("curvature") or {})["noise"] for content in found.values()):
        console.print(
            "H_N and H_D are left out where noise outweighs the estimate: raise probes, or see H_N_traces and "
            "H_D_traces in diagnosis.json.",
            highlight=False,
        )


def _numbers(content: Mapping[str, Any]) -> dict[str, str]:
    """The most telling numbers of a diagnosis, as texts; empty where there is none."""
    spectra = [m for m in (content.get("spectra") or {}).get("models", []) if m["client"] is None]
    gaps = [m["gap"] for m in (content.get("spectra") or {}).get("models", []) if m.get("gap") is not None]
    last = spectra[-1] if spectra else {}
    aligned = (content.get("alignment") or [{}])[-1]
    curved, calibrated = content.get("curvature") or {}, content.get("calibration") or {}
    clients = between_clients(curved)
    per = (content.get("cost") or {}).get("points_per") or {}
    width = len(last.get("representation_spectrum") or [])
    return {
        "classifier rank": _text(last.get("classifier_effective_rank"), ".1f"),
        "significant": f"{last['significant']}/{width}" if last else "",
        "gap R": _text(sum(gaps) / len(gaps) if gaps else None, "+.2f"),
        "cosine": _text(aligned.get("cosine"), ".3f"),
        "top eigenvalue": _text((curved.get("eigenvalues") or [None])[0], ".3g"),
        "trace": _trace(curved),
        "H_N": "-" if clients["noise"] else _text(clients.get("H_N"), ".3g"),
        "H_D": "-" if clients["noise"] else _text(clients.get("H_D"), ".3f"),
        "calibration %": _text(calibrated.get("error"), ".1f", 100),
        "points/MB": _text(per.get("megabyte"), ".3g"),
        "points/s": _text(per.get("second"), ".3g"),
        "points/GFLOP": _text(per.get("gflop"), ".3g"),
    }


def _trace(curved: Mapping[str, Any]) -> str:
    """The trace with its standard error, where that is known."""
    value, error = _text(curved.get("trace"), ".3g"), _text(curved.get("trace_error"), ".2g")
    return f"{value} ± {error}" if value and error else value


def _text(value: float | None, form: str, scale: float = 1) -> str:
    return "" if value is None else format(scale * value, form)
