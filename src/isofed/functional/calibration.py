"""FFC: the best linear classifier on all clients' features, from sums."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from isofed.functional.precision import rows


class Sums(NamedTuple):
    """What a client sends; those of several clients are added."""

    V: Tensor  # sum of z z', [width, width]
    U: Tensor  # sum of z onehot', [width, classes]


class Calibration(NamedTuple):
    """A least-squares classifier, and how well determined it is."""

    weight: Tensor  # [classes, width], as in torch.nn.Linear: logits are z @ weight.T
    condition: float  # of the matrix that was inverted: the largest eigenvalue over the smallest


def calibration_sums(z: Tensor, labels: Tensor, classes: int) -> Sums:
    """The sums V = Z'Z and U = Z'Y over some samples, in float64.

    SphereFed (Dong et al. 2022), Eq. 6: these say all about the samples that least squares needs, however the samples
    are divided among clients.

    Args:
        z: features [samples, width], normalised where the network normalises them.
        labels: class indices [samples].
        classes: how many there are.
    """
    rows("z", z, "[samples, width]")
    z = z.double()
    return Sums(z.T @ z, z.T @ one_hot(labels, classes).double())


def solve_calibration(V: Tensor, U: Tensor, ridge: float = 1e-6) -> Calibration:
    """The classifier that minimises the squared error to one-hot labels: (V + r I)^-1 U, in float64.

    SphereFed (Dong et al. 2022), Eq. 7, which has no ridge; but features that are always zero make V singular.

    Args:
        V: summed over all clients, [width, width].
        U: likewise, [width, classes].
        ridge: r relative to the mean eigenvalue of V. With 0 directions that no sample has are left out, which gives
            the shortest of all solutions (that of the pseudo-inverse).
    """
    if ridge < 0:
        raise ValueError(f"ridge must be at least 0, not {ridge}")
    V = V.double()
    values, vectors = torch.linalg.eigh((V + V.T) / 2)
    values = values.clamp(min=0)
    if ridge:
        values = values + ridge * values.mean()
    # Below this an eigenvalue is rounding.
    kept = values > values[-1] * len(values) * torch.finfo(torch.float64).eps
    inverse = torch.where(kept, 1 / torch.where(kept, values, 1), 0)
    weight = (vectors * inverse) @ (vectors.T @ U.double())
    condition = float(values[-1] / values[kept].min()) if bool(kept.any()) else float("inf")
    return Calibration(weight.T.contiguous(), condition)
