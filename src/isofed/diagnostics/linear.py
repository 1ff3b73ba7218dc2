"""Why skewed labels collapse a representation, on a network that is simple enough to prove it (FedDecorr, Theorem 1).

A deep linear network has the features P x with P the product of its weights, and the logits W P x. With G = the mean of
(onehot(y) - softmax) x', what gradient descent pulls W P towards, and weights that start balanced, each singular value
of P grows at the speed of :func:`singular_speeds`: as fast as G stretches along its singular vectors. Labels of few
classes make a G of low rank; only as many values grow, and the features end up in that many directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from isofed.diagnostics.spectra import Spectrum, classifier_spectrum
from isofed.draws import generator


class Collapse(NamedTuple):
    """What a deep linear network has learned from labels with given shares."""

    gradient: Spectrum  # of G, before the first step
    product: Spectrum  # of the product of the weights, after the last
    history: Tensor  # [steps + 1, width], singular values of the product before and after each step
    loss: float  # at the end, on the data it was trained on


def linear_collapse(
    shares: Sequence[float],
    *,
    depth: int = 3,
    width: int = 32,
    samples: int = 500,
    steps: int = 300,
    lr: float = 0.2,
    seed: int = 0,
) -> Collapse:
    """Train a deep linear network on Gaussian clusters, one a class, of which the client has these shares.

    The clusters, the noise and the initial weights depend on the seed and the sizes alone, so two calls with different
    shares differ in their labels only.

    Args:
        shares: of each class, such as ``[1] * 10`` for balanced or ``[1, 1] + [0] * 8`` for two classes of ten.
        depth: of the product.
        width: of inputs and features, at least as many as there are classes.
        samples: altogether.
        steps: of gradient descent on all samples.
        lr: its learning rate.
        seed: of clusters, noise and weights.

    >>> even, skewed = linear_collapse([1] * 4, steps=300), linear_collapse([1, 1, 0, 0], steps=300)
    >>> skewed.gradient.effective_rank < even.gradient.effective_rank
    True
    >>> skewed.product.effective_rank < even.product.effective_rank
    True
    """
    classes, total = len(shares), float(sum(shares))
    if not 2 <= classes <= width or min(shares) < 0 or total <= 0:
        raise ValueError("shares are of 2 classes or more, no more than the width, not negative and not all zero")
    rng = generator(seed, "diagnostics/linear")
    centres, weights, head = _network(rng, classes, width, depth)
    noise = torch.from_numpy(rng.standard_normal((samples, width)))
    counts = np.diff(np.round(np.cumsum([0.0, *shares]) / total * samples)).astype(np.int64)
    y = torch.arange(classes).repeat_interleave(torch.from_numpy(counts))
    x = 2 * centres[y] + 0.5 * noise / width**0.5
    for w in (*weights, head):
        w.requires_grad_()
    history, first = [torch.linalg.svdvals(_product(weights).detach())], _pull(x, y, weights, head)
    for _ in range(steps):
        loss = cross_entropy(x @ _product(weights).T @ head.T, y)
        for w, g in zip((*weights, head), torch.autograd.grad(loss, (*weights, head)), strict=True):
            w.data.sub_(g, alpha=lr)
        history.append(torch.linalg.svdvals(_product(weights).detach()))
    final = float(cross_entropy(x @ _product(weights).T @ head.T, y).detach())
    return Collapse(classifier_spectrum(first), classifier_spectrum(_product(weights)), torch.stack(history), final)


@torch.no_grad()
def singular_speeds(weights: Sequence[Tensor], head: Tensor, pull: Tensor) -> Tensor:
    """How fast the singular values of a product of balanced weights grow under gradient flow, the largest value first.

    Theorem 1: d s_k / dt = L s_k^(2 - 2/L) u_k' W' G v_k, with L the number of weights, u_k and v_k the singular
    vectors of their product and W the head. (The paper writes it for a head that is balanced too, where W u_k is a
    multiple of a singular vector of W.) Balanced means W_l W_l' = W_(l+1)' W_(l+1), which gradient flow keeps.

    Args:
        weights: the first layer first, each [width, width].
        head: W, [classes, width].
        pull: G, [classes, width]: the mean over samples of (onehot - softmax) x'.
    """
    u, s, vh = torch.linalg.svd(_product(weights))
    depth = len(weights)
    return depth * s ** (2 - 2 / depth) * torch.einsum("ik,ij,kj->k", u, head.T @ pull, vh)


def _network(rng: np.random.Generator, classes: int, width: int, depth: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Orthonormal centres, balanced weights with small and nearly equal singular values, and a head."""

    def orthogonal() -> Tensor:
        return torch.linalg.qr(torch.from_numpy(rng.standard_normal((width, width)))).Q

    centres, bases = orthogonal()[:classes], [orthogonal() for _ in range(depth + 1)]
    scale = torch.diag(torch.linspace(0.21, 0.2, width, dtype=torch.float64))
    weights = [after @ scale @ before.T for before, after in pairwise(bases)]
    return centres, weights, 2 * orthogonal()[:classes]


def _product(weights: Sequence[Tensor]) -> Tensor:
    product = weights[0]
    for w in weights[1:]:
        product = w @ product
    return product


@torch.no_grad()
def _pull(x: Tensor, y: Tensor, weights: Sequence[Tensor], head: Tensor) -> Tensor:
    """G: the mean over samples of (onehot - softmax) x'."""
    lacking = one_hot(y, len(head)) - (x @ _product(weights).T @ head.T).softmax(1)
    return lacking.T @ x / len(x)
