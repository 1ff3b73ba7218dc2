"""What a deployment is asked to do: the settings of the run, and the terms between the server and its sites.

Flower gives an app one flat table, ``[tool.flwr.app.config]`` of its ``pyproject.toml``. Its keys are isofed's
settings and the fields of :class:`Terms`. A site reads the same table, which the server's side has written, so
nothing in it may make a site load code or open a file that the site has not named itself: see :func:`refuse_paths`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isofed import spec
from isofed.config import Settings
from isofed.config import settings as make_settings
from isofed.data import AT_SITES
from isofed.data.sources import SOURCES
from isofed.draws import drawn
from isofed.errors import UserError, unknown
from isofed.plugins import is_file_reference

NO_FILES = frozenset({"digits", "digits-domains", "synthetic"})  # data sets that a site can make without any file

Table = Mapping[str, Any]


class Refusal(UserError):
    """Why a site does not do what it was asked; it says nothing about the site's data, so it may be sent."""


@dataclass(frozen=True)
class Terms:
    """How the server deals with its sites; the names are keys of the app's table."""

    out: str = "runs/flower"  # the run folder, on the server's machine
    min_clients: int = 2  # fewer good updates than this, and a round is skipped
    deadline: float = 600.0  # seconds that a site has for a visit
    patience: float = 600.0  # seconds to wait for all sites at a start, and later until enough are connected
    too_large: float = 1000.0  # an update is left out if it is so many times longer than the others
    classes: str = ""  # with data=sites: the names of all classes, separated by commas
    shape: str = "3,32,32"  # with data=sites: channels, height and width of a picture
    mean: str = ""  # with data=sites: of each channel; 0.5 if not given
    std: str = ""
    test_data: str = ""  # a folder or file on the server's machine to judge the model on; otherwise the sites judge it

    def __post_init__(self) -> None:
        for name in ("deadline", "patience", "too_large"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{name}={value:g} is not possible: it must be above 0")
        if self.min_clients < 1:
            raise UserError(f"min_clients={self.min_clients} is not possible: at least one update makes a round")

    def numbers(self, name: str) -> tuple[float, ...]:
        """One of the lists of numbers."""
        text = getattr(self, name)
        return tuple(spec.convert(part.strip(), float, name) for part in text.split(",")) if text else ()

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.classes.split(",") if name.strip())


def read(table: Table) -> tuple[Settings, Terms]:
    """The settings and the terms of an app's table, checked."""
    own = {field.name: field for field in dataclasses.fields(Terms)}
    given = {key: value for key, value in table.items() if value != ""}
    for key in given:
        if key not in own and key not in Settings.model_fields:
            raise unknown("setting", key, [*own, *Settings.model_fields])
    values = {k: v for k, v in given.items() if k not in own}
    made = {k: spec.convert(v, type(own[k].default), k) for k, v in given.items() if k in own}
    for key in ("method", "model"):
        if names_file(text := str(values.get(key, ""))):
            raise UserError(
                f"{key}={text} is a file, and sites run no code that they have not installed themselves: "
                "put it into a package that each of them installs (docs/own-method.md, In a package)"
            )
    settings, terms = make_settings({"train_loss": False, **values}), Terms(**made)
    _possible(settings, terms)
    return settings, terms


def changed(there: Settings, asked: Settings) -> list[str]:
    """In which settings a run is another one than is asked for; where it is computed makes no other."""
    old, new = there.to_dict(), asked.to_dict()
    return sorted(key for key in old if old[key] != new[key] and key not in ("executor", "device"))


