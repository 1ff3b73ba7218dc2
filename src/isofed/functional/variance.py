"""Spread of the predictions: FedUV's and UniVarFL's term on the classifier."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from isofed.functional import columns
from isofed.functional.precision import full_precision, nothing, one_of, rows


@full_precision
def classifier_variance(
    logits: Tensor,
    statistic: Literal["std", "var"] = "std",
    target: float | None = None,
    hinge: Literal["linear", "squared", "none"] = "linear",
    weight: float = 1.0,
    onto: Tensor | None = None,
) -> Tensor:
    """L_V: how much the predicted probabilities of each class vary less over a batch than those of IID labels would.

    FedUV (Son et al. 2024), Eq. 2 and 3: the mean over classes of max(0, c - s_j), with s_j the spread over the batch
    of class j's softmax probability and c that of the columns of the identity matrix, a batch of ideal answers with
    each class once. The statistics are unbiased, so c = 1/sqrt(classes) for ``std`` (FedUV) and 1/classes for ``var``
    (UniVarFL).

    Args:
        logits: [batch, classes].
        statistic: ``std`` or ``var``.
        target: another c.
        hinge: ``linear`` as above; ``squared`` squares it; ``none`` has no maximum: c - s_j.
        weight: the value and its gradient times this; on a GPU without a kernel of its own.
        onto: another loss, to which this one is added, likewise.

    >>> round(float(classifier_variance(torch.zeros(8, 4))), 6)  # no spread at all: c itself
    0.5
    """
    one_of("statistic", statistic, "std", "var")
    one_of("hinge", hinge, "linear", "squared", "none")
    rows("logits", logits, "[batch, classes]")
    if len(logits) < 2:
        return nothing(logits) if onto is None else onto + nothing(logits)
    classes = logits.shape[1]
    if target is None:
        target = classes**-0.5 if statistic == "std" else 1 / classes
    plain = partial(_lacking, statistic=statistic, target=target, hinge=hinge, weight=weight)
    if columns.available(logits) and classes <= columns.MOST:
        return columns.variance(logits, onto, plain, statistic == "std", target, hinge, weight)
    return plain(logits) if onto is None else onto + plain(logits)


def _lacking(logits: Tensor, statistic: str, target: float, hinge: str, weight: float) -> Tensor:
    spread = logits.softmax(1).var(0, correction=1)
    lacking = target - (_root(spread) if statistic == "std" else spread)
    if hinge != "none":
        lacking = lacking.clamp(min=0)
    return (lacking.square() if hinge == "squared" else lacking).sum() * (weight / len(lacking))


def _root(x: Tensor) -> Tensor:
    """The square root, with a gradient of zero where x is zero: that of a spread which cannot be seen to change."""
    seen = x > torch.finfo(x.dtype).tiny
    return torch.where(seen, torch.where(seen, x, 1).sqrt(), 0)
