"""In a real browser: numbers, units and what may be compared with what, as a reader of the page sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isofed.report import write_report
from tests.report.made import add_privacy, make_comparison, make_run
from tests.report.window import Look


def test_noise_has_no_bar_and_the_trace_its_error(look: Look) -> None:
    card = look.page.locator("#diagnostics .card:has(h3:text-is('Curvature'))")
    titles = card.locator(".minis .note").all_inner_texts()
    assert titles == ["largest eigenvalue", "trace of the Hessian", "H_N, traces", "H_D, traces"]
    assert "noise outweighs the estimate" in card.locator(".note").first.inner_text()
    assert card.locator(".minis tr").nth(2).inner_text().split() == ["fedavg", "80.0", "±", "2.5"]


def test_a_landscape_lies_as_in_the_figure(look: Look) -> None:
    figure = look.page.locator("#diagnostics figure:has(image)").first
    assert {"along the first direction", "along the second"} <= set(figure.locator("text").all_text_contents())
    # The loss is highest where the first step is 1 and the second -1: to the right, and below; dark is high.
    sums = figure.locator("image").evaluate(
        """async (image) => {
          const made = new Image();
          made.src = image.getAttribute("href");
          await made.decode();
          const canvas = document.createElement("canvas"), pen = canvas.getContext("2d", { willReadFrequently: true });
          pen.drawImage(made, 0, 0);
          return [[2, 2], [0, 0], [2, 0], [0, 2]].map(([x, y]) => pen.getImageData(x, y, 1, 1).data.slice(0, 3))
            .map((rgb) => rgb[0] + rgb[1] + rgb[2]);
        }"""
    )
    assert sums[0] < min(sums[1:])


def test_calibration_has_one_unit(look: Look) -> None:
    texts = look.texts("calibration")
    assert "confidence, %" in texts and "80" in texts and not any(text.startswith("0.") for text in texts)


def test_numbers_of_a_column_have_the_same_decimals(browser: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "a", [0.5], "fedavg", seconds=9.87, rounds=1)
    make_run(tmp_path / "b", [0.6], "fedprox", seconds=10.0, rounds=1)
    write_report([tmp_path], tmp_path / "page.html")
    window = Look(browser, (tmp_path / "page.html").as_uri())
    names = window.page.locator("#table thead th").all_inner_texts()
    cells = window.page.locator(f"#table tbody tr td:nth-child({names.index('s / round') + 1})").all_inner_texts()
    assert cells == ["9.9", "10.0"]
    assert not window.page.get_by_text("peak memory").count()  # on a CPU it would be that of the process
    window.close()


def test_a_target_that_few_seeds_reach_does_not_look_better(browser: Any, tmp_path: Path) -> None:
    finals = {"fedavg": [0.9, 0.9], "fedprox": [0.9, 0.4], "scaffold": [0.2, 0.3], "moon": [0.9, 0.95]}
    make_comparison(tmp_path / "runs", finals, target=0.42)
    write_report([tmp_path / "runs"], tmp_path / "page.html")
    window = Look(browser, (tmp_path / "page.html").as_uri())
    names = window.page.locator("#table thead th").all_inner_texts()
    for _ in range(2):
        window.page.locator("[data-sort='rounds to 42 %']").click()
    cells = window.page.locator(f"#table tbody tr td:nth-child({names.index('rounds to 42 %') + 1})").all_inner_texts()
    assert cells == ["2.0", "2.0", "> 3 (1/2)", "never"] and window.rows()[2:] == ["fedprox", "scaffold"]
    assert "1 of 2 seeds reached it" in window.page.locator("#table .note").inner_text()
    window.close()


def test_data_sets_are_apart_in_the_table_and_noise_has_its_epsilon(browser: Any, tmp_path: Path) -> None:
    make_comparison(tmp_path / "a", {"fedavg": [0.5], "fedprox": [0.4]})
    make_comparison(tmp_path / "b", {"fedavg": [0.8], "scaffold": [0.9]}, data="synthetic:samples=100,test=20")
    add_privacy(tmp_path / "a" / "fedprox" / "seed-0", 4.373)
    write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "page.html")
    window = Look(browser, (tmp_path / "page.html").as_uri())
    heads = window.page.locator("#table tr.group").all_inner_texts()
    assert heads == ["synthetic:samples=200,test=50", "synthetic:samples=100,test=20"]
    assert window.page.locator("#table tr.best").count() == 2
    window.page.locator("[data-sort='accuracy %']").click()
    assert [row.split()[0] for row in window.rows()] == ["fedavg", "fedprox", "scaffold", "fedavg"]
    assert window.page.locator("#table td", has_text="4.37").count() == 1
    assert "at delta 1e-5" in window.page.locator("#table .note").inner_text()
    window.close()


@pytest.mark.parametrize(("width", "hint"), [(400, True), (1400, False)])
def test_columns_that_scroll_off_are_hinted_at(browser: Any, report: Path, width: int, hint: bool) -> None:
    window = Look(browser, report.as_uri(), width=width)
    table = window.page.locator("#table .scroll")
    shown = table.evaluate("(box) => getComputedStyle(box, '::before').content")
    assert ("scroll sideways" in shown) == hint
    assert ("gradient" in str(table.evaluate("(box) => getComputedStyle(box).backgroundImage"))) == hint
    window.close()
