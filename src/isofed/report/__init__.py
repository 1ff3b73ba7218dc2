"""One page about runs: the answer, charts, the table and how to repeat it (``isofed report``, ``isofed watch``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isofed.errors import UserError

__all__ = ["write_report"]


def write_report(runs: Sequence[str | Path], out: str | Path = "report.html") -> dict[str, Any]:
    """Write the page of these run folders, or folders of comparisons, to a file; gives what it shows."""
    from isofed.files import write_atomic
    from isofed.report.gather import Reader, Splits, run_folders
    from isofed.report.page import content, render

    paths, target = [Path(run) for run in runs], Path(out)
    if target.is_dir() or not target.parent.is_dir():
        raise UserError(f"the page cannot be written to {target}: give the name of a file in a folder that is there")
    for path in paths:
        if not run_folders(path):
            raise UserError(f"{path} holds no run: give run folders, or the folder of a comparison")
    found = Reader().read(paths)
    if not found.runs:
        raise UserError(found.problems[0])
    page = content(found, Splits().of(found.runs))
    write_atomic(target, render(page).encode())
    return page
