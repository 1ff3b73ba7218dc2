"""What may differ when a run is taken up, and what makes it another run."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isofed.config import HOW, Settings, show
from isofed.data import AT_SITES, elsewhere
from isofed.engine.world import World
from isofed.errors import RunError, UserError, unknown
from isofed.records import CONFIG, RunFolder
from isofed.schedule import looks_ahead
from isofed.words import many

_MAY_CHANGE = HOW | {"root"}  # where data lie may: that they are the same is checked


def moved(folder: RunFolder, root: str | os.PathLike[str] | None) -> dict[str, Any]:
    """The settings of a run whose data lie at ``root`` now, if that is given; refused where they are nowhere here."""
    data = str(folder.config.get("data"))
    if root is not None and not isinstance(root, (str, os.PathLike)):
        raise UserError(f"root={root} is not possible: it must be the path of a folder")
    if data == AT_SITES and (folder.path / "sites.json").exists():
        raise UserError(
            f"{folder.path} is a run at real sites, whose data are not here; "
            "`isofed flower start`, or `up`, goes on with it"
        )
    return folder.config | (elsewhere(data, os.fspath(root)) if root is not None else {})


def check_changes(run: str | Path, changes: Mapping[str, Any]) -> None:
    """Refuse to resume a run with settings that make it another; what it would be then is a run of its own."""
    for key in sorted(set(changes) - _MAY_CHANGE - {"rounds"}):
        if key not in Settings.model_fields:
            raise unknown("setting", key, Settings.model_fields)
        raise UserError(
            f"'{key}' cannot change when a run is resumed, only rounds, {', '.join(sorted(_MAY_CHANGE))} can; "
            f"for a new run write: isofed run {_config(run)} {key}={show(key, changes[key])} out=..."
        )


def _config(run: str | Path) -> str:
    """The settings of a run as a shell takes them."""
    return shlex.quote(str(Path(run) / CONFIG))


def check_rounds(run: str | Path, s: Settings, before: int, done: int) -> None:
    """Refuse another number of rounds than a run had before, where the rounds that are done would have been others."""
    if s.rounds != before and looks_ahead(s.lr_schedule):
        raise UserError(
            f"'rounds' cannot change with lr_schedule={s.lr_schedule}, where learning rates depend on their number; "
            f"for a new run write: isofed run {_config(run)} rounds={s.rounds} out=..."
        )
    if s.rounds < done:
        raise UserError(f"{run} has {many(done, 'round')} already, so rounds={s.rounds} is too few")


def check_config(folder: RunFolder, settings: Settings, made_with: Mapping[str, Any]) -> None:
    """Refuse to go on with settings that were written into the folder by hand: its record would tell of another run.

    ``made_with`` are those of the rounds that are done. The data have their fingerprint, wherever they lie.
    """
    now = json.loads(json.dumps(settings.to_dict()))
    may_change = _MAY_CHANGE | {"data"} | (set() if looks_ahead(settings.lr_schedule) else {"rounds"})
    for key in sorted(made_with.keys() & now.keys() - may_change):
        if made_with[key] != now[key]:
            here, before = show(key, now[key]), show(key, made_with[key])
            raise UserError(
                f"{folder.path / CONFIG} says {key}={here}, and the rounds that are done were made with {before}: "
                f"put that back, or start a new run: isofed run {_config(folder.path)} out=..."
            )


def check_files(folder: RunFolder, settings: Settings) -> None:
    """A run of which a file has changed since is another run."""
    made_of = folder.environment.get("files", {})
    if not isinstance(made_of, dict):
        raise RunError(f"{folder.path / 'environment.json'} is damaged")
    for file, digest in made_of.items():
        if settings.files().get(file) != digest:
            raise UserError(
                f"{file} has changed since the run in {folder.path} was started; put it back, or choose another out="
            )


def check_data(folder: RunFolder, world: World, what: str) -> None:
    """So is one whose data have; ``what`` can no longer be done with it."""
    if not world.has_data(folder.environment.get("data")):
        raise UserError(f"the data of the run {folder.path} have changed since it was started, so it cannot {what}")
