"""A network at a fraction of its width with layers as large as ever, whose last channels are zero.

The same function as :func:`isofed.models.slim.slim_forward` computes with smaller layers. A GPU that has room for all
of them anyway is faster this way: cuDNN has good kernels for 64 channels, and slow ones for 56. And how many channels
are zero may be told by a tensor, so that one captured step serves all widths.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call

from isofed.models.base import BatchNorm1d, BatchNorm2d, Network, Output
from isofed.models.convolution import FusedConv2d
from isofed.models.dense import Dense
from isofed.models.flatten import Flatten
from isofed.models.pointwise import Pointwise
from isofed.models.residual import Residual, watched
from isofed.models.slim import full_channels, widens
from isofed.models.winograd import Convolution

_BatchNorm = nn.modules.batchnorm._BatchNorm
_NORMS = (BatchNorm1d, BatchNorm2d, nn.BatchNorm1d, nn.BatchNorm2d)
_FLAT = (nn.Flatten, Flatten)
# Layers that make zeros of zeros, and have a slope there.
_NEUTRAL = (
    *(nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d),
)
_DENSE = (nn.Linear, Dense)
CONVOLUTIONS = (nn.Conv2d, FusedConv2d, Convolution, Pointwise)
_KNOWN: WeakKeyDictionary[Network, bool] = WeakKeyDictionary()


def narrow_forward(network: Network, inputs: Tensor, counts: Tensor) -> Output:
    """A network with only the first channels of each layer; as with smaller layers, batch norm stores no statistics.

    Args:
        network: one for which :func:`narrows` holds.
        inputs: a batch.
        counts: int64, how many are left of each number of :func:`isofed.models.slim.full_channels`.
    """
    full = full_channels(network)
    kept = {count: torch.arange(count, device=counts.device) < counts[n] for n, count in enumerate(full)}
    used: dict[str, Tensor] = {}  # instead of the network's own
    norms = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, _BatchNorm)]
    for name, layer in network.named_modules():
        if widens(layer) and layer.bias is not None and layer is not network.head:
            here = kept[len(layer.weight)]
            used[f"{name}.weight"] = layer.weight * here.view(-1, *[1] * (layer.weight.dim() - 1))
            used[f"{name}.bias"] = layer.bias * here
        # What leaves a layer without a bias comes to a batch norm, which makes zeros of it.
    if norms:  # many short vectors: all in one
        sizes = [layer.num_features for _, layer in norms for _ in range(2)]
        parts = torch.cat([p for _, layer in norms for p in (layer.weight, layer.bias)])
        names = [f"{name}.{kind}" for name, _ in norms for kind in ("weight", "bias")]
        used |= dict(zip(names, (parts * torch.cat([kept[n] for n in sizes])).split(sizes), strict=True))
    for name, layer in norms:  # in training they are written, and not read
        used |= {f"{name}.{kind}": torch.empty_like(b) for kind, b in layer.named_buffers(recurse=False)}
    with _in_training([layer for _, layer in norms]):
        output: Output = functional_call(network, used, (inputs,), tie_weights=False)
    return output


@contextmanager
def _in_training(layers: list[_BatchNorm]) -> Iterator[None]:
    """Batch norms in this block use the batch's own statistics, whatever somebody has told them."""
    before = [layer.training for layer in layers]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            layer.training = training


def narrows(network: Network) -> bool:
    """Whether the two ways to a smaller width are one function of a network's weights.

    They are not where zeros are no neutral thing (the mean of a group norm), or where the place of a channel depends on
    how many there are (dropout, channels one behind the other, a shortcut that pads on both sides). So a network is
    followed from layer to layer, and holds only if all of them are known.
    """
    if network not in _KNOWN:
        _KNOWN[network] = _followed(network)
    return _KNOWN[network]


class _Unknown(Exception):
    """There is a layer of which it is not known what becomes of zeros in it."""


class _Stream(NamedTuple):
    """What flows from one layer to the next."""

    full: int | None  # how many channels there are at the full width, where each is one of a layer that can be slimmed
    zero: bool  # whether those that are left out are zero; or else a batch norm has to come before anybody reads them


def _followed(network: Network) -> bool:
    layers = [*network.modules()]
    places = sum(len(layer._modules) for layer in layers) + 1
    if type(network) is not Network or type(network.head) not in _DENSE or watched(*layers):
        return False
    if places > len(layers):  # a layer stands in two of them
        return False
    way = [*network.stages.values(), network.pool, *([network.projector] if network.projector is not None else [])]
    try:
        return _through(nn.Sequential(*way), _Stream(None, True)).zero
    except _Unknown:
        return False


def _through(layer: nn.Module, at: _Stream) -> _Stream:
    """What a layer makes of what it is given."""
    kind = type(layer)
    if kind in _NEUTRAL:
        return at
    if isinstance(layer, nn.Sequential) and kind is nn.Sequential:
        for part in layer:
            at = _through(part, at)
        return at
    if isinstance(layer, Residual) and kind is Residual:
        return _around(layer, at)
    if kind in _FLAT:
        return _Stream(None, at.zero)  # a channel may have become many numbers
    if isinstance(layer, _BatchNorm) and kind in _NORMS and layer.affine and layer.num_features == at.full:
        return _Stream(at.full, True)
    if isinstance(layer, nn.Conv2d) and kind in CONVOLUTIONS and layer.groups > 1 and at.zero:
        if layer.groups == layer.out_channels == at.full:  # one filter for each channel: zeros stay zeros
            return at
    elif isinstance(layer, (nn.Conv2d, nn.Linear)) and kind in (*CONVOLUTIONS, *_DENSE) and at.zero:
        return _Stream(len(layer.weight), layer.bias is not None)
    raise _Unknown


def _around(block: Residual, at: _Stream) -> _Stream:
    """The same for a branch and what flows beside it."""
    seen = at if block.before is None else _through(block.before, at)
    inside = _through(block.branch, seen)
    beside = at if block.shortcut is None else _through(block.shortcut, seen)
    if inside.full is None or inside.full != beside.full:
        raise _Unknown
    return _Stream(inside.full, inside.zero and beside.zero)
