"""The numbers that the papers print, as data."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("published.csv")
PAPERS = {
    "feduv": "FedUV",
    "univarfl": "UniVarFL",
    "spherefed": "SphereFed",
    "feddecorr": "FedDecorr",
    "fedalign": "FedAlign",
}

Key = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Published:
    """One number of a table."""

    paper: str  # as the papers write it: FedUV
    table: str  # T1
    dataset: str
    setting: str
    method: str
    note: str
    printed: str  # as it stands in the file: a number, UNREADABLE or DIVERGES
    mean: float | None
    std: float | None

    @property
    def key(self) -> Key:
        return self.paper, self.table, self.dataset, self.setting, self.method


@cache
def rows() -> dict[Key, Published]:
    """All published numbers, by their place, in the order of the file."""
    with FILE.open(encoding="utf-8", newline="") as file:
        found = [_row(line) for line in csv.DictReader(file)]
    return {row.key: row for row in found}


def _row(line: dict[str, str]) -> Published:
    mean, std = _number(line["mean"]), _number(line["std"])
    place = {name: line[name] for name in ("paper", "table", "dataset", "setting", "method", "note")}
    return Published(**place, printed=line["mean"], mean=mean, std=std)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
