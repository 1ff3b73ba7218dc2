"""isofed: federated learning on data that differ from client to client."""

from __future__ import annotations

import typing as _typing

__version__ = "0.1.0"

if _typing.TYPE_CHECKING:
    from isofed.errors import RunError, UserError
    from isofed.federation import Federation
    from isofed.methods import Method
    from isofed.result import Result
    from isofed.studies import compare, tune

_PUBLIC = {
    "Federation": "isofed.federation",
    "Method": "isofed.methods",
    "Result": "isofed.result",
    "RunError": "isofed.errors",
    "UserError": "isofed.errors",
    "compare": "isofed.studies",
    "tune": "isofed.studies",
}
_PARTS = ("data", "diagnostics", "flower", "functional", "methods", "models", "papers", "report")  # of the package
__all__ = ["Federation", "Method", "Result", "RunError", "UserError", "compare", "tune", "__version__"]


def __getattr__(name: str) -> _typing.Any:
    # Loaded on first use, so that `isofed --help` does not wait for torch.
    import importlib

    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name in _PARTS:
        return importlib.import_module(f"isofed.{name}")
    raise AttributeError(f"module 'isofed' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(
        {*__all__, *_PARTS, *(name for name in globals() if not name.startswith("_") and name != "annotations")}
    )
