"""A page, and a browser that looks at it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isofed.report import write_report
from tests.report.made import FINALS, diagnose, make_comparison
from tests.report.window import Look

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright, where both are installed."""
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with api.sync_playwright() as playwright:
        try:
            made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"{CHROMIUM} does not start: {error.message.splitlines()[0]}")
        yield made
        made.close()


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of three methods over three seeds, two of them diagnosed."""
    root = tmp_path_factory.mktemp("report")
    make_comparison(root / "runs", FINALS, target=0.6)
    for folder in (root / "runs").glob("f*/seed-*"):
        diagnose(folder, [1, 2, 3])
    write_report([root / "runs"], root / "page.html")
    return root / "page.html"


@pytest.fixture
def look(browser: Any, report: Path) -> Iterator[Look]:
    """A window on that page, which must fetch nothing else."""
    window = Look(browser, report.as_uri())
    yield window
    window.close()
    assert window.requests == [report.as_uri()]
