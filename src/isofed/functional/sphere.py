"""Everything on a sphere: SphereFed's fixed classifier and its loss."""

from __future__ import annotations

import torch
from torch import Generator, Tensor
from torch.nn.functional import mse_loss, one_hot

from isofed.functional import columns
from isofed.functional.precision import full_precision, rows

SHORTEST = 1e-6  # a feature below this length has no direction


@full_precision
def unit(z: Tensor) -> Tensor:
    """Rows scaled to length 1. A row without a direction stays zero and gets no gradient, rather than a huge one."""
    return columns.unit(z, _unit, SHORTEST) if columns.rows_available(z) else _unit(z)


def _unit(z: Tensor) -> Tensor:
    squared = z.square().sum(-1, keepdim=True)
    long = squared > SHORTEST**2
    return z * torch.where(long, torch.where(long, squared, 1).rsqrt(), 0)


@full_precision
def sphere_mse(z: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """SphereFed's loss: the mean over batch and classes of (W z/||z|| - onehot)^2.

    SphereFed (Dong et al. 2022), Eq. 5.

    Args:
        z: features [batch, width]; they are normalised here.
        weight: W, [classes, width].
        labels: class indices [batch], or class probabilities [batch, classes].

    >>> float(sphere_mse(torch.tensor([[3.0, 0.0]]), torch.eye(2), torch.tensor([0])))
    0.0
    """
    rows("z", z)
    rows("weight", weight, "[classes, width]")
    logits = unit(z) @ weight.T
    wanted = one_hot(labels, len(weight)) if labels.dim() == 1 else labels
    return mse_loss(logits, wanted.to(logits))


def orthonormal_classifier(classes: int, width: int, generator: Generator | None = None) -> Tensor:
    """A classifier whose rows have length 1 and are as far apart as they can be, [classes, width] in float32.

    SphereFed (Dong et al. 2022), Sec. 3.1: with at most as many classes as dimensions the rows are orthonormal, from
    the QR decomposition of a Gaussian matrix. The paper stops there. With more classes the largest cosine between two
    rows is made as small as possible: a simplex for width + 1 classes (cosine -1/width), the axes in both directions
    up to 2 width (cosine 0), both of which are optimal, and beyond that the outcome of a numerical search. All are
    turned at random.

    Args:
        classes: rows.
        width: of the features.
        generator: of the random rotation; torch's own if not given.

    >>> w = orthonormal_classifier(3, 8)
    >>> torch.allclose(w @ w.T, torch.eye(3), atol=1e-6)
    True
    """
    if classes < 1 or width < 1:
        raise ValueError(f"a classifier needs at least one class and one feature, not {classes} and {width}")
    if classes <= width:
        return _rotation(width, classes, generator).T.float().contiguous()
    if classes == width + 1:
        rows = _simplex(width)
    elif classes <= 2 * width:
        rows = torch.cat([torch.eye(width), -torch.eye(width)])[:classes].double()
    else:
        rows = _spread(torch.randn(classes, width, generator=generator, dtype=torch.float64))
    return (rows @ _rotation(width, width, generator).T).float()


def _rotation(rows: int, columns: int, generator: Generator | None) -> Tensor:
    """Orthonormal columns in random directions; the signs are those that make the distribution uniform."""
    q, r = torch.linalg.qr(torch.randn(rows, columns, generator=generator, dtype=torch.float64))
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def _simplex(width: int) -> Tensor:
    """The width + 1 corners of a regular simplex, as coordinates in the hyperplane that they span."""
    # Helmert's directions: the k-th is k ones, then -k. A solver would give others with other rounding, as any will do.
    k = torch.arange(1, width + 1, dtype=torch.float64)
    ones = torch.ones(width + 1, width, dtype=torch.float64).triu()
    return unit((ones - torch.diag_embed(k, offset=-1)[:, :width]) / (k * (k + 1)).sqrt())


def _spread(rows: Tensor, steps: int = 400) -> Tensor:
    """Move unit vectors apart: descend on a soft maximum of their cosines that hardens as it goes."""
    rows = unit(rows)
    best, smallest = rows, float("inf")
    itself = torch.eye(len(rows), dtype=torch.bool)
    for step in range(steps):
        cosines = (rows @ rows.T).masked_fill(itself, -torch.inf)
        largest = float(cosines.max())
        if largest < smallest:
            best, smallest = rows, largest
        hardness = 4.0 * 100 ** (step / steps)
        push = ((cosines - largest) * hardness).exp() @ rows
        rows = unit(rows - 0.5 * (1 - step / steps) * push / push.norm(dim=1).max())
    return best
