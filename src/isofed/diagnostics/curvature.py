"""The Hessian of a loss, without ever building it: its largest eigenvalues, its trace, its diagonal.

All come from products of the Hessian with vectors, two backward passes each, over one fixed sample of data in eval
mode. Random vectors are keyed by the seed and their number, so that the same call gives the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from isofed.diagnostics.hessian import DEFLATE, Eigenvalues, Hessian, Loss, Progress
from isofed.diagnostics.sampling import Data


class Trace(NamedTuple):
    """An estimate of the trace, and of that of each tensor's own block."""

    value: float
    error: float  # standard error of the value
    traces: Tensor  # [tensors], float64 on the CPU; they sum to the value
    names: tuple[str, ...]  # of the tensors
    probes: int
    converged: bool  # whether the error is within the tolerance


class Diagonal(NamedTuple):
    """An estimate of the diagonal."""

    values: Tensor  # [parameters], float64
    error: float  # estimated length of the error, relative to that of the diagonal
    traces: Tensor  # [tensors], float64 on the CPU: sums of the values of each tensor
    names: tuple[str, ...]  # of the tensors
    probes: int
    converged: bool  # whether the error is within the tolerance


class Match(NamedTuple):
    """How much the curvature differs between clients (FedAlign, Eq. 3 and 4)."""

    norm: float  # H_N: mean squared difference of the lengths of the diagonals
    direction: float  # H_D: mean cosine between the diagonals


def hessian_top_eigenvalues(
    network: nn.Module,
    data: Data,
    count: int = 1,
    *,
    tolerance: float = 1e-3,
    iterations: int = 100,
    seed: int = 0,
    loss: Loss = cross_entropy,
    batch_size: int = 256,
    progress: Progress | None = None,
) -> Eigenvalues:
    """The largest eigenvalues of the Hessian and their vectors, by Lanczos' method.

    FedAlign (Table 1) takes power iterations, which find the eigenvalue of the largest size; at a minimum that is the
    same one. Lanczos' method needs fewer products, and says how far off it can be. It holds one vector of the network's
    size for each iteration.

    Args:
        network: plain, as :func:`isofed.models.load` gives it; only parameters that require a gradient count.
        data: inputs and labels, as from ``fixed_sample``.
        count: of eigenvalues.
        tolerance: for the errors, relative to the largest value found.
        iterations: at most.
        seed: of the first vector.
        loss: of logits and labels, a mean over samples.
        batch_size: of a pass; it changes memory and time, and the result by rounding only. Where a GPU's memory does
            not suffice, smaller ones are taken.
        progress: is told after each product.
    """
    hessian = Hessian(network, data, loss, batch_size)
    if not 1 <= count <= hessian.size:
        raise ValueError(f"there are {hessian.size} eigenvalues, so one can ask for 1 to {hessian.size}, not {count}")
    return hessian.top(count, tolerance, iterations, seed, progress)


def hessian_trace(
    network: nn.Module,
    data: Data,
    *,
    tolerance: float = 0.02,
    probes: int = 200,
    deflate: int = DEFLATE,
    seed: int = 0,
    loss: Loss = cross_entropy,
    batch_size: int = 256,
    progress: Progress | None = None,
) -> Trace:
    """The trace of the Hessian (H_T of FedAlign's Table 1): the mean of v' H v over vectors v of random signs.

    This is Hutchinson's estimate. Probes are added until the standard error is within the tolerance. FedAlign stops
    when the mean moves by less than a thousandth, which it may do by chance.

    Args:
        network: plain, as :func:`isofed.models.load` gives it; only parameters that require a gradient count.
        data: inputs and labels, as from ``fixed_sample``.
        tolerance: for the standard error, relative to the trace.
        probes: at most; at least 8 are made.
        deflate: top eigenvectors, found first with some 30 products, in which H is taken as it is. Most of the noise
            lies there: they save two probes of three. 0 for Hutchinson's plain estimate.
        seed: of the probes.
        loss: of logits and labels, a mean over samples.
        batch_size: of a pass.
        progress: is told after each product for ``deflate`` and each group of probes.
    """
    hessian = Hessian(network, data, loss, batch_size)
    blocks: list[Tensor] = []
    for terms in hessian.probed(probes, deflate, seed, progress):
        blocks.append(hessian.by_tensor(terms))
        each = torch.cat(blocks)
        totals = each.sum(1)
        value, error = float(totals.mean()), float(totals.std() / math.sqrt(len(totals)))
        converged = error <= tolerance * abs(value)
        if converged:
            break
    return Trace(value, error, each.mean(0), hessian.names, len(each), converged)


