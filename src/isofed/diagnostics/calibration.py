"""Whether a model is as sure as it is right."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from isofed.errors import NotFinite


class Calibration(NamedTuple):
    """Of predictions, bin by bin of their confidence; float64 on the CPU. Empty bins are NaN."""

    error: float  # expected calibration error: mean |confidence - accuracy|, bins weighted by their samples
    largest: float  # of the bins' differences
    brier: float  # mean squared distance between the probabilities and the one-hot label
    confidence: Tensor  # [bins], mean confidence
    accuracy: Tensor  # [bins], share that was right
    counts: Tensor  # [bins], samples, int64


@torch.no_grad()
def calibration(probabilities: Tensor, labels: Tensor, bins: int = 15) -> Calibration:
    """The expected calibration error (Guo et al. 2017) and the reliability curve behind it.

    Samples are sorted into bins of equal width by the probability of the class that was predicted. In each bin the mean
    of that probability should be the share of right answers; where it is larger the model is too sure of itself.

    Args:
        probabilities: [samples, classes], after a softmax.
        labels: [samples].
        bins: over (0, 1].

    >>> calibration(torch.tensor([[0.75, 0.25]] * 4), torch.tensor([0, 0, 0, 1])).error
    0.0
    """
    p, y = probabilities.double().cpu(), labels.cpu()
    if p.dim() != 2 or not len(p) or y.shape != p.shape[:1]:
        raise ValueError("calibration needs probabilities [samples, classes] and as many labels")
    if bins < 1:
        raise ValueError(f"calibration needs at least one bin, not {bins}")
    if not bool(p.isfinite().all()):
        raise NotFinite("calibration needs finite probabilities, and here some are NaN or infinite")
    if float(p.min()) < 0 or not torch.allclose(p.sum(1), p.new_ones(()), atol=1e-2):
        raise ValueError("the probabilities of a sample must not be negative and must sum to 1; take a softmax first")
    confidence, predicted = p.max(1)
    right = (predicted == y).double()
    # A bin holds its upper end, as in (0, 0.1].
    where = ((confidence * bins).ceil().long() - 1).clamp(0, bins - 1)
    counts = torch.bincount(where, minlength=bins)
    sure, accurate = (torch.bincount(where, weights=v, minlength=bins) / counts for v in (confidence, right))
    gaps = (sure - accurate).abs().nan_to_num(0.0)
    target = torch.nn.functional.one_hot(y, p.shape[1])
    return Calibration(
        error=float((gaps * counts).sum() / len(p)),
        largest=float(gaps.max()),
        brier=float((p - target).square().sum(1).mean()),
        confidence=sure,
        accuracy=accurate,
        counts=counts,
    )
