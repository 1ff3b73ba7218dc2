"""How strongly a stage of a network can stretch its input: FedAlign's Lipschitz estimate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d

from isofed.functional import powers
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
    a, b = _same_places(a, b)
    return a @ b.transpose(1, 2) / a.shape[2]


def _same_places(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two maps as matrices of channels and places, the larger averaged down to the other's size."""
    a, b = _as_map(a), _as_map(b)
    a, b = _no_larger(a, b), _no_larger(b, a)
    return a.flatten(2), b.flatten(2)


def _no_larger(a: Tensor, b: Tensor) -> Tensor:
    size = (min(a.shape[2], b.shape[2]), min(a.shape[3], b.shape[3]))
    if a.shape[2:] == size:
        return a
    if a.shape[2] % size[0] or a.shape[3] % size[1]:
        return adaptive_avg_pool2d(a, size)
    return avg_pool2d(a, (a.shape[2] // size[0], a.shape[3] // size[1]))  # the same, and faster


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
    _check(iterations)
    norm = _frobenius(t)
    t = t / norm
    gram = t @ t.transpose(1, 2)
    return _largest_stretch(lambda v: gram @ v, t, iterations) * norm[:, 0, 0]


def stage_norm(a: Tensor, b: Tensor, iterations: int = 10) -> Tensor:
    """``spectral_norm(transmitting_matrix(a, b))``: the same numbers up to rounding, much faster.

    Where maps have fewer places than the matrix has rows, each product goes by way of the places, without the matrix.

    Args:
        a: before the stage, [batch, channels, height, width] or [batch, channels].
        b: after it, likewise.
        iterations: as for :func:`spectral_norm`.

    Returns:
        [batch].

    >>> a, b = torch.rand(4, 8, 3, 3), torch.rand(4, 5, 3, 3)
    >>> torch.allclose(stage_norm(a, b), spectral_norm(transmitting_matrix(a, b)), rtol=1e-4)
    True
    """
    _check(iterations)
    a, b = _as_map(a), _as_map(b)
    if powers.available(a, b, iterations):
        return powers.stage_norm(a, b, iterations, _in_operations(iterations))
    return _stage_norm(a, b, iterations)


def two_stage_norms(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], iterations: int = 10
) -> tuple[Tensor, Tensor]:
    """``stage_norm`` of two stages; where the first has no gradient, a GPU finds both at the same time."""
    _check(iterations)
    one, two = ((_as_map(a), _as_map(b)) for a, b in (first, second))
    if powers.two_available(one, two, iterations):
        return powers.two_norms(one, two, iterations, _in_operations(iterations))
    return stage_norm(*one, iterations), stage_norm(*two, iterations)


def _in_operations(iterations: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The norm of a stage in PyTorch's operations, all of which can be differentiated again."""
    return partial(_stage_norm, iterations=iterations, kernels=False)


@full_precision
def _stage_norm(a: Tensor, b: Tensor, iterations: int, kernels: bool = True) -> Tensor:
    a, b = _no_larger(a, b), _no_larger(b, a)
    if kernels and powers.available(a, b, iterations):  # as it had not been before they were of one size
        return powers.stage_norm(a, b, iterations, _in_operations(iterations))
    a, b = a.flatten(2), b.flatten(2)
    norms = _frobenius(a), _frobenius(b)
    a, b = a / norms[0], b / norms[1]
    few = a.shape[2] <= a.shape[1] and iterations > 1
    found = _among_places(a, b, iterations) if few else _among_channels(a, b, iterations, kernels)
    return found * (norms[0] * norms[1])[:, 0, 0] / a.shape[2]


def _among_channels(a: Tensor, b: Tensor, iterations: int, kernels: bool) -> Tensor:
    """The largest singular value of t = a b', where a has fewer channels than places."""
    t = a @ b.transpose(1, 2)
    # A step v -> t t'v is one among as many "places" as a has channels, between which there is nothing but t.
    unit = torch.eye(a.shape[1], dtype=a.dtype, device=a.device).expand(len(a), -1, -1)[..., None]
    between = t.transpose(1, 2)[..., None]
    if kernels and powers.available(unit, between, iterations):
        return powers.stage_norm(unit, between, iterations, _in_operations(iterations)) * a.shape[1]
    return _largest_stretch(lambda v: t @ (t.transpose(1, 2) @ v), a, iterations)


def _among_places(a: Tensor, b: Tensor, iterations: int) -> Tensor:
    """The largest singular value of a b', where a has fewer places than channels: all products are of places only.

    With w = a'v a step v -> a b'b a'v is w -> a'a b'b w, a small matrix, whose powers are found by squaring.
    """
    between, within = b.transpose(1, 2) @ b, a.transpose(1, 2) @ a
    step, w = within @ between, a.sum(1)[:, :, None]  # the latter is a' times ones
    factor, left = step / _largest(step.flatten(1))[:, :, None], iterations - 2  # so that powers stay in their range
    while left:
        if left % 2:
            w = factor @ w
        left //= 2
        factor = factor @ factor if left else factor
    before = w / _largest(w)
    squares = []
    for x in (before, step @ before):
        x = between @ x
        squares.append((x.transpose(1, 2) @ (within @ x)).clamp(min=0))  # the length of a x, squared
    lengths = [_root(square) for square in squares]
    return _root(lengths[1] / lengths[0].clamp(min=torch.finfo(a.dtype).tiny))[:, 0, 0]


def _largest_stretch(square: Callable[[Tensor], Tensor], like: Tensor, iterations: int) -> Tensor:
    """The largest singular value of matrices of length 1 at most, from products with their squares."""
    before = after = torch.ones_like(like[:, :, :1])
    for n in range(iterations):
        # Now and then, so that numbers stay in their range.
        before = after / _largest(after) if n % 2 == 0 else after
        after = square(before)
    squared = _length(after) / _length(before).clamp(min=torch.finfo(like.dtype).tiny)
    return _root(squared)[:, 0, 0]


def _check(iterations: int) -> None:
    if iterations < 1:
        raise ValueError(f"a spectral norm needs at least one iteration, not {iterations}")


def _frobenius(t: Tensor) -> Tensor:
    """The length of each matrix, or 1; without a gradient, as it is divided by and multiplied back."""
    found = t.detach().flatten(1).norm(dim=1)[:, None, None]
    return torch.where(found > 0, found, 1)


def _largest(v: Tensor) -> Tensor:
    """The largest entry along the second axis, or 1; likewise."""
    found = v.detach().abs().amax(1, keepdim=True)
    return torch.where(found > 0, found, 1)


def _length(v: Tensor) -> Tensor:
    return _root(v.square().sum(1, keepdim=True))


def _root(squared: Tensor) -> Tensor:
    """The square root, with no gradient at zero; a NaN is handed on."""
    seen = ~(squared <= 0)
    return torch.where(seen, torch.where(seen, squared, 1).sqrt(), 0)
