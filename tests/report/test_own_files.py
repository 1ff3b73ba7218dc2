"""Runs of different code are different methods, whatever their files are called."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from isofed.report.answer import answer
from isofed.report.gather import Found, Reader
from isofed.report.page import content
from tests.report.made import make_run

CODE = """
from dataclasses import dataclass
from isofed import Method

@dataclass(frozen=True)
class M(Method):
    amount: float = 0.5

    def aggregate(self, round):
        round.update = self.amount * round.update

def build(classes, shape):
    raise NotImplementedError
"""


def version(file: Path, number: int) -> Path:
    """A file of one's own, as it is in this version."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{CODE}# version {number}\n")
    return file


def read(*folders: Path) -> Found:
    found = Reader().read(folders)
    assert not found.problems
    return found


def rows(found: Found) -> dict[str, list[int]]:
    return {row: list(by_seed) for row, by_seed in found.rows.items()}


def digest(run: Path) -> str:
    (found,) = json.loads((run / "environment.json").read_text())["files"].values()
    return str(found)[:8]


def test_files_of_one_name_in_two_folders_are_two_methods(tmp_path: Path) -> None:
    out, made = tmp_path / "out", {"pa": 0.65, "pb": 0.14}
    make_run(out / "fedavg", [0.56], rounds=1)
    for number, (folder, accuracy) in enumerate(made.items()):
        file = version(tmp_path / folder / "m.py", number)
        make_run(out / folder, [accuracy], f"{file}:M", rounds=1)
    for given in ([out], [out / "pb", out / "fedavg", out / "pa"]):
        found = read(*given)
        assert rows(found) == {"fedavg": [0], "pa/m.py:M": [0], "pb/m.py:M": [0]}
        said = answer(found)
        assert said.question.startswith("Which of these 3 methods")
        assert said.headline == "pa/m.py:M, with 65.0 % accuracy."
    (repeat,) = content(found)["repeat"]
    assert all(f"{tmp_path / folder / 'm.py'}:M" in repeat for folder in made)


def test_versions_of_a_file_are_told_apart_and_not_averaged(tmp_path: Path) -> None:
    file = version(tmp_path / "m.py", 1)
    for seed in (0, 1):
        make_run(tmp_path / "va" / f"seed-{seed}", [0.5], f"{file}:M", seed)
    version(file, 2)
    for seed in (0, 2):
        make_run(tmp_path / "vb" / f"seed-{seed}", [0.7], f"{file}:M", seed)
    first, second = (f"m.py (fingerprint {digest(tmp_path / v / 'seed-0')}):M" for v in ("va", "vb"))
    assert first != second
    assert rows(read(tmp_path / "va", tmp_path / "vb")) == {first: [0, 1], second: [0, 2]}
    assert rows(read(tmp_path / "vb", tmp_path / "va")) == {second: [0, 2], first: [0, 1]}
    assert rows(read(tmp_path / "vb")) == {"m.py:M": [0, 2]}


def test_networks_and_splits_of_ones_own_are_told_apart_as_well(tmp_path: Path) -> None:
    net, split = version(tmp_path / "a" / "net.py", 1), tmp_path / "sites.json"
    split.write_text("[[0, 1], [2, 3]]")
    given: dict[str, Any] = {"model": f"{net}:build", "partition": f"from_file:{split}", "clients": 2}
    make_run(tmp_path / "one", [0.5], **given)
    make_run(tmp_path / "two", [0.5], **given | {"model": f"{version(tmp_path / 'b' / 'net.py', 2)}:build"})
    split.write_text("[[0, 2], [1, 3]]")
    make_run(tmp_path / "three", [0.5], **given)
    labels = list(rows(read(tmp_path / "one", tmp_path / "two")))
    assert labels == ["fedavg model=a/net.py:build", "fedavg model=b/net.py:build"]
    labels = list(rows(read(tmp_path / "one", tmp_path / "three")))
    assert len(labels) == 2 and all(label.startswith("fedavg partition=from_file:sites.json (") for label in labels)
    assert "settings gets furthest" in answer(read(tmp_path / "one", tmp_path / "three")).question


def test_the_same_code_is_one_method_wherever_it_lay(tmp_path: Path) -> None:
    for seed, folder in enumerate(("here", "there")):
        file = version(tmp_path / folder / "m.py", 1)
        make_run(tmp_path / "out" / folder, [0.5], f"{file}:M+fedprox", seed, model=f"{file}:build")
    assert rows(read(tmp_path / "out")) == {"m.py:M+fedprox": [0, 1]}
    shutil.copytree(tmp_path / "out" / "there", tmp_path / "out" / "unknown")
    environment = tmp_path / "out" / "unknown" / "environment.json"
    environment.write_text(json.dumps(json.loads(environment.read_text()) | {"files": "damaged"}))
    found = Reader().read([tmp_path / "out"])  # what is not known is no difference
    assert rows(found) == {"m.py:M+fedprox": [0, 1]} and "two runs of m.py:M+fedprox" in found.problems[0]


def test_rows_of_a_comparison_keep_their_order(tmp_path: Path) -> None:
    for number, folder in enumerate(("pa", "pb")):
        make_run(tmp_path / "out" / folder, [0.5], f"{version(tmp_path / folder / 'm.py', number)}:M")
    make_run(tmp_path / "out" / "fedavg", [0.5])
    table = {"rows": [{"method": "fedavg"}, {"method": "pa/m.py:M"}, {"method": "pb/m.py:M"}]}
    (tmp_path / "out" / "comparison.json").write_text(json.dumps(table))
    assert list(rows(read(tmp_path / "out"))) == ["fedavg", "pa/m.py:M", "pb/m.py:M"]
