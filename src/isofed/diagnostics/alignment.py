"""Whether the classifiers of clients point the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isofed.functional import unit


class Alignment(NamedTuple):
    """Of the rows of several classifiers, class by class."""

    cosine: float  # mean over classes and pairs of clients
    norm_difference: float  # mean absolute difference of lengths, likewise


@torch.no_grad()
def classifier_alignment(weights: Sequence[Tensor]) -> Alignment:
    """How much local classifiers agree before they are averaged (SphereFed, Eq. 2 and 3, Figure 2).

    Over all classes and all pairs of clients: the mean cosine between the two rows of a class, and the mean difference
    of their lengths. 1 and 0 where all classifiers are equal. Biases play no part; a row of zeros has the cosine 0 with
    every other. Time grows with the number of clients, not with that of pairs.

    Args:
        weights: of at least two clients, each [classes, width].

    >>> classifier_alignment([torch.eye(2), 3 * torch.eye(2)])
    Alignment(cosine=1.0, norm_difference=2.0)
    """
    if len(weights) < 2 or any(w.dim() != 2 or w.shape != weights[0].shape for w in weights):
        raise ValueError("alignment needs the classifiers [classes, width] of at least two clients, all of one shape")
    count, first = len(weights), weights[0].double()
    total, squares = torch.zeros_like(first), first.new_zeros(len(first))
    for weight in weights:
        rows = unit(weight.double())
        total += rows
        squares += rows.square().sum(1)
    # ||sum of units||^2 holds every ordered pair once, and each unit with itself.
    cosines = (total.square().sum(1) - squares) / (count * (count - 1))
    lengths = torch.stack([weight.double().norm(dim=1) for weight in weights]).sort(0).values
    # In order of size, the i-th is subtracted from all later ones and all earlier ones are subtracted from it.
    signs = 2 * torch.arange(count, dtype=torch.float64, device=lengths.device) - (count - 1)
    differences = (2 * (signs[:, None] * lengths).sum(0) / (count * (count - 1))).clamp(min=0)  # not below by rounding
    return Alignment(float(cosines.mean()), float(differences.mean()))
