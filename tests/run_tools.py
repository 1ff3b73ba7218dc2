"""What tests ask of whole runs: every byte that one leaves, its numbers without its clock, and a stop on the way."""

from __future__ import annotations

import hashlib
from typing import Any

from isofed.federation import Federation
from isofed.progress import Watcher


def content(run: Federation) -> dict[str, str]:
    """Fingerprints of every byte that a run leaves behind: the model, the server's state and the clients'."""
    tensors = {"weights": run.state.weights} | {f"server/{k}": v for k, v in run.state.server.items()}
    for client, state in run.state.clients.items():
        tensors |= {f"client/{client}/{k}": v for k, v in state.items()}
    return {k: hashlib.sha256(v.contiguous().numpy().tobytes()).hexdigest()[:8] for k, v in tensors.items()}


def numbers(run: Federation) -> list[dict[str, Any]]:
    timed = ("seconds", "evaluate_seconds")
    return [{k: v for k, v in line.items() if k not in timed} for line in run.history]


class Stop(Watcher):
    """Stops a run after some rounds, as Ctrl-C would; or in the middle of the next one."""

    def __init__(self, after: int, inside: bool = False) -> None:
        self.left, self.inside = after, inside

    def client(self, done: int, of: int) -> None:
        if self.inside and not self.left and done == 2:
            raise KeyboardInterrupt

    def round(self, line: dict[str, Any]) -> None:
        self.left -= 1
        if not self.left and not self.inside:
            raise KeyboardInterrupt
