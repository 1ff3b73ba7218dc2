"""``isofed report`` and ``isofed watch`` as a person uses them."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

from tests.cli_tools import SMALL, complaint, isofed, start, succeeds
from tests.report.made import make_run


def test_a_comparison_becomes_one_page(tmp_path: Path) -> None:
    succeeds("compare", "fedavg", "feddyn", *SMALL, "rounds=2", "seeds=2", "out=runs", cwd=tmp_path)
    said = succeeds("report", "runs", cwd=tmp_path)
    assert "Which of these 2 methods gets furthest" in said and "4 runs on one page" in said
    assert "Over 2 seeds, " in said  # how sure it is: the headline alone would claim too much
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.startswith("<!doctype html>") and '"method":"feddyn"' in page and '"counts":[[' in page
    succeeds("report", "runs/fedavg/seed-0", "runs/feddyn/seed-1", "out=other.html", cwd=tmp_path)
    assert "they have no seed in common" in (tmp_path / "other.html").read_text("utf-8")


def test_a_run_that_is_not_shown_is_told(tmp_path: Path) -> None:
    for name, accuracy in (("a", 0.25), ("b", 0.5)):
        make_run(tmp_path / name, [accuracy])
    said = succeeds("report", "a", "b", cwd=tmp_path)
    assert "\nnote: there are two runs of fedavg with seed 0; the one in b is shown\n" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("report",), "name at least one run folder, for example: isofed report runs/demo"),
        (("report", "nowhere"), "nowhere holds no run: give run folders, or the folder of a comparison"),
        (("report", "x", "outt=a.html"), "there is no option 'outt': did you mean 'out'?"),
        (("watch", "x", "port=high"), "port must be a whole number, not 'high'"),
    ],
)
def test_mistakes_are_answered_with_a_sentence(words: tuple[str, ...], said: str) -> None:
    assert said in complaint(isofed(*words), 2)


def test_watch_serves_until_ctrl_c(tmp_path: Path) -> None:
    make_run(tmp_path / "run", [0.25], finished=False)
    command = start("watch", str(tmp_path / "run"), "port=0")
    command.when(lambda: "Ctrl-C" in command.output())
    found = re.search(r"http://127\.0\.0\.1:\d+/", command.output())
    assert found
    with urllib.request.urlopen(f"{found[0]}data", timeout=10) as answer:
        assert b'"accuracy":0.25' in answer.read()
    command.interrupt()
    code, _, err = command.wait()
    assert code == 130 and "The runs were not touched." in err
