"""No client's update longer than a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from isofed.methods.base import Method, Visit
from isofed.spec import described, number

# What is shortened is rounded to float32 afterwards, which may lengthen it by 2^-24 of its length.
_ROUNDING = 1 - 2.0**-23


def clipped(update: Tensor, norm: float) -> Tensor:
    """The update, or where it is longer than ``norm`` the same direction at that length, and never more than it."""
    length = torch.linalg.vector_norm(update, dtype=torch.float64)
    scale = torch.where(length > norm, norm * _ROUNDING / length, 1.0)
    return (update.double() * scale).to(update.dtype)


@dataclass(frozen=True)
class ClipUpdate(Method):
    """No client's update longer than a bound.

    An update D_k whose Euclidean length is above ``norm`` becomes D_k norm / ||D_k||. ``at=server`` does that when an
    update arrives, whatever the client says; ``at=client`` before it leaves.
    """

    norm: float = number(1.0, "the longest that an update may be", above=0)
    at: Literal["server", "client"] = described(
        "server",
        "who shortens it: the server when it arrives, whatever the client says, or the client before it leaves",
    )

    guards: ClassVar[frozenset[str]] = frozenset({"extras", "answers", "statistics"})
    paper: ClassVar[str] = "Sun et al. 2019, Can you really backdoor federated learning?"

    @property
    def bound(self) -> float | None:
        return self.norm

    def upload(self, visit: Visit) -> None:
        if self.at == "client":
            visit.update = clipped(visit.update, self.norm)

    def receive(self, update: Tensor, bound: float | None) -> Tensor:
        return clipped(update, self.norm) if self.at == "server" else update
