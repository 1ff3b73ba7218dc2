"""How strongly a stage of a network can stretch its input: FedAlign's Lipschitz estimate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from isofed.functional.precision import full_precision


@full_precision
def transmitting_matrix(a: Tensor, b: Tensor) -> Tensor:
    """The matrix A B' / (H W) of each sample, from the feature maps before and after a stage.

    FedAlign (Mendieta et al. 2022), Eq. 6 and 7. Rows are channels, columns are places; the map with more places is
    averaged down to the other's size. Features without places, [batch, channels], count as maps of one place.

    Args:
        a: before the stage, [batch, channels, height, width].
        b: after it, likewise, with channels of its own.

    Returns:
        [batch, channels of a, channels of b].
    """
    a, b = _as_map(a), _as_map(b)
    size = (min(a.shape[2], b.shape[2]), min(a.shape[3], b.shape[3]))
    a, b = (m if m.shape[2:] == size else adaptive_avg_pool2d(m, size) for m in (a, b))
    return a.flatten(2) @ b.flatten(2).transpose(1, 2) / (size[0] * size[1])


def _as_map(features: Tensor) -> Tensor:
    return features[:, :, None, None] if features.dim() == 2 else features


@full_precision
def spectral_norm(t: Tensor, iterations: int = 10) -> Tensor:
    """The largest singular value of each matrix, by power iteration on t t' from a vector of ones.

    As in FedAlign's released code: the gradient flows through all iterations. A matrix that sends ones to nothing,
    such as zero, has the value 0 and no gradient.

    Args:
        t: [batch, rows, columns].
        iterations: products with t t'; ten come within 1 % on the features of a usual network behind a ReLU.

    Returns:
        [batch].

    >>> float(spectral_norm(torch.diag(torch.tensor([3.0, 1.0]))[None]))
    3.0
    """
    if iterations < 1:
        raise ValueError(f"spectral_norm needs at least one iteration, not {iterations}")
    # Of length 1, a matrix can be multiplied a few times without its numbers leaving their range.
    norm = t.detach().flatten(1).norm(dim=1)[:, None, None]
    norm = torch.where(norm > 0, norm, 1)
    t = t / norm
    gram = t @ t.transpose(1, 2)
    before = after = torch.ones_like(gram[:, :, :1])
    for n in range(iterations):
        before = after / _largest(after) if n % 4 == 0 else after
        after = gram @ before
    squared = _length(after) / _length(before).clamp(min=torch.finfo(t.dtype).tiny)
    seen = squared > 0
    return torch.where(seen, torch.where(seen, squared, 1).sqrt() * norm, 0)[:, 0, 0]


def _largest(v: Tensor) -> Tensor:
    """The largest entry along the second axis, or 1; without a gradient, as it is divided by and multiplied back."""
    found = v.detach().abs().amax(1, keepdim=True)
    return torch.where(found > 0, found, 1)


def _length(v: Tensor) -> Tensor:
    squared = v.square().sum(1, keepdim=True)
    seen = squared > 0
    return torch.where(seen, torch.where(seen, squared, 1).sqrt(), 0)
