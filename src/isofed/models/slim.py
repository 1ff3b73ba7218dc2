"""A network, or a part of it, at a fraction of its width: the slimming that FedAlign and GradAug share.

In a slimmed module every layer uses its leading output channels, and as many of its input channels as arrive. Weights
are slices of the full ones, so a gradient reaches them. Batch norm keeps running statistics for the full width only:
at less than that it uses the batch's own and stores nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isofed.errors import UserError
from isofed.models.base import Network, Output

_BatchNorm = nn.modules.batchnorm._BatchNorm


def channels(full: int, width: float, multiple: int = 8) -> int:
    """How many of ``full`` channels are left: near ``width`` of them, a multiple of 8, never less than 90 % of that.

    As in FedAlign's code, which keeps one or nine where fewer than four are wanted.

    >>> [channels(c, 0.25) for c in (16, 32, 64, 128, 256)]
    [8, 8, 16, 32, 64]
    """
    if width >= 1:
        return full
    wanted = full * width
    rounded = max(1, int(wanted + multiple / 2) // multiple * multiple)
    if rounded < 0.9 * wanted:
        rounded += multiple
    return min(rounded, full)


@contextmanager
def slimmed(module: nn.Module, width: float, multiple: int = 8) -> Iterator[None]:
    """Run ``module`` at a fraction of its width for the time of a block."""
    layers = [(m, _LAYERS[kind]) for m in module.modules() if (kind := _kind(m))] if width < 1 else []
    for layer, forward in layers:
        # An attribute of the instance goes before the class's method: hooks, and everything else, work as ever.
        layer.forward = partial(forward, layer, width, multiple)
    try:
        yield
    finally:
        for layer, _ in layers:
            del layer.forward


def slim_forward(network: Network, inputs: Tensor, width: float, multiple: int = 8) -> Output:
    """A whole network at a fraction of its width; the head keeps all its classes."""
    with slimmed(network, width, multiple):
        if width < 1:
            network.head.forward = partial(_head, network.head)
        output: Output = network(inputs)
    return output


def slim_channels(module: nn.Module, width: float, multiple: int = 8) -> tuple[int, ...]:
    """What a width comes to in a module: two widths for which this is the same make the same sub-network."""
    full = {m.out_channels if isinstance(m, nn.Conv2d) else m.out_features for m in module.modules() if _widens(m)}
    return tuple(channels(count, width, multiple) for count in sorted(full))


def _widens(layer: nn.Module) -> TypeGuard[nn.Conv2d | nn.Linear]:
    return isinstance(layer, (nn.Conv2d, nn.Linear))


def check_slimmable(module: nn.Module, who: str) -> None:
    """Refuse layers that have no meaning at a smaller width here."""
    for name, layer in module.named_modules():
        own = next(layer.parameters(recurse=False), None)
        grouped = isinstance(layer, nn.Conv2d) and layer.groups not in (1, layer.in_channels)
        if grouped or (own is not None and not _kind(layer)):
            raise UserError(f"{who} cannot run the layer '{name}' ({type(layer).__name__}) at a smaller width")


def _kind(layer: nn.Module) -> type[nn.Module] | None:
    return next((kind for kind in _LAYERS if isinstance(layer, kind)), None)


def _cut(tensor: Tensor | None, count: int) -> Tensor | None:
    return None if tensor is None else tensor[:count]


def _conv(layer: nn.Conv2d, width: float, multiple: int, x: Tensor) -> Tensor:
    arriving, leaving = x.shape[1], channels(layer.out_channels, width, multiple)
    groups = 1
    if layer.groups > 1:  # depthwise: a filter for each channel that arrives
        leaving = groups = arriving
        weight = layer.weight[:leaving]
    else:
        weight = layer.weight[:leaving, :arriving]
    bias = _cut(layer.bias, leaving)
    if layer.padding_mode != "zeros":
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        return F.conv2d(x, weight, bias, layer.stride, 0, layer.dilation, groups)
    return F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, groups)


def _linear(layer: nn.Linear, width: float, multiple: int, x: Tensor) -> Tensor:
    leaving = channels(layer.out_features, width, multiple)
    return F.linear(x, layer.weight[:leaving, : x.shape[-1]], _cut(layer.bias, leaving))


def _head(layer: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(layer, nn.Linear)  # the methods that come here have asked for one
    return F.linear(x, layer.weight[:, : x.shape[-1]], layer.bias)


def _batch_norm(layer: _BatchNorm, width: float, multiple: int, x: Tensor) -> Tensor:
    count = x.shape[1]
    weight, bias = _cut(layer.weight, count), _cut(layer.bias, count)
    y = F.batch_norm(x, None, None, weight, bias, training=True, eps=layer.eps)
    return y.relu() if getattr(layer, "relu", False) else y  # a ReLU that has become a part of the layer


def _group_norm(layer: nn.GroupNorm, width: float, multiple: int, x: Tensor) -> Tensor:
    count = x.shape[1]
    groups = math.gcd(layer.num_groups, count)
    return F.group_norm(x, groups, _cut(layer.weight, count), _cut(layer.bias, count), layer.eps)


_LAYERS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv2d: _conv,
    nn.Linear: _linear,
    _BatchNorm: _batch_norm,
    nn.GroupNorm: _group_norm,
}


def runs_at(network: Network, width: float, size: tuple[int, int], multiple: int = 8) -> bool:
    """Whether a network runs on pictures of this size, at its full width and at this one."""
    if network.shape is None:
        return True
    before, pictures = network.training, torch.zeros(2, network.shape[0], *size)
    try:
        with torch.no_grad():
            network.eval()(pictures)
            slim_forward(network, pictures, width, multiple)
    except (RuntimeError, ValueError):
        return False
    finally:
        network.train(before)
    return True
