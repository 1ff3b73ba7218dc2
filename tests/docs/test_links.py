"""The links of the documentation lead somewhere, every page is found, and none shows the machine it was written on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.docs.reading import DOCS, PAGES, ROOT, pages


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs and GitHub make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pages
def test_internal_links_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        outside = DOCS in page.parents and DOCS not in target.parents  # of the built pages
        found = target.is_file() and not outside and (not anchor or anchor in anchors(target))
        if not link.startswith("https://") and not found:
            broken.append(link)
    assert broken == []


def files_in(nav: Any) -> Iterator[str]:
    """The pages of a navigation, whatever the headings they stand under."""
    for entry in nav:
        for below in entry.values():
            yield from [below] if isinstance(below, str) else files_in(below)


def reached(start: Path) -> set[Path]:
    """The pages that a reader comes to by following links."""
    seen, waiting = {start}, [start]
    while waiting:
        page = waiting.pop()
        for link in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            if target in PAGES and target not in seen:
                seen.add(target)
                waiting.append(target)
    return seen


def test_every_page_is_in_the_navigation_and_reached_from_the_start() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(DOCS / page for page in files_in(nav)) == PAGES[1:]
    start = (DOCS / "index.md").read_text(encoding="utf-8")
    assert [p.name for p in DOCS.glob("*.md") if p.name != "index.md" and f"]({p.name}" not in start] == []
    assert set(PAGES) - {DOCS / "index.md"} == reached(ROOT / "README.md")


@pages
def test_a_page_holds_nothing_of_the_machine_it_was_written_on(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"(?<![\w.])/(?:tmp|work|home|root|usr|opt|Users)/\S*", text) == []
    assert max(map(len, text.splitlines())) < 400
