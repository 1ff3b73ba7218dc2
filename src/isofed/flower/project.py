"""A ready Flower project: its app, its settings, an adapter for the folder of a site, and a README with commands."""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isofed.data import AT_SITES
from isofed.errors import UserError
from isofed.flower import terms as deployment

DEFAULTS: dict[str, Any] = {
    "method": "fedavg",
    "data": AT_SITES,
    "classes": "benign,malignant",
    "shape": "3,32,32",
    "mean": "",
    "std": "",
    "test_data": "",
    "model": "cnn",
    "clients": 2,
    "participation": 1.0,
    "rounds": 20,
    "local_epochs": 5,  # as in a simulation
    "batch_size": 32,
    "lr": 0.05,
    "seed": 0,
    "min_clients": 2,
    "deadline": 600.0,
    "patience": 600.0,
    "too_large": 1000.0,
    "out": "runs/flower",
}
_OF_SITES = ("classes", "shape", "mean", "std", "test_data")
_PACKAGE = "federation"

_SERVER = '''\
"""The server of the federation. What it does is in pyproject.toml, under [tool.flwr.app.config]."""

from isofed.flower import server

app = server()
'''

_CLIENT = '''\
"""A site of the federation."""

from federation.data import read

from isofed.flower import client

app = client(read)
'''

_DATA = '''\
"""How a site reads its own folder. This runs at the site, and what it returns stays there.

As it is, it reads pictures in one folder for each class (optionally under train/ and test/), or those that a .csv file
lists, or an .npz file. If your files lie in another way, build the data set yourself:

    images = ...  # uint8 tensor [N, height, width, channels]
    labels = ...  # int64 tensor [N], numbers of the names in `classes`
    train, test = isofed.data.Part(images[:-100], labels[:-100]), isofed.data.Part(images[-100:], labels[-100:])
    return isofed.data.Dataset("ours", classes, train, test, mean=(0.5,) * 3, std=(0.5,) * 3)

Mean and standard deviation are replaced by those of the run, which are the same for all sites.
"""

from pathlib import Path

from isofed.data import Dataset
from isofed.flower.data import read_folder


def read(folder: Path, shape: tuple[int, int, int]) -> Dataset:
    """The site's samples, as pictures of ``shape``: channels, height, width."""
    return read_folder(folder, shape)
'''


def write_project(folder: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Write a project into a new folder; gives its table of settings."""
    table = {**DEFAULTS, **values}
    for name in ("mean", "std"):
        if name not in values:  # as many as there are channels
            table[name] = ",".join(["0.5"] * _channels(str(table["shape"])))
    if table["data"] != AT_SITES:
        table = {k: v for k, v in table.items() if k not in _OF_SITES}
    if "local_steps" in values and "local_epochs" not in values:  # the two exclude each other
        del table["local_epochs"]
    deployment.read(table)  # what is wrong is said before anything is written
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"{folder} is {'not empty' if folder.is_dir() else 'a file'}; name a new folder")
    name = re.sub(r"[^a-z0-9-]+", "-", folder.resolve().name.lower()).strip("-")[:32] or "federation"
    name = name if name[0].isalpha() else f"f-{name}"[:32]
    texts = {
        "pyproject.toml": _text("app.toml").replace("@NAME@", name).replace("@TABLE@", _toml(table)),
        "README.md": _readme(table),
        ".gitignore": "keys/\nruns/\nwork/\n__pycache__/\n",
        f"{_PACKAGE}/__init__.py": '"""The federation\'s app."""\n',
        f"{_PACKAGE}/server_app.py": _SERVER,
        f"{_PACKAGE}/client_app.py": _CLIENT,
        f"{_PACKAGE}/data.py": _DATA,
    }
    there = folder.exists()
    for path, text in texts.items():
        try:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        except OSError as error:
            _clear(folder, there)  # half a project would keep the same command from being given again
            raise UserError(f"cannot write {error.filename or folder / path}: {error.strerror}") from None
    return table


def _clear(folder: Path, keep: bool) -> None:
    """Take what was written out of a folder that was empty or not there."""
    for path in (folder / _PACKAGE, folder):
        if path.is_dir():
            for file in path.iterdir():
                file.unlink()
            if path != folder or not keep:
                path.rmdir()


def _readme(table: Mapping[str, Any]) -> str:
    words = {"@SITES@": str(table["clients"]), "@OUT@": str(table["out"]), "@FOLDERS@": ""}
    if table["data"] == AT_SITES:  # each site needs one of its own
        words["@FOLDERS@"] = " folders=/path/to/a/folder/with/one/for/each/site"
    text = _text("README.md")
    for mark, word in words.items():
        text = text.replace(mark, word)
    return text


def _channels(shape: str) -> int:
    first = shape.partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and len(first) < 4 else 3


def read_table(folder: Path) -> dict[str, Any]:
    """The settings of a project."""
    import tomllib

    path = folder / "pyproject.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    except OSError as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise UserError(f"{folder} is not a project of `isofed flower new`: {path} {why}") from None
    except (tomllib.TOMLDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} has no proper table [tool.flwr.app.config]: {error}") from None
    return dict(table)


def _toml(table: Mapping[str, Any]) -> str:
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items() if value is not None)


def _text(name: str) -> str:
    return (importlib.resources.files("isofed.flower") / "skeleton" / name).read_text(encoding="utf-8")
