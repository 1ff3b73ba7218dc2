"""Features that do not repeat each other: FedDecorr, DeCov, and DeCov in groups."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from isofed.functional import columns
from isofed.functional.precision import full_precision, nothing, one_of, rows


@full_precision
def decorrelation(z: Tensor, form: Literal["code", "paper"] = "code", weight: float = 1.0) -> Tensor:
    """FedDecorr's loss on the correlations of the features over a batch.

    FedDecorr (Shi et al. 2023), Eq. 9. Every dimension is standardised over the batch (unbiased variance plus 1e-8).
    With Z what comes of it, N the batch and d the width,

    - ``paper``: ||Z'Z / N||_F^2 / d^2, the mean over all entries, diagonal included;
    - ``code`` (of its authors): the mean over the entries off the diagonal of (Z'Z)^2, divided by N. It is about N
      times as large, so a weight of 0.1 here is one of 0.1 N there.

    Args:
        z: features [batch, width].
        form: ``code`` or ``paper``.
        weight: the value and its gradient times this; on a GPU without a kernel of its own.

    >>> z = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    >>> float(decorrelation(z))  # two dimensions that know nothing of each other
    0.0
    """
    one_of("form", form, "code", "paper")
    rows("z", z)
    count, width = z.shape
    if count < 2 or (width < 2 and form == "code"):
        return nothing(z)
    plain = partial(_decorrelation, form=form, weight=weight)
    if columns.available(z) and (count < width if form == "paper" else 2 * count <= width):
        return columns.decorrelation(z, plain, form == "paper", weight)
    return plain(z)


def _decorrelation(z: Tensor, form: str, weight: float) -> Tensor:
    count, width = z.shape
    centred = z - z.mean(0)
    # Twice: what rounding leaves of a large constant is one number everywhere, which would look like a signal.
    centred = centred - centred.mean(0)
    z = centred * torch.rsqrt(centred.square().sum(0) / (count - 1) + 1e-8)
    if form == "paper":
        # Z'Z and ZZ' have the same norm: the smaller one is cheaper.
        product = z @ z.T if count < width else z.T @ z
        return product.square().sum() * (weight / (count * width) ** 2)
    if width >= 2 * count:
        # The same trick. The diagonal, taken off afterwards, is the smaller part unless most features are dead.
        off_diagonal = ((z @ z.T).square().sum() - z.square().sum(0).square().sum()).clamp(min=0)
    else:
        off_diagonal = _between(z.T @ z, 1).square().sum()
    return off_diagonal * (weight / (width * (width - 1) * count))


@full_precision
def decov(z: Tensor) -> Tensor:
    """DeCov (Cogswell et al. 2016): half the sum of the squared covariances between different features.

    (||S||_F^2 - ||diag S||^2) / 2 with S the biased covariance over the batch. It grows with the fourth power of the
    features' scale and with their number.

    Args:
        z: features [batch, width].

    >>> float(decov(torch.tensor([[1.0, 2.0], [-1.0, -2.0]])))  # covariance 2, counted twice, halved
    4.0
    """
    return structured_decov(z, group=1)


@full_precision
def structured_decov(z: Tensor, group: int = 8) -> Tensor:
    """DeCov between groups of features; within a group features may repeat each other (after Xiong et al. 2016).

    Args:
        z: features [batch, width].
        group: neighbouring features that form one group; the last may be smaller.

    >>> float(structured_decov(torch.tensor([[1.0, 2.0], [-1.0, -2.0]]), group=2))
    0.0
    """
    rows("z", z)
    if group < 1:
        raise ValueError(f"group must be at least 1, not {group}")
    centred = z - z.mean(0)
    return 0.5 * _between(centred.T @ centred / len(z), group).square().sum()


def _between(matrix: Tensor, group: int) -> Tensor:
    """The matrix without its blocks of ``group`` rows and columns along the diagonal."""
    block = torch.arange(len(matrix), device=matrix.device) // group
    return torch.where(block[:, None] == block, 0, matrix)
