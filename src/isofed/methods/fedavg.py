"""FedAvg: local training and the weighted mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from isofed.methods.base import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """Local SGD, then the mean of the clients' models.

    The round itself does all of this: the loss is cross-entropy and clients count by their samples (``weighting``).
    """

    paper: ClassVar[str] = (
        "McMahan et al. 2017, Communication-efficient learning of deep networks from decentralized data"
    )
