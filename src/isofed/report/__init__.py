"""One page about runs: the answer, charts, the table and how to repeat it (``isofed report``, ``isofed watch``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isofed.errors import UserError

__all__ = ["write_report"]


def _is_page(file: Path) -> bool:
    """Whether a file is a page of an earlier time, or empty."""
    try:
        with file.open("rb") as stream:
            start = stream.read(400).lower()
    except OSError:
        return False
    return not start or (start.startswith(b"<!doctype html") and b"isofed" in start)


def write_report(runs: Sequence[str | Path], out: str | Path = "report.html") -> dict[str, Any]:
    """Write the page of these run folders, or folders of comparisons, to a file; gives what it shows."""
    from isofed.files import write_atomic
    from isofed.report.gather import Reader, Splits, run_folders
    from isofed.report.page import content, render

    paths, target = [Path(run) for run in runs], Path(out)
    if target.is_dir() or not target.parent.is_dir():
        raise UserError(f"the page cannot be written to {target}: give the name of a file in a folder that is there")
    if target.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"the page is HTML: give it a name such as {target.with_suffix('.html')}, not {target}")
    if target.exists() and not _is_page(target):
        raise UserError(f"{target} holds something else than such a page, which would be lost: give another name")
    for path in paths:
        if not run_folders(path):
            raise UserError(f"{path} holds no run: give run folders, or the folder of a comparison")
    found = Reader().read(paths)
    if not found.runs:
        raise UserError(found.problems[0])
    page = content(found, Splits().of(found.runs))
    write_atomic(target, render(page).encode())
    return page
