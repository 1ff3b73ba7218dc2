"""Comparisons as a test reads them: the words of small ones, their folders and their tables."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

from tests.cli_tools import MINE as MINE_ALONE
from tests.cli_tools import isofed, result

# Noisy data and few test samples: accuracies differ between seeds and methods.
TUNE = (
    "data=synthetic:samples=200,test=80",
    "model=mlp",
    "partition=dirichlet:0.5",
    "clients=4",
    "local_epochs=1",
    "rounds=12",
    "executor=serial",
)
WORDS = (*TUNE, "lr=0.1")
MINE = (
    MINE_ALONE
    + '''

@dataclass(frozen=True)
class Diverges(Method):
    """NaN everywhere."""

    def end(self, visit):
        visit.update = visit.update * float("nan")


@dataclass(frozen=True)
class ServerRaises(Method):
    """A mistake of its author."""

    def aggregate(self, round):
        raise ZeroDivisionError("nothing to divide by")


@dataclass(frozen=True)
class BuildRaises(Method):
    """One that shows before the first round."""

    def build(self, network, run, rng):
        raise ZeroDivisionError("nothing to divide by")

'''
)


def short(method: str) -> str:
    """A method's name without the folder of its file."""
    return re.sub(r"[^+]*/(?=[^/+]*\.py:)", "", method)


class Comparison:
    """A finished comparison: its folder, what it printed, and its tables."""

    def __init__(self, root: Path, out: str) -> None:
        self.root, self.out = root, out
        self.json: dict[str, Any] = json.loads((root / "comparison.json").read_text())
        self.rows: list[dict[str, Any]] = self.json["rows"]
        with (root / "comparison.csv").open(newline="") as file:
            self.csv = list(csv.DictReader(file))

    def runs(self) -> dict[str, dict[int, Path]]:
        """The runs' folders by method and seed, as the runs themselves say."""
        found: dict[str, dict[int, Path]] = {}
        for path in self.root.rglob("result.json"):
            record = result(path.parent)
            found.setdefault(short(record["method"]), {})[record["seed"]] = path.parent
        return found


def compare(root: Path, *words: str, code: int = 0, cwd: Path | None = None) -> Comparison:
    done = isofed("compare", *words, f"out={root}", cwd=cwd)
    assert done.code == code, done
    if code == 0:
        assert done.err == ""
    return Comparison(root, done.out)


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if "second" not in k and "memory" not in k} for row in rows]


def printed(out: str) -> dict[str, list[str]]:
    """The rows of the printed table by method."""
    lines = out[out.index("\nmethod ") :].strip().splitlines()[1:]
    return {line.split()[0]: line.split() for line in lines[: lines.index("")]}
