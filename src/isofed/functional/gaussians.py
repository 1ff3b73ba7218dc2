"""CCVR: one Gaussian per class, pooled over clients exactly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from isofed.functional.precision import rows


class Gaussians(NamedTuple):
    """Counts, means and unbiased covariances of the features of each class, in float64."""

    counts: Tensor  # [classes]
    mean: Tensor  # [classes, width]; zero for a class without samples
    covariance: Tensor  # [classes, width, width]; zero for a class with fewer than two


class ClassSums(NamedTuple):
    """The same as plain sums, which add up over clients."""

    counts: Tensor  # [classes]
    first: Tensor  # sum of z, [classes, width]
    second: Tensor  # sum of z z', [classes, width, width]


def class_sums(z: Tensor, labels: Tensor, classes: int) -> ClassSums:
    """Per class: how many samples, the sum of z, and the sum of z z', in float64.

    Args:
        z: features [samples, width].
        labels: class indices [samples].
        classes: how many there are.
    """
    rows("z", z, "[samples, width]")
    z, counts = z.double(), _counts(labels, classes)
    first, second = z.new_zeros(classes, z.shape[1]), z.new_zeros(classes, z.shape[1], z.shape[1])
    for label in range(classes):
        own = z[labels == label]
        first[label], second[label] = own.sum(0), own.T @ own
    return ClassSums(counts, first, second)


def gaussians_of(sums: ClassSums) -> Gaussians:
    """The Gaussians that summed-up samples have.

    A covariance is a difference of sums here: of features whose mean is a million times their spread nothing is left.
    """
    counts, first, second = sums
    mean = first / counts.clamp(min=1)[:, None]
    about_mean = second - counts[:, None, None] * mean[:, :, None] * mean[:, None, :]
    covariance = about_mean / (counts - 1).clamp(min=1)[:, None, None]
    return Gaussians(counts, mean, torch.where(counts[:, None, None] > 1, covariance, 0))


def class_gaussians(z: Tensor, labels: Tensor, classes: int) -> Gaussians:
    """Count, mean and unbiased covariance of each class's features.

    CCVR (Luo et al. 2021), what a client computes.

    Args:
        z: features [samples, width].
        labels: class indices [samples].
        classes: how many there are.
    """
    rows("z", z, "[samples, width]")
    z, counts = z.double(), _counts(labels, classes)
    mean, covariance = z.new_zeros(classes, z.shape[1]), z.new_zeros(classes, z.shape[1], z.shape[1])
    for label in range(classes):
        own = z[labels == label]
        if len(own):
            mean[label] = own.mean(0)
            centred = own - mean[label]
            covariance[label] = centred.T @ centred / max(len(own) - 1, 1)
    return Gaussians(counts, mean, covariance)


def merge_gaussians(parts: Iterable[Gaussians]) -> Gaussians:
    """The Gaussians of all clients' samples together, from those of each client.

    CCVR (Luo et al. 2021), Eq. 3 and 4. Exact: equal to those of the pooled samples, however they were divided. The
    covariance is written about the pooled mean, sum_k [(n_k - 1) S_k + n_k (m_k - m)(m_k - m)'] / (N - 1), which is
    the paper's expression without its difference of large numbers.

    Args:
        parts: what :func:`class_gaussians` gave at each client.
    """
    given = list(parts)
    if not given:
        raise ValueError("there is nothing to merge")
    counts = torch.stack([p.counts for p in given]).sum(0)
    weighted = torch.stack([p.counts[:, None] * p.mean for p in given]).sum(0)
    mean = weighted / counts.clamp(min=1)[:, None]
    total = torch.zeros_like(given[0].covariance)
    for p in given:
        away = p.mean - mean
        total += (p.counts - 1).clamp(min=0)[:, None, None] * p.covariance
        total += p.counts[:, None, None] * away[:, :, None] * away[:, None, :]
    return Gaussians(counts, mean, total / (counts - 1).clamp(min=1)[:, None, None])


def _counts(labels: Tensor, classes: int) -> Tensor:
    counts = torch.bincount(labels, minlength=classes)
    if len(counts) > classes:
        raise ValueError(f"there is a label {len(counts) - 1}, but only {classes} classes")
    return counts.double()
