"""Features spread out: FedUV's uniformity and UniVarFL's hyperspherical energy."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from isofed.functional import pairs
from isofed.functional.precision import full_precision, nothing, one_of, rows
from isofed.functional.sphere import SHORTEST, unit


@full_precision
def uniformity(
    z: Tensor,
    form: Literal["code", "paper"] = "code",
    detach: bool = False,
    sigma: float | None = None,
    weight: float = 1.0,
    sphere: bool = False,
    diagonal: bool = False,
) -> Tensor:
    """FedUV's L_U: the mean over pairs i < j of exp(-||z_i - z_j||^2 / s), on the features as they are.

    FedUV (Son et al. 2024), Eq. 4. ``code`` takes for s the median of the squared distances that are not zero, as the
    released code does; ``paper`` takes twice that. For an even number of pairs the median is the lower of the two in
    the middle. A gradient flows through the median, which makes the value independent of the scale of z; with
    ``detach`` it does not, and the loss can also be lowered by growing features.

    Args:
        z: features [batch, width].
        form: ``code`` or ``paper``, see above.
        detach: treat the median as a constant.
        sigma: a fixed number in place of the median.
        weight: the value and its gradient times this; on a GPU without a kernel of its own.
        sphere: features scaled to length 1, for which uniformity was introduced.
        diagonal: the mean over all i and j, in which each feature with itself counts as 1.

    >>> round(float(uniformity(torch.eye(4))), 6)  # all distances equal: exp(-1)
    0.367879
    """
    one_of("form", form, "code", "paper")
    rows("z", z)
    if sigma is not None and sigma <= 0:
        raise ValueError(f"sigma must be above 0, not {sigma}")
    z, count = unit(z) if sphere else z, len(z)
    if diagonal and count:  # a constant, and a smaller part for the others
        return uniformity(z, form, detach, sigma, weight * (count - 1) / count) + weight / count
    if count < 2:
        return nothing(z)
    plain = partial(_uniformity, form=form, detach=detach, sigma=sigma, weight=weight)
    if pairs.available(z):
        return pairs.uniformity(z, plain, 1.0 if form == "code" else 2.0, detach, sigma, weight)
    return plain(z)


def _uniformity(z: Tensor, form: str, detach: bool, sigma: float | None, weight: float) -> Tensor:
    count = len(z)
    others = ~torch.eye(count, dtype=torch.bool, device=z.device)
    squared, apart = _distances(z, others)
    scale = _median(squared, apart, detach) if sigma is None else sigma
    closeness = torch.where(others, torch.exp(-squared / (scale if form == "code" else 2 * scale)), 0)
    return closeness.sum() * (weight / (count * (count - 1)))


def _distances(z: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distances of all pairs, and which of them are not zero.

    In float64: what is left of a small distance between long vectors would otherwise be rounding, all the more where
    matrix products are made in TF32.
    """
    wide = z.double()
    wide = wide - wide.mean(0)
    norms = wide.square().sum(1)
    both = norms[:, None] + norms
    squared = both - 2 * wide @ wide.T
    # What is left of two equal rows is rounding, not a distance; and a row's distance to itself is none.
    apart = others & (squared > 64 * torch.finfo(wide.dtype).eps * both)
    return torch.where(apart, squared, 0).to(z.dtype), apart


def _median(values: Tensor, chosen: Tensor, detach: bool) -> Tensor:
    """The lower median of the chosen values, or 1 where none is chosen; equal values share the gradient."""
    with torch.no_grad():
        found = torch.where(chosen, values, torch.nan).nanmedian()
        found = torch.where(found.isnan(), 1, found)
    if detach:
        return found
    same = chosen & (values == found)
    attached = torch.where(same, values, 0).sum() / same.sum().clamp(min=1)
    return found + (attached - attached.detach())


@full_precision
def hyperspherical_energy(z: Tensor, eps: float = 1e-2, diagonal: bool = False, weight: float = 1.0) -> Tensor:
    """UniVarFL's L_HE: the mean over pairs of 1 / (1 - z_i . z_j + eps), on features scaled to length 1.

    UniVarFL (Gupta et al. 2025), Eq. 2. By default over pairs i != j. With ``diagonal`` the pairs i = j are in, as the
    paper writes it: each adds the constant 1/eps, which carries no gradient.

    Args:
        z: features [batch, width]; they are normalised here.
        eps: keeps the energy of two equal features finite.
        diagonal: count each feature with itself.
        weight: the value and its gradient times this; on a GPU without a kernel of its own.

    >>> round(float(hyperspherical_energy(torch.eye(3), eps=0.25)), 6)  # orthogonal features: 1 / (1 + eps)
    0.8
    """
    rows("z", z)
    if eps <= 0:
        raise ValueError(f"eps must be above 0, not {eps}")
    if len(z) < 2 and not diagonal:
        return nothing(z)
    plain = partial(_energy, eps=eps, diagonal=diagonal, weight=weight)
    return pairs.energy(z, plain, eps, diagonal, SHORTEST, weight) if pairs.available(z) else plain(z)


def _energy(z: Tensor, eps: float, diagonal: bool, weight: float) -> Tensor:
    count = len(z)
    wide = unit(z.double())  # cosines near 1 are subtracted from 1
    others = ~torch.eye(count, dtype=torch.bool, device=z.device)
    apart = torch.where(others, (1 - wide @ wide.T).clamp(min=0), 1).to(z.dtype)
    energies = torch.where(others, 1 / (apart + eps), 1 / eps if diagonal else 0)
    return energies.sum() * (weight / (count * count if diagonal else count * (count - 1)))
