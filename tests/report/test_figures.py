"""Figures: all that there are records for, as SVG and PNG, with every method in them, the same each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from isofed.diagnose import Diagnosis, Options, diagnosed
from isofed.errors import UserError
from isofed.report import figures, figures_after
from isofed.report.gather import Reader
from isofed.report.style import drawing, look
from tests.engine.plain import small

pytest.importorskip("matplotlib")

CURVES = {f"{value}-by-{axis}" for value in ("accuracy", "loss") for axis in ("round", "megabytes", "seconds")}
COUNTED = {"accuracy-by-gflop", "loss-by-gflop"}
RECORDED = {"classifier-spectrum", "representation-spectrum", "alignment-by-round"}
DIAGNOSED = {"curvature", "calibration", "landscape", "tsne-by-class", "tsne-by-client"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods over two seeds, recorded and diagnosed."""
    root = tmp_path_factory.mktemp("figures")
    for method in ("fedavg", "fedprox:mu=0.5"):
        for seed in (0, 1):
            out = root / method.split(":")[0] / f"seed-{seed}"
            small(method=method, seed=seed, rounds=3, diagnose="every:1", keep_clients="last", out=out).fit()
            only = {"only": "cost"} if seed else {}  # the rest is drawn of the first seed
            diagnosed(Diagnosis(out, Options.of({"samples": "20", "probes": "8", "points": "5"} | only)))
    return root


@pytest.fixture(scope="module")
def drawn(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return figures.write_all([runs], tmp_path_factory.mktemp("drawn") / "new" / "folder")


def texts(svg: Path) -> str:
    return " ".join("".join(e.itertext()) for e in ElementTree.parse(svg).iter() if e.tag.endswith("text"))


def test_everything_is_drawn_twice(drawn: list[Path]) -> None:
    names = {path.stem for path in drawn}
    assert names == CURVES | COUNTED | RECORDED | DIAGNOSED | {"methods", "split-1", "split-2"}
    assert len(drawn) == 2 * len(names)
    for path in drawn:
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert image.width > 300 and np.asarray(image.convert("L")).std() > 3, path
        else:
            assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_all_methods_are_named(drawn: list[Path]) -> None:
    for path in drawn:
        if path.suffix == ".svg" and not path.stem.startswith("split"):
            found = texts(path)
            assert "fedavg" in found and "fedprox:mu=0.5" in found, path


def test_the_same_runs_give_the_same_files(runs: Path, drawn: list[Path], tmp_path: Path) -> None:
    again = figures.write_all([runs], tmp_path)
    for first, second in zip(drawn, again, strict=True):
        assert first.name == second.name and first.read_bytes() == second.read_bytes(), first.name


def test_methods_differ_by_more_than_colour() -> None:
    looks = [look(place) for place in range(24)]
    grey = {(str(one["linestyle"]), one["marker"]) for one in looks}
    assert len(grey) == 24
    assert len({(*map(str, one.values()),) for one in looks}) == 24


def test_the_line_is_the_mean_and_the_band_one_deviation(runs: Path) -> None:
    found = Reader().read([runs])
    with drawing():
        axes = figures.curves(found, "accuracy", "round").axes[0]
    both = [[line["accuracy"] for line in run.history] for run in found.rows["fedavg"].values()]
    line, band = axes.get_lines()[0], axes.collections[0].get_paths()[0].vertices
    assert line.get_xdata().tolist() == [1, 2, 3]
    assert line.get_ydata() == pytest.approx(100 * np.mean(both, 0))
    top = 100 * (np.mean(both, 0) + np.std(both, 0, ddof=1))
    assert max(y for x, y in band if x == 3) == pytest.approx(top[-1])


def test_gflop_are_those_of_the_local_steps(runs: Path) -> None:
    found = Reader().read([runs])
    run = found.rows["fedavg"][0]
    with drawing():
        axes = figures.curves(found, "accuracy", "gflop").axes[0]
    samples = np.cumsum([line["samples"] for line in run.history])
    flops = [r.diagnosis["cost"]["flops_per_sample"] for r in found.rows["fedavg"].values()]
    assert flops[0] == flops[1] and axes.get_lines()[0].get_xdata() == pytest.approx(flops[0] * samples / 1e9)


def test_local_models_have_a_thin_line_beside_the_global_one(runs: Path) -> None:
    found = Reader().read([runs])
    with drawing():
        axes = figures.spectra(found, "representation_spectrum").axes[0]
    whole, local = axes.get_lines()[:2]
    last = [run.diagnostics[-1] for run in found.rows["fedavg"].values()]
    own = np.log(np.maximum([o["representation_spectrum"] for line in last for o in line["local"]], 1e-12))
    assert local.get_ydata() == pytest.approx(np.exp(own.mean(0)), rel=1e-6)
    assert local.get_linewidth() < whole.get_linewidth() and "thin: local models" in axes.get_title(loc="left")


def test_a_run_with_nothing_but_metrics(tmp_path: Path) -> None:
    small(rounds=1, method="central", out=tmp_path / "run").fit()
    made = {path.stem for path in figures.write_all([tmp_path / "run"], tmp_path / "figures")}
    assert made == {name for name in CURVES if "megabytes" not in name} | {"methods"}


@pytest.mark.parametrize("broken", ["no-runs", "a-file"])
def test_what_cannot_be_drawn_is_said(broken: str, runs: Path, tmp_path: Path) -> None:
    if broken == "no-runs":
        with pytest.raises(UserError, match="there are no runs in"):
            figures.write_all([tmp_path], tmp_path / "figures")
    else:
        (tmp_path / "figures").write_text("")
        with pytest.raises(UserError, match="figures cannot be written into"):
            figures.write_all([runs], tmp_path / "figures")


def test_a_landscape_with_holes_is_drawn() -> None:
    content: dict[str, Any] = {"steps": [-1, 0, 1], "loss": [[1.0, 2.0, None], [0.5, 0.1, 3.0], [1.0, 2.0, 9.0]]}
    with drawing():
        assert figures_after.landscape({"fedavg": content}).axes
