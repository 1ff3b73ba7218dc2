"""What a figure shows is what the page and the table show, and all of it can be read."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isofed.report import figures, figures_after
from isofed.report.gather import Found, Reader
from isofed.report.style import COLOURS, blank, decimals, drawing, legend, look
from tests.report.made import add_privacy, add_question, diagnose, make_comparison, make_run

pytest.importorskip("matplotlib")


def read(path: Path) -> Found:
    return Reader().read([path])


def inside(figure: Any) -> bool:
    """Whether every legend of a figure lies within it."""
    figure.canvas.draw()
    page = figure.bbox
    boxes = [one.get_window_extent() for one in figure.legends]
    return bool(boxes) and all(b.x0 >= 0 and b.x1 <= page.x1 and b.y0 >= 0 and b.y1 <= page.y1 for b in boxes)


def diagnosed(path: Path, section: str) -> dict[str, Any]:
    content = json.loads((path / "diagnosis.json").read_text())
    return {"fedavg": content[section]}


def test_a_final_model_after_a_last_question_has_a_diamond(tmp_path: Path) -> None:
    make_comparison(tmp_path, {"fedavg": [0.5, 0.6], "fedprox": [0.84, 0.84]})
    for seed, accuracy in enumerate((0.94, 0.96)):
        add_question(tmp_path / "fedprox" / f"seed-{seed}", accuracy, 0.25)
    found = read(tmp_path)
    with drawing():
        axes = figures.curves(found, "accuracy", "round").axes[0]
        losses = figures.curves(found, "loss", "megabytes").axes[0]
    (diamond,) = [line for line in axes.get_lines() if line.get_marker() == "D"]
    assert (diamond.get_xdata(), diamond.get_ydata()) == ([3], [pytest.approx(95)])
    assert diamond.get_color() == look(1)["color"] and "◇ final model" in axes.get_title(loc="left")
    assert [line.get_ydata() for line in losses.get_lines() if line.get_marker() == "D"] == [[pytest.approx(0.25)]]
    make_comparison(tmp_path / "none", {"fedavg": [0.5]})
    with drawing():
        assert "◇" not in figures.curves(read(tmp_path / "none")).axes[0].get_title(loc="left")


@pytest.mark.parametrize("rounds", [1, 2, 3, 40])
def test_rounds_are_whole_numbers(tmp_path: Path, rounds: int) -> None:
    make_run(tmp_path / "run", np.linspace(0.2, 0.8, rounds).tolist(), rounds=rounds)
    diagnose(tmp_path / "run", range(1, rounds + 1))
    found = read(tmp_path)
    with drawing():
        drawn = [figures.curves(found).axes[0], *figures.alignment(found).axes]
        for axes in drawn:
            axes.figure.canvas.draw()
            ticks = [float(t) for t in axes.get_xticks()]
            assert ticks and all(tick == round(tick) for tick in ticks)


def test_colours_are_those_of_the_page() -> None:
    style = (files("isofed.report") / "assets" / "page.css").read_text("utf-8")
    light = style[: style.index("data-theme")]
    assert tuple(re.findall(r"--s\d: (#\w+);", light)) == COLOURS


@pytest.mark.parametrize("panels", [1, 2, 4])
@pytest.mark.parametrize("groups", [2, 10, 20])
def test_a_legend_is_not_cut_off(panels: int, groups: int) -> None:
    points = np.random.default_rng(0).normal(size=(60, 2)).tolist()
    found = {"points": points, "class": [n % groups for n in range(60)]}
    with drawing():
        figure = figures_after.tsne({f"method-{n}": found for n in range(panels)})
        assert inside(figure)
    assert len(figure.legends[0].get_texts()) == groups
    assert figure.axes[0].get_window_extent().height > 150  # and leaves room for the picture


def test_a_legend_of_long_names_is_not_cut_off() -> None:
    with drawing():
        figure = blank(6.4, 4.2)
        axes = figure.subplots()
        for n in range(5):
            axes.plot([0, 1], [n, n], label=f"clip_update:norm=0.5+gaussian:noise={n}+feddecorr:beta=0.1", **look(n))
        legend(figure, axes, 5)
        assert inside(figure)


def test_a_group_has_the_same_colour_in_all_panels() -> None:
    three = {"points": [[0, 0], [1, 1], [2, 3]], "class": [0, 1, 2]}
    two = {"points": [[0, 0], [1, 1]], "class": [1, 2]}
    with drawing():
        first, second = figures_after.tsne({"a": three, "b": two}).axes
    colours = [
        [str(line.get_color()) for line in axes.get_lines() if len(line.get_xdata())] for axes in (first, second)
    ]
    assert colours == [list(COLOURS[:3]), list(COLOURS[1:3])]


def test_the_first_direction_of_a_landscape_goes_to_the_right(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [0.5])
    diagnose(tmp_path / "run", [1])
    with drawing():
        figure = figures_after.landscape(diagnosed(tmp_path / "run", "landscape"))
        figure.canvas.draw()
        axes, image = figure.axes[0], np.asarray(figure.canvas.buffer_rgba())[..., :3].mean(-1)
    assert "first direction" in axes.get_xlabel() and "second" in axes.get_ylabel()

    def shade(x: float, y: float) -> float:
        column, row = axes.transData.transform((x, y))
        return float(image[image.shape[0] - 1 - int(row), int(column)])

    # The loss is highest where the first step is 1 and the second -1; dark is high.
    assert shade(0.9, -0.9) < min(shade(-0.9, 0.9), shade(0.9, 0.9), shade(-0.9, -0.9))


def test_calibration_has_one_unit_on_both_axes(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [0.5])
    diagnose(tmp_path / "run", [1])
    with drawing():
        axes = figures_after.reliability(diagnosed(tmp_path / "run", "calibration")).axes[0]
    assert axes.get_xlim() == axes.get_ylim() == (0, 100)
    assert axes.get_xlabel().endswith("%") and axes.get_ylabel().endswith("%")
    line = axes.get_lines()[1]
    assert list(line.get_xdata()) == [20, 90] and list(line.get_ydata()) == [10, 80]


@pytest.mark.parametrize("error", [None, 0.2])
def test_noise_has_no_bar(tmp_path: Path, error: float | None) -> None:
    make_run(tmp_path / "run", [0.5])
    diagnose(tmp_path / "run", [1], error=error)
    with drawing():
        figure = figures_after.curvature(diagnosed(tmp_path / "run", "curvature"))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert ("H_N, diagonals" in titles) == (error is not None) and titles[-2:] == ["H_N, traces", "H_D, traces"]
    assert ("noise outweighs" in figure.get_supxlabel()) == (error is None)
    (bar,) = figure.axes[titles.index("trace")].containers[0].lines[2][0].get_segments()
    assert bar[:, 0].tolist() == [77.5, 82.5]


@pytest.mark.parametrize(
    ("values", "places"),
    [([0.17, 0.146], 3), ([10.0, 9.87], 1), ([911.0, None, 25.0], 0), ([0.0], 0), ([100.0, 0.012], 3)],
)
def test_a_column_has_one_number_of_decimals(values: list[float | None], places: int) -> None:
    assert decimals(values) == places


def test_the_table_names_epsilon_where_a_run_has_one(tmp_path: Path) -> None:
    make_comparison(tmp_path, {"fedavg": [0.5], "fedprox": [0.6]})
    with drawing():
        plain = figures.method_table(read(tmp_path)).axes[0].tables[0]
    add_privacy(tmp_path / "fedprox" / "seed-0", 4.373)
    with drawing():
        table = figures.method_table(read(tmp_path)).axes[0].tables[0]
    cells = {where: cell.get_text().get_text() for where, cell in table.get_celld().items()}
    assert [cells[row, 6] for row in range(3)] == ["epsilon", "", "4.37"] and (0, 6) not in plain.get_celld()
