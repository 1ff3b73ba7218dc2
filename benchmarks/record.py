"""What the benchmarks share: where numbers may be written, what they were measured on, and whether there is a GPU."""

from __future__ import annotations

import argparse
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from isofed.engine.choose import available_cores, device_of
from isofed.errors import UserError
from isofed.records import environment


def file(text: str) -> Path:
    """A file that can be written, for ``--json``: found out before the work, which may take long."""
    path = Path(text).expanduser()
    if not text or path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"'{text}' cannot be written: it must name a file in a folder that is there")
    return path


def device(text: str) -> str:
    """A device that this machine has, for ``--device``."""
    try:
        device_of(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def write(options: argparse.Namespace, where: str, packages: tuple[str, ...] = (), **found: Any) -> None:
    """Write what was found, if ``--json`` asks for it, with the versions, the hardware and all options."""
    if options.json is None:
        return
    about: dict[str, Any] = environment(where, "") | {"cores": available_cores()}
    if where.startswith("cuda"):
        about |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        about["gpu_memory_bytes"] = torch.cuda.get_device_properties(where).total_memory
    for name in (*packages, "triton"):
        try:
            about[name] = version(name)
        except PackageNotFoundError:
            continue
    used = {key: value for key, value in vars(options).items() if key not in ("json", "case", "data")}
    record = {"environment": about, "options": used} | found
    options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
