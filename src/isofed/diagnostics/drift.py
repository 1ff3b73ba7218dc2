"""How far the clients of a round pull apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Drift(NamedTuple):
    """Of the updates of a round, client by client; float64 on the CPU. An update with a NaN makes NaN of the rest."""

    norms: Tensor  # [clients], length of each update
    distances: Tensor  # [clients], from each update to the mean
    angles: Tensor  # [clients], between each update and the mean, in degrees; 90 where one of them is zero
    mean_norm: float  # length of the mean update
    cosine: float  # mean over pairs of clients; NaN with one client
    diversity: float  # mean squared length over the squared length of the mean: 1 where all agree


@torch.no_grad()
def client_drift(updates: Sequence[Tensor], weights: Sequence[float] | None = None) -> Drift:
    """Distance and angle of each client's update to the mean of all.

    Updates that agree have distance 0, angle 0 and diversity 1. With unrelated updates of K clients the mean is about
    1/sqrt(K) as long as each, angles are near 90 degrees and the diversity is near K: most of what was learned is
    averaged away. That also happens with equal data near the end of training, when only noise is left to learn.

    Args:
        updates: what each client changed, in vectors or tensors of one shape.
        weights: of the clients in the mean, such as their numbers of samples; equal ones if not given.

    >>> client_drift([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])]).angles.round(decimals=6).tolist()
    [45.0, 45.0]
    """
    if not updates or any(u.shape != updates[0].shape for u in updates):
        raise ValueError("drift needs at least one update, and all of one shape")
    share = torch.tensor([1.0] * len(updates) if weights is None else list(weights), dtype=torch.float64)
    if len(share) != len(updates) or not bool((share >= 0).all()) or not 0 < float(share.sum()) < math.inf:
        raise ValueError("each update needs one weight; weights are not negative, and not all zero")
    share = share / share.sum()
    # One update at a time in double precision: a round of large networks would not fit into memory twice.
    mean = torch.zeros_like(updates[0], dtype=torch.float64).flatten()
    units = torch.zeros_like(mean)
    norms, seen = [], 0
    # Compared with zero, not by size: a NaN is neither above it nor below, and has to be handed on.
    for update, part in zip(updates, share.tolist(), strict=True):
        u = update.flatten().double()
        norm = float(u.norm())
        norms.append(norm)
        mean += part * u
        if norm != 0:
            units += u / norm
            seen += 1
    length = float(mean.norm())
    distances, cosines = [], []
    for update, norm in zip(updates, norms, strict=True):
        u = update.flatten().double()
        distances.append(float((u - mean).norm()))
        cosines.append(float(u @ mean) / (norm * length) if norm * length != 0 else 0.0)
    sizes, pairs = torch.tensor(norms, dtype=torch.float64), len(updates) * (len(updates) - 1)
    squared = float((share * sizes.square()).sum())
    return Drift(
        norms=sizes,
        distances=torch.tensor(distances, dtype=torch.float64),
        angles=torch.tensor(cosines, dtype=torch.float64).clamp(-1, 1).acos().rad2deg(),
        mean_norm=length,
        cosine=(float(units.square().sum()) - seen) / pairs if pairs else math.nan,
        diversity=squared / length**2 if length != 0 else math.inf,
    )
