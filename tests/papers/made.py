"""Cells that run in a moment, for tests of everything around them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isofed.papers.plan import Job, Length
from isofed.papers.presets import Cell
from isofed.papers.published import Published
from isofed.papers.results import Results

SMALL = {
    "data": "synthetic:samples=200,test=80,classes=4,size=4",
    "model": "mlp",
    "clients": 3,
    "rounds": 4,
    "local_steps": 2,
    "batch_size": 16,
    "partition": "iid",
    "executor": "serial",
}
ENVIRONMENT = {
    **{"isofed": "1", "python": "3", "torch": "2", "numpy": "2", "device": "cpu", "device_name": "a chip"},
    **{"data": "f" * 32, "code": "0"},
}


def cell(method: str = "FedAvg", values: Mapping[str, Any] | None = None, **more: Any) -> Cell:
    """A cell of a table that no paper has."""
    known = {"FedAvg": "fedavg", "FedUV": "feduv", "FFC": "fedavg+ffc"}
    said = {
        "paper": "feduv",
        "preset": "table9",
        "dataset": "Made-Up",
        "setting": "IID",
        "variant": "default",
        "measures": {"IID": "accuracy"},
        "rows": {},
        "diagnose": {},
    }
    return Cell(
        method=method, values={**SMALL, "method": known.get(method, method), **(values or {})}, **{**said, **more}
    )


def row(mean: float | None, std: float | None = None, printed: str | None = None) -> Published:
    text = printed or (str(mean) if mean is not None else "UNREADABLE")
    return Published("FedUV", "T9", "Made-Up", "IID", "FedAvg", "", text, mean, std)


def write(folder: Path, job: Job, measures: Mapping[str, float | None], **more: Any) -> None:
    """A result as a run would have written it."""
    from isofed.papers.results import head

    content = {
        "measures": dict(measures),
        "environment": ENVIRONMENT,
        "rounds": 4,
        "seconds": 2.0,
        "events": 0,
        "curve": {"round": [4], "accuracy": [0.5]},
        "exchanges": [],
        "notes": [],
    }
    Results(folder).write(job, head(job) | content | more)


def jobs(*cells: Cell, seeds: int = 1, **more: Any) -> list[Job]:
    return [Job(one, seed, more.get("length", Length())) for seed in range(seeds) for one in cells]
