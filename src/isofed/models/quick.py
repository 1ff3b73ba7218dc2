"""What makes a network quicker on a processor, where memory is slower than arithmetic.

Large dense layers get other products, and 3x3 convolutions fewer of them, which round differently
(:mod:`isofed.models.dense`, :mod:`isofed.models.winograd`); and some are kept from a fault of PyTorch's
(:mod:`isofed.models.pointwise`). The rest has the same bits: a ReLU behind a layer writes
over what that gave and nobody else wants; one before a maximum over squares comes after, where there is a quarter of
the numbers. Names and weights stay as they are.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from isofed.models import dense, pointwise, winograd
from isofed.models.fused import halves
from isofed.models.residual import is_ours, watched

# Whose derivatives do not need what the layer itself has given.
_LETS_GO = (nn.Conv2d, nn.Linear, nn.MaxPool2d, nn.modules.batchnorm._BatchNorm)
_RELUS = (nn.ReLU, nn.ReLU6)


def quicken(network: nn.Module, unseen: bool = True) -> None:
    """Change a network that is to be trained on a processor.

    ``unseen`` says that nobody looks at single layers: a method of somebody's own may, and so may a module.
    """
    known = all(is_ours(module) for module in network.modules())
    unseen = unseen and known and not _has_any_global_hook()
    modules = [*network.modules()]
    for module in modules:
        if type(module) is nn.Linear and dense.available():
            module.__class__ = dense.Dense
        elif type(module) is nn.Conv2d and pointwise.fits(module.weight, module.stride, module.padding):
            module.__class__ = pointwise.Pointwise
        elif type(module) is nn.Conv2d and winograd.available() and winograd.fits(module):
            module.__class__ = winograd.Convolution
    for module in modules:
        if type(module) is nn.Sequential and unseen:
            _maximum_first(module._modules)
            _join(module._modules)
            _write_over(module._modules)


def _maximum_first(layers: dict[str, nn.Module]) -> None:
    """The largest of some numbers, cut off at zero, is the largest of them after each was cut off."""
    for one, two in pairwise(layers):
        relu, pool = layers[one], layers[two]
        fits = type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d and not pool.return_indices
        if fits and not _seen(relu, pool):
            layers[one], layers[two] = pool, relu


def _join(layers: dict[str, nn.Module]) -> None:
    """A convolution with the maximum and the ReLU behind it: see :mod:`isofed.models.winograd`."""
    for one, two, three in zip(names := [*layers], names[1:], names[2:], strict=False):
        layer, pool, relu = layers[one], layers[two], layers[three]
        fits = halves(pool) and type(relu) is nn.ReLU and not _seen(layer, pool, relu)
        if fits and isinstance(layer, winograd.Convolution):
            layers[one], layers[two], layers[three] = winograd.Convolution.of(layer), nn.Identity(), nn.Identity()


def _write_over(layers: dict[str, nn.Module]) -> None:
    for one, two in pairwise(layers):
        layer, relu = layers[one], layers[two]
        if isinstance(layer, _LETS_GO) and isinstance(relu, _RELUS) and not _seen(layer, relu):
            layers[two] = type(relu)(inplace=True)  # another one: the same object may also stand elsewhere


def _seen(*layers: nn.Module) -> bool:
    """Whether somebody has hooked into these layers, or put something in the place of what they do."""
    return watched(*layers) or any("forward" in vars(layer) for layer in layers)
