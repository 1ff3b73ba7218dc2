"""The page: what it shows as plain data, and one HTML file around it that fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from isofed import __version__, spec
from isofed.config import Settings
from isofed.data import AT_SITES
from isofed.engine.world import GIVEN
from isofed.report.answer import answer, compared
from isofed.report.gather import Found, Run, method_text
from isofed.report.measured import by_round, drawn, thin
from isofed.result import Result
from isofed.tables import Row

_POINTS = 400  # most rounds of a curve
# The files of the page's script, in order.
_SCRIPTS = ("tools", "methods", "chart", "parts", "table", "cost", "split", "diagnostics", "afterwards", "page")


def content(found: Found, splits: Sequence[Mapping[str, Any]] = (), live: bool = False) -> dict[str, Any]:
    """Everything on the page, as values that JSON can hold."""
    groups = compared(found)
    rows = [_row(found, name, row) for name, table in groups.items() for row in table]
    return tidy(
        {
            "version": __version__,
            "live": live,
            "answer": asdict(answer(found)),
            "several": len(groups) > 1,  # data sets
            "target": found.target,
            "rows": rows,
            "runs": [_run(row, run, live) for row, by_seed in found.rows.items() for run in by_seed.values()],
            "splits": list(splits),
            "settings": _settings(found),
            "versions": _versions(found),
            "repeat": _repeat(found),
            "problems": found.problems,
        }
    )


def _row(found: Found, data: str, row: Row) -> dict[str, Any]:
    runs = found.rows[row.method].values()
    shown = asdict(row) | {"runs": len(runs), "data": data}
    shown |= {"clear": row.clear, "no_spread": row.no_spread, "to_target": row.to_target}
    if all(run.on_cpu for run in runs):
        shown["peak_memory_megabytes"] = None  # the process with all its libraries, not the method
    return shown


def _run(row: str, run: Run, live: bool) -> dict[str, Any]:
    history, result = run.history, run.result
    judged = [line for line in history if line.get("accuracy") is not None]
    sent = sum(_number(line, "bytes_up") + _number(line, "bytes_down") for line in history)
    return {
        "row": row,
        "seed": run.seed,
        "folder": str(run.path),
        "finished": result is not None,
        "done": history[-1]["round"] if history else 0,
        "rounds": result.rounds if result else run.rounds,
        "accuracy": result.accuracy if result else judged[-1]["accuracy"] if judged else None,
        "best": result.best_accuracy if result else max((x["accuracy"] for x in judged), default=None),
        "seconds": sum(_number(line, "seconds") for line in history),
        "megabytes": (result.bytes_up + result.bytes_down if result else sent) / 1e6,
        "events": sum(len(line.get("events") or []) for line in history),
        "notes": _notes(result) if result else [],
        "updated": round(run.updated) if live else None,
        "asked": run.asked,
        "loss": result.loss if result else None,
        "curves": _curves(history, run.flops),
        "diagnostics": by_round(run.measured),
        "diagnosis": drawn(run.diagnosis),
    }


def _notes(result: Result) -> list[str]:
    """What a person should know about a run; what its noise amounts to first."""
    record = result.privacy or {}
    epsilon, delta = record.get("epsilon"), record.get("delta")
    if epsilon is None or delta is None:
        return result.notes
    told = f"privacy of {record.get('unit', 'a whole client')}: epsilon {epsilon:.3g} at delta {delta:g}"
    against = record.get("protects against")
    told += f", against {against}" if against else ""
    return [f"{told}; result.json says what that rests on", *result.notes]


def _number(line: Mapping[str, Any], key: str) -> float:
    value = line.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _curves(history: Sequence[dict[str, Any]], flops: float | None) -> dict[str, list[Any]]:
    """What changes from round to round, against rounds, megabytes, seconds and GFLOP; long runs are thinned out."""
    points, megabytes, seconds, gflop = [], 0.0, 0.0, 0.0
    for line in history:
        gflop += (flops or 0.0) * _number(line, "samples") / 1e9
        megabytes += (_number(line, "bytes_up") + _number(line, "bytes_down")) / 1e6
        seconds += _number(line, "seconds")
        if line.get("accuracy") is not None:
            points.append({**line, "megabytes": megabytes, "seconds": seconds, "gflop": gflop if flops else None})
    points = thin(points, _POINTS)
    keys = ("round", "megabytes", "seconds", "gflop", "accuracy", "loss", "train_loss", "local_loss")
    curves = {key: [point.get(key) for point in points] for key in keys}
    return {key: values for key, values in curves.items() if any(v is not None for v in values)}


def _settings(found: Found) -> dict[str, Any]:
    """Settings that all runs share, those that differ from their defaults first; the rest by row."""
    common = {k: v for k, v in found.common().items() if k not in ("method", "seed")}
    fields = Settings.model_fields
    chosen = [k for k in fields if k in common and common[k] != fields[k].default]
    rest = [k for k in common if k not in chosen]
    rows = []
    for row, by_seed in found.rows.items():
        config = next(iter(by_seed.values())).config
        own = {k: v for k, v in config.items() if k not in common and k not in ("method", "seed")}
        rows.append(
            {"row": row, "method": _yaml(config.get("method")), "own": {k: spec.show(v) for k, v in own.items()}}
        )
    shown = {
        "chosen": [[k, spec.show(common[k])] for k in chosen],
        "defaults": [[k, spec.show(common[k])] for k in rest],
    }
    return shown | {"rows": rows, "seeds": sorted({run.seed for run in found.runs})}


def _yaml(method: Any) -> str:
    """A method with every option spelled out, as it is recorded."""
    return "+".join(map(str, spec.parse(method, "method"))) if method else ""


def _versions(found: Found) -> list[list[str]]:
    """What the runs were made with; where they differ, all values."""
    values: dict[str, list[str]] = {}
    for run in found.runs:
        for key, value in run.environment.items():
            text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
            if value and text not in values.setdefault(key, []):
                values[key].append(text)
    return [[key, "; ".join(texts)] for key, texts in values.items() if texts]


def _repeat(found: Found) -> list[str]:
    """Commands that make these runs again."""
    common = found.common()
    # A project makes runs at its sites, and data that were given in Python are there alone.
    runs = [run for run in found.runs if str(run.config.get("data")).partition(":")[0] not in (AT_SITES, GIVEN)]
    if not runs:
        return []
    varied = {k for run in runs for k in run.config if k not in common} - {"method", "seed"}
    if varied or len(runs) == 1:
        return [f"isofed run {shlex.quote(str(run.path / 'config.yaml'))}" for run in runs]
    methods = dict.fromkeys(method_text(run.config.get("method")) for run in runs)
    defaults = {k: field.default for k, field in Settings.model_fields.items()}
    given = [f"{k}={spec.show(v)}" for k, v in common.items() if k != "seed" and k in defaults and v != defaults[k]]
    seeds = sorted({run.seed for run in runs})
    words = [*methods, *(w for w in given if not w.startswith("method=")), f"seeds={','.join(map(str, seeds))}"]
    if len(seeds) == 1:
        words[-1] = f"seed={seeds[0]}"
    return [shlex.join(["isofed", "compare", *words])]


def tidy(value: Any) -> Any:
    """The same with floats to five digits, and what is not finite as null."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): tidy(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [tidy(v) for v in value]
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def as_json(page: Mapping[str, Any]) -> str:
    return json.dumps(page, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def render(page: Mapping[str, Any]) -> str:
    """One HTML file. Only its own script may run; texts of the runs are data, put on the page as text."""
    assets = files("isofed.report") / "assets"
    template, style = ((assets / f"page.{kind}").read_text("utf-8") for kind in ("html", "css"))
    parts = "\n".join((assets / f"{name}.js").read_text("utf-8") for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{parts}}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    if page["live"]:
        policy += "; connect-src 'self'"
    said = page["answer"]
    words = [said["question"], said["headline"], *(f"{what}: {text}" for what, text in said["details"])]
    filled = {
        "policy": policy,
        "title": html.escape(said["question"]),
        "plain": "".join(f"<p>{html.escape(text)}</p>" for text in words),
        "style": style,
        # Inside a script element only "<" could end it; "&" means nothing there.
        "data": as_json(page).replace("<", "\\u003c"),
        "script": script,
    }
    pieces = template.split("@@")  # every second piece is a name
    return "".join(filled[piece] if n % 2 else piece for n, piece in enumerate(pieces))
