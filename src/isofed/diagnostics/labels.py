"""Who holds which classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from isofed.data.partition import counts as counts_of


class Labels(NamedTuple):
    """Of the labels of each client; a client without samples has shares of zero, distance 0 and no classes."""

    counts: Tensor  # [clients, classes], int64
    shares: Tensor  # [clients, classes], of a client's samples, float64
    distances: Tensor  # [clients], total variation from the labels of all clients together: 0 alike, towards 1 apart
    effective_classes: Tensor  # [clients], exp of the entropy of the shares: n equal classes give n


def label_distribution(labels: Tensor, clients: Sequence[np.ndarray], classes: int) -> Labels:
    """The label distribution of each client, and how far it is from that of all together.

    Args:
        labels: of the training part.
        clients: each client's places in it, as in ``Federation(...).world.clients``.
        classes: how many there are.

    >>> found = label_distribution(torch.tensor([0, 1, 1, 1]), [np.array([0, 1]), np.array([2, 3])], 2)
    >>> found.counts.tolist(), found.distances.tolist()
    ([[1, 1], [0, 2]], [0.25, 0.25])
    """
    counts = torch.from_numpy(counts_of(list(clients), labels, classes))
    sizes = counts.sum(1, keepdim=True)
    shares = counts / sizes.clamp(min=1).double()
    whole = counts.sum(0) / max(int(sizes.sum()), 1)
    held = sizes[:, 0] > 0
    return Labels(
        counts=counts,
        shares=shares,
        distances=torch.where(held, (shares - whole).abs().sum(1) / 2, 0.0),
        effective_classes=torch.where(held, torch.special.entr(shares).sum(1).exp(), 0.0),
    )
