"""Thin networks for tiny runs: those of the package with an eighth of their channels, and no block twice in a row.

A run names one as ``thin.py:mobilenetv2`` with the path before it, like any network in a file, so that its record
cannot be taken for one of the whole network.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isofed import models
from isofed.models.base import FusedNorm, Network
from isofed.models.residual import Residual
from isofed.plugins import resolve

SHARE = 8


def reference(name: str) -> str:
    """What ``model=`` says for the thin form of a network."""
    return resolve(f"{__file__}:{name}")


def __getattr__(name: str) -> Callable[..., Network]:
    if name not in models.names():
        raise AttributeError(name)
    return partial(thin, name)


def thin(name: str, shape: tuple[int, int, int], classes: int) -> Network:
    """A network with the same stages, layers and kinds of blocks, and hardly any weights."""
    with torch.device("meta"), _Undrawn():  # the whole one is only looked at
        network = models.create(name, classes=classes, shape=shape)
    for stage in network.stages.values():
        if isinstance(stage, nn.Sequential):
            _without_repeats(stage)
    _replace(network, shape[0])
    width = _fewer(network.width)
    network.head, network.width = nn.Linear(width, classes), width
    return network


class _Undrawn(TorchFunctionMode):
    """Nothing is drawn: without memory it would be for nothing, and PyTorch needs seconds to learn how."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in (Tensor.normal_, Tensor.uniform_) else func(*args, **(kwargs or {}))


def _without_repeats(stage: nn.Sequential) -> None:
    """Blocks that look like the one before them go: what that one gives is what they take and give."""
    for place in range(len(stage) - 1, 0, -1):
        if isinstance(stage[place], Residual) and str(stage[place]) == str(stage[place - 1]):
            del stage[place]


def _replace(module: nn.Module, channels: int) -> None:
    """Every layer with weights by a narrower one, on the processor and with weights of its own."""
    for name, child in module.named_children():
        narrow = _narrow(child, channels)
        if narrow is None:
            _replace(child, channels)
        else:
            setattr(module, name, narrow)


def _narrow(layer: nn.Module, channels: int) -> nn.Module | None:
    if isinstance(layer, FusedNorm):
        return type(layer)(_fewer(layer.num_features))
    if isinstance(layer, nn.Linear):
        return nn.Linear(_fewer(layer.in_features), _fewer(layer.out_features), layer.bias is not None)
    if isinstance(layer, nn.Conv2d):
        inside = channels if layer.in_channels == channels else _fewer(layer.in_channels)
        same: dict[str, Any] = {key: getattr(layer, key) for key in ("kernel_size", "stride", "padding")}
        groups = 1 if layer.groups == 1 else inside
        return nn.Conv2d(inside, _fewer(layer.out_channels), **same, groups=groups, bias=layer.bias is not None)
    return None


def _fewer(count: int) -> int:
    return max(2, count // SHARE)
