"""How to install what an extra of isofed needs, in words that are right wherever isofed itself came from."""

from __future__ import annotations

import importlib.util
import re
import shlex
from importlib import metadata

from isofed.errors import UserError


def check(what: str, tool: str, module: str, extra: str) -> None:
    """Refuse what needs a package that is not there."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{what} needs {tool}: {command(extra)}")


def command(extra: str) -> str:
    """The command that installs an extra's packages."""
    try:
        lines = metadata.requires("isofed") or []
    except metadata.PackageNotFoundError:  # isofed is used from its folder, without being installed
        lines = []
    wanted = [line.partition(";")[0].strip() for line in lines if re.search(rf"extra\s*==\s*['\"]{extra}['\"]", line)]
    if not wanted:
        return f"pip install '.[{extra}]' in the folder that isofed came in"
    return f"pip install {' '.join(map(shlex.quote, wanted))}"
