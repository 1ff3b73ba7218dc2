"""What was measured on runs, as far as a page draws it, and no more of it than a picture shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isofed.report.gather import inside

_SPECTRA = 40  # most rounds with a spectrum
_VALUES = 128  # most singular values of one
_DOTS = 1500  # most points of a scatter
_DRAWN = ("cost", "curvature", "calibration", "landscape", "tsne")  # of a diagnosis
_COST = ("points_per", "parameters", "held", "macs_per_sample")  # of its cost


def by_round(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Diagnostics by name, as far as they are there: numbers by round, and spectra of some rounds."""
    kept = thin(list(lines), _SPECTRA)
    numbers: dict[str, Callable[[dict[str, Any]], Any]] = {
        "classifier_effective_rank": lambda line: line.get("classifier_effective_rank"),
        "significant": lambda line: line.get("significant"),
        "gap": lambda line: _mean([own.get("gap") for own in _own(line)]),
        "cosine": lambda line: inside(line, "alignment", "cosine"),
        "norm_difference": lambda line: inside(line, "alignment", "norm_difference"),
        "distance": lambda line: _mean(inside(line, "drift", "distance")),
        "angle": lambda line: _mean(inside(line, "drift", "angle")),
    }
    of_rounds = {name: [of(line) for line in lines] for name, of in numbers.items()}
    found: dict[str, Any] = {name: v for name, v in of_rounds.items() if any(x is not None for x in v)}
    spectra = {name: [line.get(name) for line in kept] for name in ("classifier_spectrum", "representation_spectrum")}
    spectra["local_spectrum"] = [_local(line) for line in kept]
    for name, values in spectra.items():
        ordered = [_spectrum(one) for one in values]
        if any(ordered):
            found[name] = ordered
    if found:
        found["round"], found["spectrum_round"] = [x["round"] for x in lines], [x["round"] for x in kept]
    return found


def _own(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was measured on local models before averaging."""
    found = line.get("local")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _local(line: Mapping[str, Any]) -> list[float]:
    """The spectrum of a typical local model: the geometric mean of theirs, place by place, as far as none is zero."""
    spectra = [sorted(_numbers(own.get("representation_spectrum")), reverse=True) for own in _own(line)]
    return [
        math.exp(math.fsum(map(math.log, values)) / len(values))
        for values in zip(*(one for one in spectra if one), strict=False)
        if min(values) > 0
    ]


def _numbers(values: Any) -> list[float]:
    if not isinstance(values, list):
        return []
    return [float(v) for v in values if isinstance(v, (int, float)) and math.isfinite(v)]


def _mean(values: Any) -> float | None:
    numbers = [float(values)] if isinstance(values, (int, float)) else _numbers(values)
    return math.fsum(numbers) / len(numbers) if numbers else None


def _spectrum(values: Any) -> list[list[float]]:
    """Pairs of a place and a value, the largest first; of a long one some places are left out."""
    ordered = sorted(_numbers(values), reverse=True)
    return [[place, value] for place, value in thin(list(enumerate(ordered, 1)), _VALUES)]


def drawn(found: Mapping[str, Any]) -> dict[str, Any]:
    """What was measured after the run, as far as it is drawn; a scatter with no more points than a picture shows."""
    kept = {name: found[name] for name in _DRAWN if isinstance(found.get(name), dict)}
    if "cost" in kept:
        kept["cost"] = {name: kept["cost"].get(name) for name in _COST}
    if "curvature" in kept and inside(kept, "curvature", "clients"):
        kept["curvature"] = {**kept["curvature"], "clients": between_clients(kept["curvature"])}
    scatter = kept.get("tsne")
    if isinstance(scatter, dict):
        size = max((len(v) for v in scatter.values() if isinstance(v, list)), default=0)
        whole = {k: v for k, v in scatter.items() if isinstance(v, list) and len(v) == size}
        kept["tsne"] = {**scatter, **{k: thin(v, _DOTS) for k, v in whole.items()}}
    return kept


def between_clients(curvature: Mapping[str, Any]) -> dict[str, Any]:
    """H_N and H_D, of the diagonals and of the tensors' traces, as far as they are known.

    The diagonals are estimates, and ``error`` the length of their noise over that of what they estimate. From 1 on, or
    where it is not even known, noise outweighs the estimate: their H_N and H_D are then left out, as ``noise`` says.
    """
    clients = curvature.get("clients")
    if not isinstance(clients, dict):
        return {"noise": False}
    error = clients.get("error")
    noise = not (isinstance(error, (int, float)) and error < 1)
    found = {name: clients.get(name) for name in ("H_N", "H_D", "H_N_traces", "H_D_traces")}
    return found | {"noise": noise} | ({"H_N": None, "H_D": None} if noise else {})


def thin(values: list[Any], most: int) -> list[Any]:
    """At most so many of them, evenly chosen, with the first and the last."""
    if len(values) <= most:
        return values
    return [values[round(n * (len(values) - 1) / (most - 1))] for n in range(most)]
