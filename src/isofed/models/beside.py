"""A network and several of its sub-networks in one pass, each with so many channels, on pictures of a size of its own.

Their batches are one batch. Smaller pictures lie in the upper left corner of a sheet, as large as the whole ones, with
zeros around, and stay there from layer to layer. A convolution sees the same around a picture as if it were alone,
since batch norm, which stands behind each, makes zeros again of what is not the picture's, or not one of its channels.
The sizes and the numbers of channels may be tensors on a GPU, so that one captured step serves all of them.

A GPU that is not full with one of these batches has fewer and larger pieces of work this way. It computes with what is
around the pictures, too; :mod:`isofed.models.narrow` does not, and takes one sub-network after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from isofed.models import sheet_norm, sheets
from isofed.models.base import BatchNorm1d, BatchNorm2d, FusedNorm, Network, Output
from isofed.models.dense import Dense
from isofed.models.flatten import Flatten
from isofed.models.narrow import CONVOLUTIONS, narrows
from isofed.models.residual import Residual
from isofed.models.sheets import Sheets
from isofed.models.slim import full_channels

Size = tuple[int, int]
_PLAIN = (nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh)  # each pixel by itself, 0 of 0
_KNOWN: WeakKeyDictionary[Network, bool] = WeakKeyDictionary()


def beside_forward(network: Network, inputs: Tensor, counts: Tensor, places: Tensor, whole: bool) -> Output:
    """Sub-networks on the same batch, resized for each of them; what they give is one behind the other.

    Args:
        network: one for which :func:`lies_beside` holds.
        inputs: a batch; none of the sub-networks sees it higher or wider.
        counts: int64 [n, ...], how many are left of each number of :func:`isofed.models.slim.full_channels`.
        places: int64 [n, ..., 2], what :func:`extents` gives for each of their sizes.
        whole: whether the first of them is the network as it is, which changes batch norm's running statistics.
    """
    with _placed(network, counts, places, whole):
        output: Output = network(sheets.resized(inputs, places[:, 0]))
    return output


def first_rows(output: Output, count: int) -> tuple[Output, Tensor]:
    """What the first of some networks has given, for so many samples, and the logits of the others."""
    rows = [count, len(output.logits) - count]
    (logits, others), features = output.logits.split(rows), output.features.split(rows)[0]
    return Output(logits, features, {name: stage.split(rows)[0] for name, stage in output.stages.items()}), others


def extents(network: Network, size: Size) -> list[Size]:
    """How large a picture of this size is in the beginning, and at each layer that has to know where it ends."""
    found: dict[nn.Module, Size] = {}
    _through(_way(network), _At(size), found)
    return [size, *(found[layer] for layer in _spots(network))]


def lies_beside(network: Network) -> bool:
    """Whether a network is one whose sub-networks can be one pass, as far as can be told from its layers."""
    if network not in _KNOWN:
        _KNOWN[network] = narrows(network) and _followed(network)
    return _KNOWN[network]


def _followed(network: Network) -> bool:
    found: dict[nn.Module, Size] = {}
    try:
        # Large enough for any network's layers; what a picture's size comes to there does not matter.
        at = _through(_way(network), _At((2**16, 2**16)), found)
    except _Unknown:
        return False
    return at == _At(None) and found.keys() == {*_spots(network)}  # none of them is beside the way


class _Unknown(Exception):
    """There is a layer behind which it is not known what is around a picture."""


class _At(NamedTuple):
    """What flows from one layer to the next."""

    size: Size | None  # of a picture; there is none of vectors
    open: bool = False  # whether a batch norm has to come before anybody may look beyond the picture's end


def _way(network: Network) -> nn.Module:
    return nn.Sequential(*network.stages.values(), network.pool, network.projector or nn.Identity())


def _spots(network: Network) -> list[nn.Module]:
    """The layers that have to know where pictures end, and which of their channels are left."""
    return [layer for layer in network.modules() if isinstance(layer, (FusedNorm, nn.AdaptiveAvgPool2d))]


def _through(layer: nn.Module, at: _At, found: dict[nn.Module, Size]) -> _At:
    """What a layer makes of what it is given; sizes go into ``found``."""
    kind = type(layer)
    if isinstance(layer, nn.Sequential) and kind is nn.Sequential:
        for part in layer:
            at = _through(part, at, found)
        return at
    if isinstance(layer, FusedNorm) and kind in (BatchNorm1d, BatchNorm2d) and layer.stores:
        found[layer] = at.size or (1, 1)
        return _At(at.size)
    if at.open:
        raise _Unknown
    if kind in _PLAIN:
        return at
    if isinstance(layer, Residual) and kind is Residual:
        seen = at if layer.before is None else _through(layer.before, at, found)
        inside = _through(layer.branch, seen, found)
        beside = at if layer.shortcut is None else _through(layer.shortcut, seen, found)
        if inside == beside and not inside.open:
            return inside
    elif isinstance(layer, nn.Conv2d) and kind in CONVOLUTIONS and at.size is not None:
        bare = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        if bare and not getattr(layer, "relu", False) and not getattr(layer, "pool", False):
            return _At(_behind(layer, at.size), open=True)
    elif isinstance(layer, nn.AdaptiveAvgPool2d) and kind is nn.AdaptiveAvgPool2d and at.size is not None:
        if layer.output_size in (1, (1, 1)):
            found[layer] = at.size
            return _At((1, 1))
    elif kind in (nn.Flatten, Flatten) and at.size == (1, 1):
        return _At(None)
    elif kind in (nn.Linear, Dense) and at.size is None:
        return _At(None, open=True)
    raise _Unknown


def _behind(layer: nn.Conv2d, size: Size) -> Size:
    """How large what a convolution gives is."""
    high, wide = (
        (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for side, padding, dilation, kernel, stride in zip(
            size, cast(Size, layer.padding), layer.dilation, layer.kernel_size, layer.stride, strict=True
        )
    )
    return high, wide


@contextmanager
def _placed(network: Network, counts: Tensor, places: Tensor, whole: bool) -> Iterator[None]:
    """Let layers look at the pictures alone for the time of a block."""
    full, layers = full_channels(network), _spots(network)
    for number, layer in enumerate(layers, 1):
        forward: Callable[..., Tensor]
        if isinstance(layer, FusedNorm):
            here = Sheets(places[:, number], counts[:, full.index(layer.num_features)], whole)
            forward = partial(sheet_norm.batch_norm, layer, here)
        else:
            forward = partial(sheets.average, places[:, number])
        # An attribute of the instance goes before the class's method.
        layer.forward = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
