"""What a network is here: an encoder with named stages, perhaps a projector, then a head.

Methods act on the parts by these names: on the features (the input of the head), on the output of a stage, on the
logits, or on the head itself. Every network of the package is a :class:`Network`, so every method works on each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isofed.errors import UserError
from isofed.functional import unit
from isofed.models.batch_norm import batch_norm, by_stored_statistics
from isofed.models.tiles import in_rows
from isofed.spec import parse_one


class Output(NamedTuple):
    """What one forward pass gives."""

    logits: Tensor
    features: Tensor
    stages: dict[str, Tensor]


class Network(nn.Module):
    """Stages in order, a pooling step that gives one feature vector per sample, perhaps a projector, and a head.

    >>> net = Network({"one": nn.Linear(4, 3)}, nn.Flatten(), nn.Linear(3, 2), width=3)
    >>> import torch; net(torch.zeros(5, 4)).logits.shape
    torch.Size([5, 2])

    Args:
        stages: the encoder's parts, in order.
        pool: from the last stage's output to one vector per sample.
        head: from features to logits; a plain ``nn.Linear`` where methods are to work on it.
        width: of the features.
        projector: from pooled vectors to features, where the network has one.
    """

    def __init__(
        self,
        stages: Mapping[str, nn.Module],
        pool: nn.Module,
        head: nn.Module,
        width: int,
        projector: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleDict(stages)
        self.pool = pool
        self.projector = projector
        self.head = head
        self.width = width
        self.normalise = False  # whether the head sees features scaled to length 1
        self.shape: tuple[int, int, int] | None = None  # of the pictures it was created for
        # With which these were normalised, where it has been trained; bytes were divided by 255 before.
        self.data_mean: tuple[float, ...] | None = None
        self.data_std: tuple[float, ...] | None = None

    def forward(self, x: Tensor) -> Output:
        stages = {}
        for name, stage in self.stages.items():
            x = stages[name] = stage(x)
        features = self.pool(x)
        if self.projector is not None:
            features = self.projector(features)
        return Output(self.head(self.head_input(features)), features, stages)

    def head_input(self, features: Tensor) -> Tensor:
        """What the head is given for these features."""
        return unit(features) if self.normalise else features


@contextmanager
def statistics_kept(network: nn.Module) -> Iterator[None]:
    """Passes in this block leave the running statistics of batch norm as they are."""
    layers = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    buffers = [b for layer in layers for b in layer.buffers()]
    before = [b.clone() for b in buffers]
    try:
        yield
    finally:
        for now, old in zip(buffers, before, strict=True):
            # Through .data: the backward pass of batch norm does not need these values, but would mind their change.
            now.data.copy_(old)


def norm_layer(text: str) -> Callable[[int], nn.Module]:
    """A normalisation for ``n`` channels from its text: ``batch``, ``group:2`` (two groups), or ``none``."""
    choice = parse_one(text, "norm")
    values = [str(v) for _, v in choice.options]
    if choice.name == "batch" and not values:
        return BatchNorm2d
    if choice.name == "none" and not values:
        return lambda channels: nn.Identity()
    if choice.name == "group" and len(values) == 1 and values[0].isdigit() and int(values[0]) > 0:
        groups = int(values[0])

        def group_norm(channels: int) -> nn.Module:
            if channels % groups:
                raise UserError(
                    f"norm=group:{groups} cannot divide {channels} channels; choose a divisor of {channels}"
                )
            return nn.GroupNorm(groups, channels)

        return group_norm
    raise UserError(f"norm must be 'batch', 'group:N' (N groups) or 'none', not '{text}'")


def vector_norm(text: str) -> Callable[[int], nn.Module]:
    """The same for vectors of ``n`` features, as in a projector."""
    return BatchNorm1d if text == "batch" else norm_layer(text)


class FusedNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm without its batch counter, which nothing reads and every step would have to raise.

    Weights with or without a counter load into it. On a GPU :func:`isofed.models.fused.fuse` lets it do its work in few
    kernels, together with what is added to it in a residual block and the ReLU behind it.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.num_batches_tracked = None
        self.relu = False  # whether the ReLU behind it has become a part of it
        self.ticket: Tensor | None = None  # with which it is fused

    def forward(self, x: Tensor, add: Tensor | None = None, relu: bool = False) -> Tensor:
        """The normalised batch; ``add``, of the same shape and kind, is added to it, and behind that may be a ReLU."""
        if self.fuses(x):
            if self.training:
                return batch_norm(x, self, add=add, relu=relu)
            if not torch.is_grad_enabled():
                return by_stored_statistics(x, self, add, relu)
        return self.behind(super().forward(x), add, relu)

    def behind(self, y: Tensor, add: Tensor | None, relu: bool) -> Tensor:
        """What stands behind the norm, in PyTorch's own parts."""
        y = y if add is None else add + y
        return y.relu() if self.relu or relu else y

    def fuses(self, x: Tensor) -> bool:
        """Whether this batch can be normalised in few kernels."""
        return self.ticket is not None and self.stores and x.is_cuda and x.dtype != torch.float64 and in_rows(x)

    @property
    def stores(self) -> bool:
        """Whether it keeps running statistics, as it does unless somebody has changed that."""
        return self.track_running_stats and self.momentum is not None and self.running_mean is not None

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        state_dict.pop(prefix + "num_batches_tracked", None)
        # Past the parent class, which would ask for the counter.
        nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)


class BatchNorm2d(FusedNorm, nn.BatchNorm2d):
    """Of pictures, [batch, channels, height, width]."""


class BatchNorm1d(FusedNorm, nn.BatchNorm1d):
    """Of vectors, [batch, features]."""


def has_batch_norm(network: nn.Module) -> bool:
    """Whether a batch of one sample is a problem for this network."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules())
