"""The pages of the documentation as a reader takes them in: blocks, commands, tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT).with_suffix("")))


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the number of its first line, its lines, and what stands above it."""

    language: str
    line: int
    body: list[str]
    error: bool
    follows_python: bool

    @property
    def file(self) -> str | None:
        """The file that the block says it is."""
        named = re.fullmatch(r"# ([\w-]+\.(?:py|yaml))", self.body[0]) if self.body else None
        return named[1] if named else None


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number, above, python = 0, "", False
    while number < len(lines):
        opening = re.fullmatch(r"```(\w*)", lines[number])
        if opening:
            end = lines.index("```", number + 1)
            body = lines[number + 1 : end]
            found.append(Block(opening[1], number + 2, body, above == "<!-- error -->", python))
            number, above, python = end + 1, "", opening[1] == "python"
            continue
        assert not lines[number].startswith("```"), f"{page.name}, line {number + 1}: a fence that no reader closes"
        if lines[number].strip():
            above, python = lines[number].strip(), False
        number += 1
    return found


@dataclass(frozen=True)
class Command:
    """An ``isofed`` line of a block, and the lines shown below it."""

    line: int
    words: list[str]
    shown: list[str]


def commands(block: Block) -> Iterator[Command]:
    current: Command | None = None
    lines = iter(enumerate(block.body, block.line))
    for number, text in lines:
        if re.match(r"(\$ )?isofed ", text):
            if current:
                yield current
            text = text.removeprefix("$ ")
            while text.endswith("\\"):
                text = text[:-1] + next(lines)[1].strip()
            current = Command(number, shlex.split(text, comments=True)[1:], [])
        elif current and block.language == "console":
            current.shown.append(text)
    if current:
        yield current


def tables(page: Path, first_column: str) -> Iterator[list[list[str]]]:
    """The rows of every table whose first column has this heading; code marks are taken off the first two cells."""
    text = page.read_text(encoding="utf-8")
    for table in re.findall(rf"^\| {first_column} \|.*\n\|[-| ]+\|\n((?:\|.*\n)*)", text, re.MULTILINE):
        rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
        yield [[cell.strip("` ") for cell in row[:2]] + row[2:] for row in rows]


def form(line: str) -> str:
    """A line of output without what may differ from machine to machine: numbers, times, marks of chance."""
    line = re.sub(r"[█*]|\bchosen$", " ", line.rstrip())
    line = re.sub(r"[-+]?\d[\d,:]*(\.\d+)?(e[-+]?\d+)?", "#", line)
    line = re.sub(r"(# s|#|-) left", "# left", line)
    line = re.sub(r"(# s|#) of training", "# of training", line)
    return " ".join(re.sub(r"(?<= )\.(?= )", "#", line).split())
