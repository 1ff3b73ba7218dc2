"""isofed: federated learning on data that differ from client to client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from isofed.errors import RunError, UserError
    from isofed.federation import Federation
    from isofed.methods import Method
    from isofed.result import Result

_PUBLIC = {
    "Federation": "isofed.federation",
    "Method": "isofed.methods",
    "Result": "isofed.result",
    "RunError": "isofed.errors",
    "UserError": "isofed.errors",
}
__all__ = ["Federation", "Method", "Result", "RunError", "UserError", "__version__"]


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that `isofed --help` does not wait for torch.
    if name in _PUBLIC:
        import importlib

        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'isofed' has no attribute '{name}'")