def _possible(s: Settings, terms: Terms) -> None:
    """Say what cannot be done at real sites, before any of them is asked."""
    if s.clients is None:
        raise UserError("clients is missing: give the number of sites, such as clients=2")
    if terms.min_clients > (most := drawn(s.clients, s.participation)):
        raise UserError(f"min_clients={terms.min_clients} cannot be met: only {most} sites take part in a round")
    if s.method.pooled:
        raise UserError(f"the method '{s.method}' pools all data in one place, which is what sites are for to avoid")
    if raw := [name for name, method in s.method.exchanges if method.raw_answers]:
        raise UserError(f"'{raw[0]}' sends features of single samples, which never leave a site; use it in simulation")
    for key in ("diagnose", "keep_clients"):
        if getattr(s, key) != "none":
            raise UserError(f"{key}={getattr(s, key)} needs the clients' own models, which stay at their sites")
    if guarded(s):
        _private(s, terms)
    if s.data != AT_SITES and not _needs_no_files(s.data):
        known = ", ".join(sorted(NO_FILES))
        raise UserError(f"data={s.data} names files, which sites do not open for others; use data=sites, or {known}")
    if s.data == AT_SITES and not terms.class_names:
        raise UserError("data=sites needs the names of all classes, such as classes=benign,malignant")
    if s.data == AT_SITES and s.validation:
        raise UserError("validation= divides data that the server has; with data=sites each site divides its own")
    if s.data == AT_SITES:
        _describes_pictures(terms)


def _describes_pictures(terms: Terms) -> None:
    """Check what the sites agree on about their pictures."""
    names = terms.class_names
    if len(names) < 2:
        raise UserError(f"classes={terms.classes} names one class; there is nothing to tell apart")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"classes={terms.classes} names '{twice[0]}' twice")
    shape = terms.numbers("shape")
    if len(shape) != 3 or not all(value >= 1 and value == int(value) for value in shape):
        raise UserError(f"shape={terms.shape} is not possible: it must be channels, height and width, like 3,32,32")
    for name in ("mean", "std"):
        if (given := terms.numbers(name)) and len(given) != shape[0]:
            raise UserError(
                f"shape={terms.shape} has {shape[0]:g} channels, so mean and std need {shape[0]:g} numbers each"
            )
    if not all(value > 0 for value in terms.numbers("std")):
        raise UserError(f"std={terms.std} is not possible: each must be above 0")


def _needs_no_files(data: str) -> bool:
    name = data.partition(":")[0]
    return name in NO_FILES and name in SOURCES


def guarded(s: Settings) -> bool:
    """Whether the method promises that nothing but its noised updates tells of a client."""
    return "losses" in s.method.guards


def _private(s: Settings, terms: Terms) -> None:
    """What would break the promise of a method with noise."""
    for name, method in s.method.parts:
        if getattr(method, "draws", "system") == "seed":
            raise UserError(f"the server knows the seed, and could take the noise of '{name}' off; add draws=system")
    if s.train_loss:
        raise UserError("train_loss=true asks sites for losses, which noise is there to hide")
    if s.data == AT_SITES and not terms.test_data:
        raise UserError(
            "with noise on the updates sites do not judge the model; name pictures at the server: test_data="
        )


def names_file(text: str) -> bool:
    """Whether a method or a network would be loaded from a file."""
    return is_file_reference(text) or any(sign in text for sign in (".py", "/", "\\"))


def refuse_paths(table: Table) -> None:
    """At a site: refuse a table that would run code from a file, or read a file that the site has not named."""
    method, model = str(table.get("method", "")), str(table.get("model", ""))
    for what, text in (("method", method), ("model", model)):
        if names_file(text):
            raise Refusal(f"refuses the {what} '{text}', which would load code by path; only installed ones are run")
    data = str(table.get("data", "digits"))
    if data != AT_SITES and not _needs_no_files(data):
        raise Refusal(f"refuses data={data}: a site names its own folder; use data={AT_SITES}")
    if table.get("root") or str(table.get("partition", "")).startswith("from_file"):
        raise Refusal("refuses root= and partition=from_file:, which name files of a site; a site names its own folder")


def site_folder(node: Table) -> Path:
    """The folder that a site has named for its data."""
    text = str(node.get("data", ""))
    if not text:
        raise Refusal("has not named its folder: start it with --data FOLDER (data= in its node config)")
    return Path(text).expanduser()
