"""Objects from a user's own file: ``path/to/mine.py:MyMethod``."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from isofed.errors import UserError, unknown


def is_file_reference(text: str) -> bool:
    """Whether a name means something in a file rather than something the package knows."""
    return ".py:" in text


def resolve(text: str) -> str:
    """The same reference with an absolute path, so that it still holds in another process or another folder."""
    file, name = text.split(".py:", 1)
    try:
        return f"{os.path.realpath(os.path.expanduser(file + '.py'))}:{name}"
    except ValueError:
        raise UserError(f"{text!r} needs a file, and no file can have that name") from None


def shorten(text: str) -> str:
    """A reference as a person would type it here: relative to this folder where that is shorter."""
    if not is_file_reference(text):
        return text
    file, name = resolve(text).rsplit(":", 1)
    near = os.path.relpath(file)
    return f"{near if len(near) < len(file) else file}:{name}"


def digests(references: Iterable[str]) -> dict[str, str]:
    """A digest of each file that is referred to, by which a later change of it is noticed."""
    files = sorted({resolve(r).rsplit(":", 1)[0] for r in references if is_file_reference(r)})
    return {file: hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest() for file in files}


def load_from_file(text: str, kind: str) -> Any:
    """The object that ``file.py:name`` refers to. Each version of the file is run once per process."""
    file, name = resolve(text).rsplit(":", 1)
    path = Path(file)
    if not os.path.isfile(path):
        raise UserError(f"the {kind} '{text}' needs the file {path}, which does not exist")
    # By content too: a file that was edited in the course of a session is read again, as a new process would.
    content = path.read_bytes()
    key = "isofed_file_" + hashlib.blake2b(str(path).encode() + b"\0" + content, digest_size=8).hexdigest()
    module = sys.modules.get(key)
    if module is None:
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module  # dataclasses look their module up while the class is being made
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[key]
            raise UserError(f"the file {path} could not be run: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise unknown(f"object in {path} called", name, (n for n in vars(module) if not n.startswith("_")))
    return getattr(module, name)
