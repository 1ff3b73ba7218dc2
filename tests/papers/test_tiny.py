"""Presets run from end to end at a tiny scale: one of each paper here, all of them with ``make test-papers``."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from isofed import models
from isofed.data import load
from isofed.diagnostics.cost import cost
from isofed.engine.world import World
from isofed.models import Network
from isofed.models.residual import residual_blocks
from isofed.papers import presets, thin, tiny
from isofed.papers.budget import Budget, Telling
from isofed.papers.plan import Job, Length, covering, matching
from isofed.papers.published import PAPERS
from isofed.papers.results import Results
from isofed.papers.runner import run
from isofed.papers.tiny import SHAPES, made_up

TINY = Length(None)
SERIAL = (("executor", "serial"),)
SAMPLE = [
    ("feduv", "table1", "pacs", "FedUV"),
    ("univarfl", "table1", "pacs", "UniVarFL"),
    ("spherefed", "figure5", "", "FedAvg+SphereFed+FFC"),
    ("feddecorr", "table8", "alpha=0.05,resnet32", "FedAvg+FedDecorr"),
    ("spherefed", "table1", "", "CCVR"),
    ("feddecorr", "table2", "tinyimagenet,m=80", "FedAvg"),
    ("feddecorr", "table3", "domainnet", "FedBN"),
    ("fedalign", "table2", "homog", "StochDepth"),
    ("fedalign", "table4", "64x0.25", "GradAug"),
]


def check(jobs: list[Job], folder: Path) -> None:
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
    check([Job(cells[0], 0, TINY, how=SERIAL)], tmp_path)


EVERY = [(paper, name) for paper in PAPERS for name in presets.names(paper)]


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("ISOFED_TEST_PAPERS"), reason="make test-papers runs every preset")
@pytest.mark.parametrize(("paper", "name"), EVERY, ids=lambda text: text)
def test_every_preset_runs(paper: str, name: str, tmp_path: Path) -> None:
    preset = presets.load(paper, name)
    check([Job(cell, 0, TINY, how=SERIAL) for cell in covering(preset.cells)], tmp_path)


WHOLE = sorted({(c.values["model"], c.values["method"], c.values["data"]) for p in presets.every() for c in p.cells})


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("ISOFED_TEST_PAPERS"), reason="make test-papers takes a step with each network")
@pytest.mark.parametrize("model", sorted({model for model, _, _ in WHOLE}))
def test_every_method_takes_a_step_with_the_whole_network(model: str) -> None:
    """Tiny runs have thin networks; a method might mind what only the whole one has."""
    data = {method: data for m, method, data in WHOLE if m == model}
    for method, name in data.items():
        found = cost(method, dataset=made_up(name), model=model, batch_size=2)
        assert found.network_macs > 0 and found.macs >= found.network_macs, method


def test_a_few_cells_cover_all_that_occurs() -> None:
    cells = presets.load("feddecorr", "table1").cells
    chosen = covering(cells)
    assert len(chosen) < len(cells) / 4
    for part in ("dataset", "setting", "method"):
        assert {getattr(c, part) for c in chosen} == {getattr(c, part) for c in cells}


def test_they_cover_rows_that_share_a_name_and_every_method_on_every_network() -> None:
    # In SphereFed's Table 3 the rows of both losses have the same names.
    for paper, name in (("spherefed", "table3"), ("fedalign", "table7")):
        cells = presets.load(paper, name).cells
        found, wanted = ({(c.values["method"], c.values["model"]) for c in some} for some in (covering(cells), cells))
        assert found == wanted


@pytest.mark.parametrize(
    ("name", "size"), [("cifar100", 32), ("stl10", 32), ("pacs", 32), ("imagenet-200", 32), ("office-caltech10", 64)]
)
def test_made_up_data_are_a_few_small_pictures_of_every_domain(name: str, size: int) -> None:
    domains = SHAPES[name][2]
    made = made_up(f"{name}:norm=own")
    assert len(made.classes) == tiny.CLASSES and made.shape == (3, size, size) and made.domains == tuple(domains)
    assert np.bincount(made.train.labels.numpy(), minlength=5).tolist() == [2 * max(1, len(domains))] * 5
    assert len(made.test) <= tiny.TESTED
    assert made.test.domains is None or set(made.test.domains.tolist()) == set(range(len(domains)))


def test_a_data_set_is_cut_to_a_few_small_pictures_of_its_own() -> None:
    whole = load("synthetic:samples=400,test=200,classes=8,size=96,domains=3")
    few = tiny.cut(whole, shared=False)
    assert few.classes == whole.classes[:5] and few.shape == (1, 32, 32) and few.domains == whole.domains
    groups = set(zip(few.train.labels.tolist(), few.train.domains.tolist(), strict=True))  # type: ignore[union-attr]
    assert len(few.train) == 2 * 5 * 3 and len(groups) == 5 * 3
    assert int(few.test.labels.max()) < 5 and len(few.test) == tiny.TESTED
    assert few.test.domains is not None and set(few.test.domains.tolist()) == {0, 1, 2}
    kept = {picture.numpy().tobytes() for picture in whole.train.images[:, ::3, ::3].contiguous()}
    assert all(picture.numpy().tobytes() in kept for picture in few.train.images)
    assert len(tiny.cut(whole, shared=True).train) == 6 * 5 * 3


def test_a_tiny_run_keeps_the_kind_of_split_and_takes_part_of_the_clients() -> None:
    some = matching(presets.load("feddecorr", "table2").cells, "m=80", "FedAvg")[0]
    few = Job(some, 0, TINY).settings
    assert (few.partition, few.clients) == ("pathological:2", 5)  # 80 of 200 classes
    many = matching(presets.load("fedalign", "table4").cells, "64x0.25,r=100", "FedAvg")[0]
    few = Job(many, 0, TINY).settings
    assert (few.partition, few.clients, few.participation, few.rounds) == ("dirichlet:0.5,min=0", 4, 0.5, 2)


def test_a_tiny_run_says_that_its_network_is_another_one() -> None:
    job = Job(presets.load("fedalign", "table1").cells[0], 0, TINY)
    assert job.settings.model.endswith("thin.py:resnet56") and "tiny" in str(job) and "tiny" in job.name
    assert job.kind == (job.settings.data, job.settings.model)


def test_a_tiny_diagnosis_looks_at_hardly_anything() -> None:
    assert tiny.options({"only": "curvature", "samples": 640, "probes": 100, "clients": 16}) == {
        "only": "curvature", "samples": 4, "probes": 8, "clients": 2, "points": 3,
    }  # fmt: skip
    assert tiny.options({"clients": 1})["clients"] == 1


def kinds(network: Network) -> dict[str, set[str]]:
    return {name: {type(m).__name__ for m in stage.modules()} for name, stage in network.stages.items()}


@pytest.mark.parametrize("name", ["feduv-cnn", "feduv-resnet18", "resnet56", "mobilenetv2", "vgg13", "senet18"])
def test_a_thin_network_has_the_parts_of_the_whole_one(name: str) -> None:
    whole = models.create(name, classes=7)
    small = models.create(thin.reference(name), classes=7)
    assert kinds(small) == kinds(whole) and (small.projector is None) == (whole.projector is None)
    assert small.width == whole.width // 8 and len(residual_blocks(small)) <= len(residual_blocks(whole))
    count, all_of_them = (sum(p.numel() for p in network.parameters()) for network in (small, whole))
    assert count < all_of_them / 40
    one, two = (network.eval()(torch.rand(2, 3, 32, 32)) for network in (small, whole))
    assert one.logits.shape == two.logits.shape == (2, 7) and one.features.shape == (2, small.width)
    for stage, seen in one.stages.items():
        assert seen.shape[2:] == two.stages[stage].shape[2:]  # the same strides
    assert all(p.isfinite().all() for p in small.state_dict().values())
    again = models.create(thin.reference(name), classes=7)
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), again.parameters(), strict=True))


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
