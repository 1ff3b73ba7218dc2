"""What runs call files of the user's own: one name may stand for different code, which is not one method then."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isofed.report.gather import Run

SHOWN = 8  # digits of a fingerprint
_CODE = re.compile(r"(?<![^+])[^+]*?\.py(?=:)")  # a file at the start of a part of a method, or of a network
_SPLIT = re.compile(r"(?<=^from_file:).*")
_File = tuple[str, str]  # a path, and the fingerprint of what was there


def file_names(runs: Sequence[Run]) -> list[dict[str, str]]:
    """For each run what its files are called: by their names, and by more where a name stands for several contents.

    The same content has the same name, wherever it lay. A run that recorded no fingerprint is taken to be of the
    content that others found at the same place.
    """
    noted = [_recorded(run) for run in runs]
    known: dict[str, set[str]] = {}
    for files in noted:
        for path, digest in files.items():
            known.setdefault(path, set()).add(digest)
    made_of: list[list[_File]] = []
    for run, files in zip(runs, noted, strict=True):
        alone = {path: next(iter(digests)) for path, digests in known.items() if len(digests) == 1}
        made_of.append([(path, files.get(path) or alone.get(path, "")) for path in _paths(run)])
    names = _names({file for files in made_of for file in files})
    return [{file[0]: names[file] for file in files} for files in made_of]


def with_names(text: str, names: Mapping[str, str] | None = None) -> str:
    """A method, a network or a split in which files go by these names, or by their own without a folder."""

    def name(found: re.Match[str]) -> str:
        return (names or {}).get(found[0], Path(found[0]).name)

    return _SPLIT.sub(name, _CODE.sub(name, text))


def _recorded(run: Run) -> dict[str, str]:
    files: Any = run.environment.get("files")
    return {str(path): str(digest) for path, digest in files.items() if digest} if isinstance(files, dict) else {}


def _paths(run: Run) -> list[str]:
    model, split = (str(run.config.get(key)) for key in ("model", "partition"))
    return [*_CODE.findall(run.full_method), *_CODE.findall(model), *_SPLIT.findall(split)]


def _names(files: set[_File]) -> dict[_File, str]:
    """The shortest end of a path that means one content alone; where a whole path means several, the fingerprint."""
    names: dict[_File, str] = {}
    for path, digest in files:
        same = sorted(other for other, content in files if content == digest and Path(other).name == Path(path).name)
        ends = {end for other, content in files if content != digest for end in _ends(other)}
        free = [] if ends.intersection(same) else [end for end in _ends(same[0]) if end not in ends]
        content = f"fingerprint {digest[:SHOWN]}" if digest else "no fingerprint"
        names[path, digest] = free[0] if free else f"{Path(path).name} ({content})"
    return names


def _ends(path: str) -> list[str]:
    """``c.py``, ``b/c.py`` and ``/a/b/c.py`` of the last."""
    parts = Path(path).parts
    return [str(Path(*parts[n:])) for n in reversed(range(len(parts)))]
