"""The presets say what the papers did, and every published number has its cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from isofed.config import lr_at
from isofed.errors import UserError
from isofed.papers import presets
from isofed.papers.figures import measured as of_figures
from isofed.papers.measure import MEASURES
from isofed.papers.plan import Job, Length, matching
from isofed.papers.presets import Cell, Preset
from isofed.papers.published import PAPERS, rows
from isofed.papers.tiny import SHAPES

WANTED: dict[str, dict[str, Iterable[int]]] = {
    "feduv": {"table": range(1, 6), "figure": (1, 3, 4)},
    "univarfl": {"table": range(1, 3), "figure": ()},
    "spherefed": {"table": range(1, 5), "figure": range(2, 6)},
    "feddecorr": {"table": range(1, 9), "figure": range(1, 10)},
    "fedalign": {"table": range(1, 8), "figure": (1,)},
}


@pytest.fixture(scope="module")
def every() -> list[Preset]:
    return list(presets.every())


def find(preset: str, dataset: str, setting: str, method: str, variant: str = "default") -> Cell:
    paper, name = preset.split("/")
    cells = presets.load(paper, name).of(variant)
    (found,) = [c for c in cells if (c.dataset, c.setting, c.method) == (dataset, setting, method)]
    return found


def test_every_table_and_figure_has_a_preset() -> None:
    for paper, kinds in WANTED.items():
        assert presets.names(paper) == [f"{kind}{n}" for kind, numbers in kinds.items() for n in numbers]


def test_every_published_number_belongs_to_exactly_one_cell(every: list[Preset]) -> None:
    covered = Counter(row.key for preset in every for cell in preset.cells for row in cell.rows.values())
    assert set(covered) == set(rows())
    assert set(covered.values()) == {1}


def test_cells_without_a_published_number_are_known(every: list[Preset]) -> None:
    tables = [preset for preset in every if preset.name.startswith("table")]
    extra = {(p.paper, p.name, c.method) for p in tables for c in p.cells if len(c.rows) < len(c.measures)}
    assert extra == {("fedalign", "table1", "FedAlign")}  # the paper has no Hessian of its own method


def test_every_cell_of_every_variant_is_a_valid_run(every: list[Preset]) -> None:
    known = {*MEASURES, *of_figures([{"round": 1}], {"tsne": {"points": []}})}
    for preset in every:
        for cell in [*preset.cells, *(c for cells in preset.variants.values() for c in cells)]:
            job = Job(cell, 0)
            assert len(job.key) == 16 and str(job.settings.method)
            assert job.settings.data.partition(":")[0] in SHAPES
            assert {m for m in cell.measures.values() if not m.startswith("domain:")} <= known
            assert cell.after is None or cell.after != cell.method or cell.variant != "default"
        names = Counter((c.dataset, c.setting, c.method) for c in preset.cells)
        assert set(names.values()) == {1}


FEDUV = "rounds=60 local_epochs=10 batch_size=128 last_batch=drop lr=0.01 momentum=0.9 weight_decay=1e-05 clients=10"
SPHERE = "rounds=100 local_epochs=10 batch_size=64 lr_schedule=cosine momentum=0.9 weight_decay=1e-05 clients=10"
DECORR = "rounds=100 local_epochs=10 batch_size=64 lr=0.01 lr_schedule=constant last_batch=keep model=mobilenetv2"
ALIGN = "local_epochs=20 batch_size=64 last_batch=drop nesterov=True persistent_momentum=True weight_decay=0.0001"


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        ("feduv/table1|CIFAR-100|alpha=0.01|FedUV", f"{FEDUV} model=feduv-resnet18 method=feduv lr_schedule=cosine"),
        ("feduv/table1|CIFAR-100|alpha=0.01|FedUV", "partition=dirichlet:0.01 augment=crop:4+flip"),
        ("feduv/table1|HAM10000|domain|FedProx", "partition=domain clients=4 model=feduv-resnet18 method=fedprox"),
        ("feduv/table2|Office-Home|rho=0.25|MOON", "rounds=60 participation=0.25 partition=domain"),
        ("feduv/table3|STL-10|alpha=0.01;E=40|Freeze", "rounds=100 local_epochs=40 model=feduv-cnn method=freeze"),
        ("feduv/table1|PACS|domain|FedUV|paper", "method=feduv:form=paper lr_schedule=constant last_batch=keep"),
        ("univarfl/table2|STL-10|alpha=0.01;rho=0.1|UniVarFL", "participation=0.1 method=univarfl rounds=100"),
        ("spherefed/table2|CIFAR-100|VGG13;alpha=0.1|FedNova+SphereFed+FFC", f"{SPHERE} method=fednova+spherefed"),
        ("spherefed/table2|CIFAR-100|ResNet18;IID|FedProx+BABU", f"{SPHERE} model=resnet18 partition=iid"),
        ("feddecorr/table1|CIFAR100|alpha=0.05|FedAvg+FedDecorr", f"{DECORR} method=feddecorr:beta=0.05"),
        (
            "feddecorr/table1|CIFAR100|alpha=0.05|FedAvg",
            "augment=crop:4+flip+autoaugment:form=feddecorr",
        ),
        ("feddecorr/table1|CIFAR10|alpha=inf|FedAvg+FedDecorr", f"{DECORR} method=feddecorr weight_decay=1e-05"),
        ("feddecorr/table1|CIFAR100|alpha=0.1|FedAvg+FedDecorr|paper", "method=feddecorr:form=paper"),
        ("feddecorr/table2|TinyImageNet|M=90|MOON", "partition=pathological:90 method=moon:head=none rounds=50"),
        ("feddecorr/table4|TinyImageNet|alpha=0.1;clients=100|FedAvg", "clients=100 participation=0.2 rounds=100"),
        ("feddecorr/table4|CIFAR100|alpha=0.1;clients=20|FedAvg", "clients=20 participation=1.0"),
        ("feddecorr/table3|DomainNet|domain|FedBN", "clients=6 weighting=uniform rounds=300 local_epochs=1"),
        ("fedalign/table4|CIFAR-100|alpha=0.5;C=64x0.25;R=100|GradAug", f"{ALIGN} clients=64 participation=0.25"),
        ("fedalign/table4|CIFAR-100|alpha=0.5;C=64x0.25;R=100|GradAug", "rounds=100 model=resnet56 method=gradaug"),
        ("fedalign/table2|CIFAR-100|homog|FedProx", "partition=iid method=fedprox:mu=0.0001 rounds=25 clients=16"),
    ],
)
def test_cells_are_set_as_the_papers_were(place: str, wanted: str) -> None:
    s = Job(find(*place.split("|")), 0).settings
    found = {key: str(value) for key, value in dict(s).items()}
    asked = dict(word.split("=", 1) for word in wanted.split())
    assert {key: found[key] for key in asked} == asked


def test_a_cell_that_two_tables_have_is_one_run() -> None:
    same = [
        find("feduv/table1", "CIFAR-100", "alpha=0.01", "FedAvg"),
        find("feduv/table4", "CIFAR-100", "alpha=0.01", "FedAvg"),
        find("univarfl/table1", "CIFAR-100", "alpha=0.01", "FedAvg"),
    ]
    assert len({Job(cell, 0).key for cell in same}) == 1
    other = find("feduv/table1", "CIFAR-100", "alpha=1.0", "FedAvg")
    assert Job(other, 0).key != Job(same[0], 0).key


def test_a_shortened_run_has_a_schedule_of_its_own() -> None:
    cell = find("feduv/table1", "CIFAR-100", "alpha=0.01", "FedAvg")
    job = Job(cell, 0, Length.of("0.3"))
    assert job.settings.rounds == 18 and job.length.label == "scale=0.3" and "scale=0.3" in job.name
    assert lr_at(job.settings, 18) < 0.02 * job.settings.lr  # down to almost nothing at its own end
    assert job.settings.diagnose == "every:6"
    assert job.key != Job(cell, 0).key


def test_rows_that_only_differ_after_the_last_round_say_so() -> None:
    assert find("spherefed/table2", "CIFAR-100", "MobileNetV2;alpha=0.5", "FedAvg+CCVR").after == "FedAvg"
    assert find("spherefed/table4", "CIFAR-100", "SENet;FedOpt+SphereFed;IID", "FFC").after == "without calibration"


def test_presets_go_by_short_names_and_wrong_ones_are_refused() -> None:
    assert presets.load("feduv", "t1") is presets.load("feduv", "table1")
    assert presets.load("feduv", "2").name == "table2" and presets.load("feduv", "fig3").name == "figure3"
    with pytest.raises(UserError, match="did you mean 'feduv'"):
        presets.names("fedduv")
    with pytest.raises(UserError, match="no table or figure of feduv 'table9'"):
        presets.load("feduv", "table9")
    with pytest.raises(UserError, match="no variant of feduv table1 'papr'"):
        presets.load("feduv", "table1").of("papr")


def test_what_is_printed_is_read_as_it_stands() -> None:
    found = rows()
    assert len(found) == 954 and {row.paper for row in found.values()} == set(PAPERS.values())
    assert sum(row.printed == "UNREADABLE" for row in found.values()) == 52
    one = found["FedUV", "T1", "CIFAR-100", "alpha=0.01", "FedUV"]
    assert (one.mean, one.std) == (55.7, 1.0)
    assert found["SphereFed", "T1", "CIFAR-100", "MobileNetV2;alpha=0.5;classifier GFLOPs", "FedAvg"].mean == 1.9e4
    diverges = [row for row in found.values() if row.printed == "DIVERGES"]
    assert [row.method for row in diverges] == ["+Norm"] and diverges[0].mean is None


def test_a_hessian_is_probed_less_after_a_shortened_run() -> None:
    cell = presets.load("fedalign", "table1").cells[0]
    assert Length().diagnosis(cell.diagnose) == {"only": "curvature", "samples": 640, "probes": 100, "clients": 16}
    assert Length(0.2).diagnosis(cell.diagnose) == {"only": "curvature", "samples": 640, "probes": 33, "clients": 16}
    assert Length(0.2).diagnosis({"only": "tsne"}) == {"only": "tsne"}


def test_a_run_is_measured_for_every_table_that_it_is_a_row_of(every: list[Preset]) -> None:
    """Otherwise it would have to be run again for a number that it could have told."""
    told: dict[str, list[set[str]]] = {}
    diagnosed = {"lambda_max", "H_T", "H_N", "H_D"}
    for cell in (cell for preset in every for cell in preset.cells):
        always = {"accuracy", "before", "seconds", "train_loss"}
        told.setdefault(Job(cell, 0).key, []).append({*cell.measures.values(), *cell.also, *always} & {*MEASURES})
    shared = [sets for sets in told.values() if len(sets) > 1]
    assert len(shared) > 50
    for sets in shared:
        assert all(set.union(*sets) - diagnosed <= one for one in sets)


@pytest.mark.parametrize(
    ("paper", "table", "only", "settings"),
    [
        ("feddecorr", "table1", "cifar10,alpha=0.05", {("CIFAR10", "alpha=0.05")}),
        ("feddecorr", "table2", "m=3", {("CIFAR10", "M=3")}),
        ("feddecorr", "table4", "cifar100,alpha=0.1,clients=10", {("CIFAR100", "alpha=0.1;clients=10")}),
        ("feduv", "table1", "cifar100,alpha=1", {("CIFAR-100", "alpha=1.0")}),
    ],
)
def test_a_number_that_is_asked_for_is_whole(paper: str, table: str, only: str, settings: set[tuple[str, str]]) -> None:
    assert {(c.dataset, c.setting) for c in matching(presets.load(paper, table).cells, only)} == settings


def test_a_number_says_of_which_setting_it_is(every: list[Preset]) -> None:
    for preset in every:
        names = Counter((c.dataset, text, c.method) for c in preset.cells for text in c.measures)
        assert [name for name, count in names.items() if count > 1] == [], preset


def test_what_presets_follow_is_said_in_words(every: list[Preset]) -> None:
    assert all(presets.about(paper) for paper in PAPERS)
    assert all(preset.explained[variant] for preset in every for variant in preset.variants)


@pytest.mark.parametrize(("paper", "seed"), [("feduv", 42), ("univarfl", 42), ("feddecorr", 0), ("fedalign", 1)])
def test_a_variant_has_the_split_of_the_released_code(paper: str, seed: int) -> None:
    preset = presets.load(paper, "table1")
    drawn = [str(c.values["partition"]) for c in preset.cells if str(c.values["partition"]).startswith("dirichlet")]
    assert [c.values["partition"] for c in preset.of("split")] == [f"{text},numpy_seed={seed}" for text in drawn]
    assert drawn
