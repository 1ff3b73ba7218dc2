"""What to install for an extra, as the package itself says."""

from __future__ import annotations

import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from isofed import extras

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_the_command_names_what_the_extra_asks_for(extra: str) -> None:
    pip, install, *packages = shlex.split(extras.command(extra))
    assert (pip, install) == ("pip", "install")
    wanted = PROJECT["optional-dependencies"][extra]
    assert [Requirement(name) for name in packages] == [Requirement(name) for name in wanted]


@pytest.mark.parametrize("installed", [None, []])
def test_where_nothing_is_known_of_the_package_its_folder_is_installed(
    installed: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def requires(_: str) -> list[str] | None:
        if installed is None:
            raise metadata.PackageNotFoundError
        return installed

    monkeypatch.setattr(metadata, "requires", requires)
    assert extras.command("plot") == "pip install '.[plot]' in the folder that isofed came in"
