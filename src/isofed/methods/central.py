"""Training on the pooled data: what a federation is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from isofed.methods.base import Method


@dataclass(frozen=True)
class Central(Method):
    """One model trained on all data in one place, for as many epochs a round as each client would train: the upper bound."""

    pooled: ClassVar[bool] = True
    paper: ClassVar[str] = "the upper bound of every comparison"
