"""The same federation at real sites, over Flower: :func:`client` makes the app of a site, :func:`server` the server's.

A Flower app made of isofed is two lines, and ``isofed flower new`` writes them::

    from isofed.flower import client

    app = client()

Everything else is the library: the server runs the round of :mod:`isofed.federation` with an executor whose clients
are sites, and a site runs the same local step as a simulation. Needs the extra ``flower``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isofed.flower.client_app import client
    from isofed.flower.server_app import server

_WHERE = {"client": "isofed.flower.client_app", "server": "isofed.flower.server_app"}
__all__ = ["client", "server"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command line lists its commands without waiting for Flower.
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'isofed.flower' has no attribute '{name}'")
