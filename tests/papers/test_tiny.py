"""Presets run from end to end at a tiny scale: one of each paper here, all of them with ``make test-papers``."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from isofed.engine.world import World
from isofed.papers import presets
from isofed.papers.budget import Budget, Telling
from isofed.papers.data import SHAPES, made_up
from isofed.papers.plan import Job, Length, covering, matching
from isofed.papers.presets import Preset
from isofed.papers.published import PAPERS
from isofed.papers.results import Results
from isofed.papers.runner import run

TINY = Length(None)
# Small networks, so that these take a moment.
SAMPLE = [
    ("feduv", "table1", "pacs", "FedUV"),
    ("univarfl", "table1", "pacs", "UniVarFL"),
    ("spherefed", "figure5", "", "FedAvg+SphereFed+FFC"),
    ("feddecorr", "table8", "alpha=0.05,resnet32", "FedAvg+FedDecorr"),
    ("fedalign", "table2", "homog", "StochDepth"),
]


def check(preset: Preset, jobs: list[Job], folder: Path) -> None:
    results = Results(folder / "results")
    outcome = run(jobs, results, folder / "runs", Budget(None), Telling())
    assert outcome.failures == {} and outcome.missing == 0
    for job in jobs:
        found = results.of(job)
        assert found is not None and found.content["length"] == "tiny"
        assert found.content.get("failure") or set(job.cell.measures.values()) <= set(found.measures)


@pytest.mark.parametrize(("paper", "name", "only", "method"), SAMPLE, ids=lambda text: text)
def test_a_preset_of_each_paper_runs(paper: str, name: str, only: str, method: str, tmp_path: Path) -> None:
    preset = presets.load(paper, name)
    cells = matching(preset.cells, only, method)
    check(preset, [Job(cells[0], 0, TINY, how=(("executor", "serial"),))], tmp_path)


EVERY = [(paper, name) for paper in PAPERS for name in presets.names(paper)]


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("ISOFED_TEST_PAPERS"), reason="make test-papers runs every preset")
@pytest.mark.parametrize(("paper", "name"), EVERY, ids=lambda text: text)
def test_every_preset_runs(paper: str, name: str, tmp_path: Path) -> None:
    preset = presets.load(paper, name)
    check(preset, [Job(cell, 0, TINY) for cell in covering(preset.cells)], tmp_path)


def test_a_few_cells_cover_all_that_occurs() -> None:
    cells = presets.load("feddecorr", "table1").cells
    chosen = covering(cells)
    assert len(chosen) < len(cells) / 4
    for part in ("dataset", "setting", "method"):
        assert {getattr(c, part) for c in chosen} == {getattr(c, part) for c in cells}


@pytest.mark.parametrize("name", ["cifar100", "pacs", "office-caltech10"])
def test_made_up_data_have_the_shape_of_the_real_ones(name: str) -> None:
    classes, size, domains = SHAPES[name]
    made = made_up(f"{name}:norm=own")
    assert len(made.classes) == classes and made.shape == (3, size, size) and made.domains == tuple(domains)
    assert np.bincount(made.train.labels.numpy(), minlength=classes).min() >= 1 and len(made.test) < 50
    assert made.test.domains is None or set(made.test.domains.tolist()) == set(range(len(domains)))


def test_all_methods_of_a_seed_have_the_same_split_and_initial_weights() -> None:
    cells = matching(presets.load("feduv", "table1").cells, "stl10,alpha=0.01")
    data = made_up("stl10")
    worlds = [World.create(Job(cell, 3, TINY).settings, data) for cell in cells]
    first, *others = (world.network().state_dict() for world in worlds)
    assert len(others) == 4
    for world, weights in zip(worlds[1:], others, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(worlds[0].clients, world.clients, strict=True))
        assert first.keys() == weights.keys()
        assert all(torch.equal(first[name], weights[name]) for name in first)
    other = World.create(Job(cells[0], 4, TINY).settings, data)
    assert not all(torch.equal(first[name], value) for name, value in other.network().state_dict().items())
