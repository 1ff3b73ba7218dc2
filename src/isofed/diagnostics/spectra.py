"""How many directions a classifier or a representation really uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isofed.errors import NotFinite

FLOOR = 1e-12  # below this a singular value counts as this when its logarithm is taken


class Spectrum(NamedTuple):
    """Singular values and how many of them there seem to be."""

    values: Tensor  # float64 on the CPU, the largest first
    effective_rank: float  # exp of the entropy of values / sum: n equal values give n


@torch.no_grad()
def classifier_spectrum(weight: Tensor) -> Spectrum:
    """The singular values of a last layer (FedUV and UniVarFL, Figure 1); its bias plays no part.

    Under skewed labels they shrink: rows of classes that clients do not have are pushed together. A frozen layer keeps
    them as they were drawn.

    Args:
        weight: [classes, width], as in ``torch.nn.Linear``.

    >>> round(classifier_spectrum(torch.eye(3)).effective_rank, 6)
    3.0
    """
    _matrix(weight, "a classifier's weight is [classes, width]")
    return _spectrum(torch.linalg.svdvals(weight.double()))


@torch.no_grad()
def representation_spectrum(z: Tensor) -> Spectrum:
    """The singular values of the covariance of features (FedDecorr, Figures 2 to 7), as many as the features are wide.

    The covariance has the divisor N. FedDecorr takes the features of the test part, in eval mode, and draws the natural
    logarithm of the first 100 values. Values that double precision cannot tell from zero are zero.

    Args:
        z: features [samples, width].

    >>> z = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    >>> representation_spectrum(z).values.tolist()
    [4.5, 0.5]
    """
    _matrix(z, "features are [samples, width]")
    count, width = z.shape
    centred = z.double() - z.double().mean(0)
    # With fewer samples than features the small product has the same values; the others are zero.
    product = centred @ centred.T if count < width else centred.T @ centred
    found = torch.linalg.eigvalsh(product / count).flip(0)
    noise = max(count, width) * torch.finfo(torch.float64).eps * found[0].abs()
    values = found.new_zeros(width)
    values[: len(found)] = torch.where(found > noise, found, 0)
    return _spectrum(values)


def spectrum_gap(local: Sequence[Tensor], global_: Tensor) -> float:
    """R of FedDecorr's Eq. 1: the mean over all singular values, and local models, of log(local / global).

    0 where the spectra agree; below 0 where local models have collapsed further than the global one. Values below 1e-12
    count as 1e-12, so that dead features on both sides say nothing.

    Args:
        local: singular values of each local model, as in ``representation_spectrum(z).values``, on the same samples.
        global_: those of the global model, as many.

    >>> spectrum_gap([torch.ones(3)], torch.ones(3))
    0.0
    """
    if len(local) == 0 or any(values.shape != global_.shape for values in local):
        raise ValueError("a gap needs at least one local spectrum, and all as long as the global one")
    whole = _log(global_)
    return float(torch.stack([(_log(values) - whole).mean() for values in local]).mean())


def singular_spread(z: Tensor) -> float:
    """FedDecorr's Eq. 7: the variance, with divisor d, of the singular values of the covariance of features.

    0 where all directions carry the same; of standardised features it is (||K||_F^2 - d) / d with K their correlations,
    which is what FedDecorr's loss makes small.

    Args:
        z: features [samples, width].

    >>> singular_spread(torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]]))
    0.0
    """
    return float(representation_spectrum(z).values.var(correction=0))


def significant(values: Tensor, log_tau: float = -2) -> int:
    """How many singular values have a natural logarithm above ``log_tau``.

    It depends on the scale of the features, so it compares networks of one kind, trained alike.

    >>> significant(torch.tensor([1.0, 0.2, 0.1]))  # exp(-2) is 0.135
    2
    """
    if bool(values.isnan().any()):
        raise NotFinite("there is no count of significant singular values where one of them is NaN")
    return int((values > math.exp(log_tau)).sum())


def _spectrum(values: Tensor) -> Spectrum:
    values = values.cpu()
    total = float(values.sum())
    if total == 0:
        return Spectrum(values, 0.0)
    shares = values / total
    return Spectrum(values, float(torch.special.entr(shares).sum().exp()))


def _log(values: Tensor) -> Tensor:
    return values.detach().cpu().double().clamp(min=FLOOR).log()


def _matrix(t: Tensor, what: str) -> None:
    if t.dim() != 2 or not t.numel():
        raise ValueError(f"{what}, not {list(t.shape)}")
    if not bool(t.isfinite().all()):
        raise NotFinite(f"{what}, all finite numbers, and here some are NaN or infinite")
