"""What the methods that refit the head share: features of a client's samples, and a head trained on features."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from isofed.layout import Tensors
from isofed.methods.base import Visit

CHUNK = 512  # samples in a pass


@torch.no_grad()
def seen_by_head(visit: Visit, tests: bool = False) -> tuple[Tensor, Tensor]:
    """What the head sees of all the client's samples (or of its test samples), and their labels."""
    pieces = [
        (visit.network.head_input(visit.network(inputs).features.float()), labels)
        for inputs, labels in (visit.tests if tests else visit.batches)(CHUNK)
    ]
    features, labels = zip(*pieces, strict=True)
    return torch.cat(features), torch.cat(labels)


def head_of(tensors: Tensors) -> tuple[Tensor, Tensor | None]:
    """A linear head's weight and bias among a model's named tensors."""
    return tensors["head.weight"], tensors.get("head.bias")


@torch.no_grad()
def train_head(
    head: tuple[Tensor, Tensor | None],
    z: Tensor,
    labels: Tensor,
    orders: Iterable[Tensor],
    *,
    lr: float,
    momentum: float,
    batch_size: int,
) -> None:
    """Train a linear head in place on features, by SGD with cross-entropy; one epoch for each order of the samples."""
    weight, bias = head
    velocity, bias_velocity = torch.zeros_like(weight), torch.zeros_like(weight[:, 0])
    for order in orders:
        for index in order.to(z.device).split(batch_size):
            x, y = z[index], one_hot(labels[index], len(weight))
            logits = x @ weight.T if bias is None else torch.addmm(bias, x, weight.T)
            error = (logits.softmax(1) - y) / len(index)  # the gradient of cross-entropy by the logits
            weight.sub_(velocity.mul_(momentum).add_(error.T @ x), alpha=lr)
            if bias is not None:
                bias.sub_(bias_velocity.mul_(momentum).add_(error.sum(0)), alpha=lr)


def accuracy_by_class(head: tuple[Tensor, Tensor | None], z: Tensor, labels: Tensor) -> Tensor:
    """How much of each class a head gets right; NaN for a class without samples."""
    weight, bias = head
    logits = z @ weight.T if bias is None else torch.addmm(bias, z, weight.T)
    right = torch.bincount(labels[logits.argmax(1) == labels], minlength=len(weight))
    return right.double() / torch.bincount(labels, minlength=len(weight))
