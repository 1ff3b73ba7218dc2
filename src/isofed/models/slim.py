"""A network, or a part of it, at a fraction of its width: the slimming that FedAlign and GradAug share.

In a slimmed module every layer uses its leading output channels, and as many of its input channels as arrive. Weights
are slices of the full ones, so a gradient reaches them; or, where a list of cuts is asked for, leaves of their own,
whose gradients are as small as they are. Batch norm keeps running statistics for the full width only: at less than that
it uses the batch's own and stores nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isofed.errors import UserError
from isofed.models import pointwise, thin
from isofed.models.base import FusedNorm, Network, Output
from isofed.models.batch_norm import batch_norm
from isofed.models.convolution import FusedConv2d
from isofed.models.parts import taken
from isofed.models.winograd import Convolution

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


class Cut(NamedTuple):
    """A part of a weight, that stands for itself in the graph of a pass."""

    parameter: Tensor
    where: tuple[slice, ...]
    part: Tensor


@contextmanager
def slimmed(module: nn.Module, width: float, multiple: int = 8, cuts: list[Cut] | None = None) -> Iterator[None]:
    """Run ``module`` at a fraction of its width for the time of a block."""
    slim = _Slim(width, multiple, cuts)
    layers = [(m, slim.forward(kind)) for m in module.modules() if (kind := _kind(m))] if width < 1 else []
    for layer, forward in layers:
        # An attribute of the instance goes before the class's method: hooks, and everything else, work as ever.
        layer.forward = partial(forward, layer)
    try:
        yield
    finally:
        for layer, _ in layers:
            del layer.forward


def slim_forward(
    network: Network, inputs: Tensor, width: float, multiple: int = 8, cuts: list[Cut] | None = None
) -> Output:
    """A whole network at a fraction of its width; the head keeps all its classes.

    Into ``cuts``, if it is given, go the parts of the weights that were used, at less than the full width; the pass is
    then a function of those, and not of the weights themselves.
    """
    with slimmed(network, width, multiple, cuts):
        if width < 1:
            network.head.forward = partial(_Slim(width, multiple, cuts).head, network.head)
        output: Output = network(inputs)
    return output


def full_channels(module: nn.Module) -> tuple[int, ...]:
    """The numbers of channels that a module's layers have at its full width, each once, the smallest first."""
    return tuple(sorted({len(m.weight) for m in module.modules() if widens(m)}))


def slim_channels(module: nn.Module, width: float, multiple: int = 8) -> tuple[int, ...]:
    """What a width comes to in a module: two widths for which this is the same make the same sub-network."""
    return tuple(channels(count, width, multiple) for count in full_channels(module))


def widens(layer: nn.Module) -> TypeGuard[nn.Conv2d | nn.Linear]:
    """Whether a layer has a width of its own, that slimming makes less."""
    return isinstance(layer, (nn.Conv2d, nn.Linear))


def check_slimmable(module: nn.Module, who: str) -> None:
    """Refuse layers that have no meaning at a smaller width here."""
    for name, layer in module.named_modules():
        own = next(layer.parameters(recurse=False), None)
        grouped = isinstance(layer, nn.Conv2d) and layer.groups not in (1, layer.in_channels)
        if grouped or (own is not None and not _kind(layer)):
            raise UserError(f"{who} cannot run the layer '{name}' ({type(layer).__name__}) at a smaller width")


def _kind(layer: nn.Module) -> type[nn.Module] | None:
    return next((kind for kind in (nn.Conv2d, nn.Linear, _BatchNorm, nn.GroupNorm) if isinstance(layer, kind)), None)


@dataclass(frozen=True)
class _Slim:
    """Layers at a fraction of their width."""

    width: float
    multiple: int
    cuts: list[Cut] | None

    def forward(self, kind: type[nn.Module]) -> Callable[..., Tensor]:
        layers: dict[type[nn.Module], Callable[..., Tensor]]
        layers = {nn.Conv2d: self.conv, nn.Linear: self.linear, _BatchNorm: self.batch_norm}
        return layers.get(kind, self.group_norm)

    def cut(self, parameter: Tensor, *counts: int) -> Tensor:
        where = tuple(slice(count) for count in counts)
        part = parameter[where]
        if self.cuts is None or not parameter.requires_grad:
            return part
        # In one piece at once: a convolution would make it so forward, and again on its way back.
        part = taken(part.detach()).requires_grad_()
        self.cuts.append(Cut(parameter, where, part))
        return part

    def cut_or_none(self, parameter: Tensor | None, count: int) -> Tensor | None:
        return None if parameter is None else self.cut(parameter, count)

    def conv(self, layer: nn.Conv2d, x: Tensor) -> Tensor:
        arriving, leaving = x.shape[1], channels(layer.out_channels, self.width, self.multiple)
        groups = 1
        if layer.groups > 1:  # depthwise: a filter for each channel that arrives
            leaving = groups = arriving
            weight = self.cut(layer.weight, leaving)
        else:
            weight = self.cut(layer.weight, leaving, arriving)
        bias = self.cut_or_none(layer.bias, leaving)
        if layer.padding_mode != "zeros":
            x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
            y = F.conv2d(x, weight, bias, layer.stride, 0, layer.dilation, groups)
        elif isinstance(layer, FusedConv2d) and layer.thin and thin.applies(x, weight):
            y = thin.convolution(x, weight, bias, layer.stride[0], int(layer.padding[0]))
        else:
            y = pointwise.convolution(x, weight, bias, layer.stride, layer.padding, layer.dilation, groups)
        return layer.behind(y) if isinstance(layer, (FusedConv2d, Convolution)) else y

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        leaving = channels(layer.out_features, self.width, self.multiple)
        return F.linear(x, self.cut(layer.weight, leaving, x.shape[-1]), self.cut_or_none(layer.bias, leaving))

    def head(self, layer: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(layer, nn.Linear)  # the methods that come here have asked for one
        bias = self.cut_or_none(layer.bias, layer.out_features)
        return F.linear(x, self.cut(layer.weight, layer.out_features, x.shape[-1]), bias)

    def batch_norm(self, layer: _BatchNorm, x: Tensor, add: Tensor | None = None, relu: bool = False) -> Tensor:
        count = x.shape[1]
        weight, bias = self.cut_or_none(layer.weight, count), self.cut_or_none(layer.bias, count)
        if isinstance(layer, FusedNorm) and layer.fuses(x) and weight is not None and bias is not None:
            return batch_norm(x, layer, (weight, bias), add, relu)
        y = F.batch_norm(x, None, None, weight, bias, training=True, eps=layer.eps)
        return layer.behind(y, add, relu) if isinstance(layer, FusedNorm) else y

    def group_norm(self, layer: nn.GroupNorm, x: Tensor) -> Tensor:
        count = x.shape[1]
        groups = math.gcd(layer.num_groups, count)
        weight, bias = self.cut_or_none(layer.weight, count), self.cut_or_none(layer.bias, count)
        return F.group_norm(x, groups, weight, bias, layer.eps)


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
