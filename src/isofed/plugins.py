"""Objects from a user's own file: ``path/to/mine.py:MyMethod``."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
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
    return {file: digest(file) for file in files}


def digest(file: str) -> str:
    """A few letters that tell a file's content from another."""
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()


def load_from_file(text: str, kind: str, fits: Callable[[Any], bool] = callable) -> Any:
    """The object that ``file.py:name`` refers to; where there is none, the error lists those that fit the kind."""
    file, name = resolve(text).rsplit(":", 1)
    path = Path(file)
    if not os.path.isfile(path):
        raise UserError(f"the {kind} '{text}' needs the file {path}, which does not exist")
    module = _run(path)
    if not hasattr(module, name):
        known = _defined(module, fits)
        if not known:
            raise UserError(f"there is no {kind} '{name}' in {shorten(text).rsplit(':', 1)[0]}, which defines none")
        raise unknown(f"{kind} in {shorten(text).rsplit(':', 1)[0]} called", name, known)
    return getattr(module, name)


def check_file(name: str, kind: str) -> None:
    """Refuse a name that is a file's, with or without its ``.py``, by saying what in it could be meant.

    The file is read and not run: nobody has asked for anything in it, and a mere mistake must not run code.
    """
    file = name if name.endswith(".py") else f"{name}.py"
    try:
        path = Path(os.path.realpath(os.path.expanduser(file)))
        found = path.is_file()
    except (OSError, ValueError):  # no file can have that name
        return
    if not found:
        if name.endswith(".py"):
            raise UserError(f"the {kind} '{name}' needs the file {path}, which does not exist")
        return
    what = "class" if kind == "method" else "function"
    if not name.endswith(".py"):
        raise UserError(f"there is no {kind} '{name}'; the {what} in the file is written {file}:{what.upper()}")
    wanted = ast.ClassDef if kind == "method" else ast.FunctionDef
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.Module([], [])
    names = [node.name for node in tree.body if isinstance(node, wanted) and not node.name.startswith("_")]
    known = [f"{file}:{defined}" for defined in names]
    if not known:
        raise UserError(f"there is no {kind} '{name}', and the file {file} defines none")
    raise UserError(f"there is no {kind} '{name}': name the {what} in the file, {' or '.join(known)}")


def _defined(module: ModuleType, fits: Callable[[Any], bool]) -> list[str]:
    """What a file itself defines of a kind, without what it imports."""
    own = [(n, thing) for n, thing in vars(module).items() if not n.startswith("_")]
    return [n for n, thing in own if getattr(thing, "__module__", None) == module.__name__ and fits(thing)]


def _run(path: Path) -> ModuleType:
    """The module that a file makes. Each version of the file is run once per process."""
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
        except (Exception, SystemExit) as error:
            del sys.modules[key]
            raise UserError(f"the file {path} could not be run: {_said(error, path)}") from error
    return module


def _said(error: BaseException, path: Path) -> str:
    """What is wrong with a file, and in which line of it."""
    if "cannot inherit non-frozen dataclass from a frozen one" in str(error):  # the words do not say what to do
        said = "a method is a frozen dataclass: write @dataclass(frozen=True) above it"
    elif isinstance(error, SystemExit):
        said = "it calls sys.exit(); put what is to be run by itself below if __name__ == '__main__'"
    else:
        said = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):  # which names its line itself
        return said
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)]
    return f"{said} ({path.name}, line {lines[-1]})" if lines else said
