"""What the methods that refit the head share: features of a client's samples, and a head trained on features."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from isofed.layout import Tensors
from isofed.methods.base import Visit


@torch.no_grad()
def seen_by_head(visit: Visit, tests: bool = False) -> tuple[Tensor, Tensor]:
    """What the head sees of all the client's samples (or of its test samples), and their labels."""
    pieces = [
        (visit.network.head_input(visit.network(inputs).features.float()), labels)
        for inputs, labels in (visit.tests if tests else visit.batches)(visit.run.at_once)
    ]
    if not pieces:  # a client may have no test sample
        none = torch.zeros(0, visit.network.width, device=visit.model.device)
        return none, none.new_zeros(0, dtype=torch.int64)
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
    batches: Iterable[Tensor],
    *,
    lr: float,
    momentum: float,
) -> None:
    """Train a linear head in place on features, by SGD with cross-entropy; ``batches`` are positions in ``z``."""
    weight, bias = head
    velocity, bias_velocity = torch.zeros_like(weight), torch.zeros_like(weight[:, 0])
    for index in batches:
        x, y = z[index.to(z.device)], one_hot(labels[index.to(z.device)], len(weight))
        logits = x @ weight.T if bias is None else torch.addmm(bias, x, weight.T)
        error = (logits.softmax(1) - y) / len(index)  # the gradient of cross-entropy by the logits
        weight.sub_(velocity.mul_(momentum).add_(error.T @ x), alpha=lr)
        if bias is not None:
            bias.sub_(bias_velocity.mul_(momentum).add_(error.sum(0)), alpha=lr)


def shuffled(count: int, size: int, epochs: int, rng: np.random.Generator, at_least: int = 0) -> Iterator[Tensor]:
    """Batches of positions, in a new order each epoch; more epochs where these make fewer than ``at_least`` batches."""
    epochs = max(epochs, -(-at_least // -(-count // size)))
    for _ in range(epochs):
        yield from torch.from_numpy(rng.permutation(count)).split(size)


def accuracy_by_class(head: tuple[Tensor, Tensor | None], z: Tensor, labels: Tensor) -> Tensor:
    """How much of each class a head gets right; NaN for a class without samples."""
    weight, bias = head
    logits = z @ weight.T if bias is None else torch.addmm(bias, z, weight.T)
    right = torch.bincount(labels[logits.argmax(1) == labels], minlength=len(weight))
    return right.double() / torch.bincount(labels, minlength=len(weight))
