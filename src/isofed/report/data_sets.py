"""Which runs were judged on the same samples: accuracies on different data say nothing about each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isofed.report.gather import Run

_SHOWN = 8  # digits of a fingerprint


def data_sets(runs: Sequence[Run]) -> list[str]:
    """For each run the name of what it was judged on; where one name stands for two things, with its fingerprint.

    A run that recorded no fingerprint is taken to be of the data that others read under the same name.
    """
    known: dict[str, set[str]] = {}
    for run in runs:
        if run.environment.get("data"):
            known.setdefault(_given(run), set()).add(str(run.environment["data"]))
    tokens = []
    for run in runs:
        seen = known.get(_given(run), set())
        digest = str(run.environment.get("data") or (next(iter(seen)) if len(seen) == 1 else ""))
        tokens.append((digest or _given(run), digest, _part(run)))
    names: dict[tuple[str, str, str], str] = {}
    for run, token in zip(runs, tokens, strict=True):
        names.setdefault(token, Path(_given(run)).name + token[2])
    twice = {name for name in names.values() if list(names.values()).count(name) > 1}
    for token, name in names.items():
        if name in twice:
            names[token] = f"{name} ({f'fingerprint {token[1][:_SHOWN]}' if token[1] else 'no fingerprint'})"
    return [names[token] for token in tokens]


def _given(run: Run) -> str:
    return str(run.config.get("data"))


def _part(run: Run) -> str:
    """A tuning looks at the validation part alone, and each share of it is another part."""
    share = run.config.get("validation")
    return f", validation part {share:g}" if share and run.config.get("final_test") is False else ""
