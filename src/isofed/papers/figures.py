"""What figures are drawn from: a few numbers of a run's diagnostics, kept with its result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

SHOWN = 100  # singular values that are kept of a spectrum: as many as the papers draw
KEPT = (
    "round",
    "classifier_spectrum",
    "classifier_effective_rank",
    "alignment",
    "representation_spectrum",
    "significant",
    "samples",
    "local",
)
Lines = Sequence[Mapping[str, Any]]


def numbers(lines: Lines, diagnosis: Mapping[str, Any], sections: Iterable[str]) -> dict[str, Any]:
    """What figures are drawn from: every diagnosed round, and these sections of the diagnosis afterwards.

    Curvature is always among them: it took long, and says which clients the table's numbers come from.
    """
    kept = [*sections, *(["curvature"] if diagnosis.get("curvature") else [])]
    found: dict[str, Any] = {name: _cut(diagnosis.get(name)) for name in dict.fromkeys(kept)}
    if lines:
        found["lines"] = [{key: _cut(line[key]) for key in KEPT if key in line} for line in lines]
    return {"figure": found} if found else {}


def _cut(value: Any) -> Any:
    """Long lists of numbers shortened to what is drawn, however deep they lie."""
    if isinstance(value, Mapping):
        return {k: v if k in ("class", "client") else _cut(v) for k, v in value.items()}
    if isinstance(value, list):
        return value[:SHOWN] if all(isinstance(v, float | int) for v in value) else [_cut(v) for v in value]
    return value


def measured(lines: Lines, diagnosis: Mapping[str, Any]) -> dict[str, float | None]:
    """Single numbers of the last round that was diagnosed, and of the diagnosis afterwards."""
    found: dict[str, float | None] = {}
    if lines:
        last = lines[-1]
        spectrum, local = last.get("classifier_spectrum") or [], last.get("local") or []
        aligned = last.get("alignment") or {}
        found = {
            "singular_sum": math.fsum(spectrum) if spectrum else None,
            "singular_least": min(spectrum) if spectrum else None,
            "significant": last.get("significant"),
            "gap": math.fsum(one["gap"] for one in local) / len(local) if local else None,
            "cosine": aligned.get("cosine"),
            "norm_difference": aligned.get("norm_difference"),
        }
    if drawn := diagnosis.get("tsne"):
        found |= {"tsne_points": len(drawn["points"]), "tsne_spread": _spread(drawn)}
    return {name: None if value is None else float(f"{value:.6g}") for name, value in found.items()}


def _spread(drawn: Mapping[str, Any]) -> float | None:
    """The share of the variance of a class's points that lies between clients: 0 where clients see alike, at most 1."""
    if not drawn.get("client"):
        return None
    points, classes, clients = (np.asarray(drawn[name]) for name in ("points", "class", "client"))
    shares = []
    for label in np.unique(classes):
        mine, who = points[classes == label], clients[classes == label]
        within = sum(float(((mine[who == c] - mine[who == c].mean(0)) ** 2).sum()) for c in np.unique(who))
        total = float(((mine - mine.mean(0)) ** 2).sum())
        shares.append(1 - within / total if total else 0.0)
    return float(np.mean(shares))
