"""Training on the pooled data: what a federation is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from isofed.methods.base import Method


@dataclass(frozen=True)
class Central(Method):
    """No federation: one model on the pooled data, the upper bound.

    A round is as many epochs over all data as each client would train on its own; nothing is sent.
    """

    pooled: ClassVar[bool] = True
    paper: ClassVar[str] = "the upper bound of every comparison"