def hessian_diagonal(
    network: nn.Module,
    data: Data,
    *,
    tolerance: float = 0.1,
    probes: int = 200,
    deflate: int = DEFLATE,
    seed: int = 0,
    loss: Loss = cross_entropy,
    batch_size: int = 256,
    progress: Progress | None = None,
) -> Diagonal:
    """The diagonal of the Hessian: the mean of v * H v over random signs v, element by element.

    Its noise comes from everything beside the diagonal, so it needs many more probes than the trace: look at ``error``.
    ``traces`` are what FedAlign's code takes for the diagonal.

    Args:
        network: plain, as :func:`isofed.models.load` gives it; only parameters that require a gradient count.
        data: inputs and labels, as from ``fixed_sample``.
        tolerance: for the length of the error, relative to that of the diagonal.
        probes: at most; at least 8 are made. With as many as there are parameters, products with each axis in turn
            give the diagonal exactly, and are used.
        deflate: as for :func:`hessian_trace`.
        seed: of the probes.
        loss: of logits and labels, a mean over samples.
        batch_size: of a pass.
        progress: is told after each product for ``deflate`` and each group of probes.
    """
    hessian = Hessian(network, data, loss, batch_size)
    if probes >= hessian.size:
        values = hessian.exact_diagonal(progress)
        return Diagonal(values, 0.0, hessian.by_tensor(values[None])[0], hessian.names, hessian.size, True)
    total, squares, count = hessian.zeros(), hessian.zeros(), 0
    for terms in hessian.probed(probes, deflate, seed, progress):
        total += terms.sum(0)
        squares += terms.square().sum(0)
        count += len(terms)
        mean = total / count
        # The estimate's own length is too large by its noise.
        noise = float((squares - count * mean.square()).clamp(min=0).sum()) / (count - 1) / count
        signal = float(mean.square().sum()) - noise
        error = math.sqrt(noise / signal) if signal > 0 else math.inf if noise > 0 else 0.0
        converged = error <= tolerance
        if converged:
            break
    return Diagonal(mean, error, hessian.by_tensor(mean[None])[0], hessian.names, count, converged)


@torch.no_grad()
def hessian_match(diagonals: Sequence[Tensor], itself: bool = True) -> Match:
    """H_N and H_D: how much the curvature of clients' models differs in size and in direction (FedAlign, Eq. 3 and 4).

    The mean over pairs of clients of the squared difference of the lengths of their diagonals, and of the cosine
    between them; 0 and 1 where all agree. Noise in estimated diagonals adds to the first and takes from the second. A
    NaN in one of them makes both NaN.

    Args:
        diagonals: one of each client: ``hessian_diagonal(...).values``, as the paper defines it, or ``.traces``, the
            trace of each tensor's block, which its released code takes and its Table 1 holds.
        itself: whether a client is also paired with itself, as FedAlign does; with K clients that gives (K - 1)/K of
            H_N, and draws H_D towards 1. Leave it out to compare different numbers of clients.

    >>> hessian_match([torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])], itself=False)
    Match(norm=25.0, direction=1.0)
    """
    count = len(diagonals)
    if count < 2 or any(d.dim() != 1 or d.shape != diagonals[0].shape for d in diagonals):
        raise ValueError("a match needs the diagonals of at least two clients, as vectors of one length")
    lengths = torch.stack([d.double().norm() for d in diagonals])
    # A NaN is not above zero either, and has to be handed on.
    units = [
        d.double() / n if n != 0 else torch.zeros_like(d, dtype=torch.float64)
        for d, n in zip(diagonals, lengths, strict=True)
    ]
    own = sum(float(u @ u) for u in units)
    pairs = count * count if itself else count * (count - 1)
    directions = float(sum(units[1:], units[0]).square().sum()) - (0.0 if itself else own)
    norms = float((lengths[:, None] - lengths).square().sum())
    return Match(norms / pairs, directions / pairs)
