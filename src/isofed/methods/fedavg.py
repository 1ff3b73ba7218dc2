"""FedAvg: local training and the weighted mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from isofed.methods.base import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """Local SGD on cross-entropy, then the mean of the clients' models weighted by samples. The round itself does this."""

    paper: ClassVar[str] = "McMahan et al. 2017, Communication-efficient learning of deep networks from decentralized data"
