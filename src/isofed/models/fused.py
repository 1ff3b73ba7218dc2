"""Layers that a GPU does in few kernels, and who gets them; the kernel of planned dropout is here.

A kernel of a small network takes a GPU less time than getting it started, and PyTorch needs seven of them for a batch
norm, two for a ReLU and thirty for a dropout that hashes. Here it is at most four for the first two together, and two
for the last. They are written in Triton, which comes with PyTorch where there is a GPU; without it everything works as
before.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from isofed.functional.kernels import tl, triton
from isofed.models import tf32, thin
from isofed.models.convolution import FusedConv2d
from isofed.models.residual import Residual, is_closed
from isofed.models.tiles import rows_of, tickets


def available() -> bool:
    """Whether these layers can be used here; ``ISOFED_FUSED=0`` switches them off."""
    return triton is not None and torch.cuda.is_available() and os.environ.get("ISOFED_FUSED", "1") != "0"


def fuse(network: nn.Module, unseen: bool = False) -> None:
    """Let the layers of a network on a GPU use these kernels; the names of its tensors stay as they are.

    ``unseen`` says that nobody looks at what is between layers: a method of somebody's own may, and so may a module.
    """
    from isofed.models.base import FusedNorm  # which needs this module itself
    from isofed.models.dropout import Dropout

    if not available():
        return
    unseen = unseen and is_closed(network)
    places = Counter(id(layer) for module in network.modules() for layer in module._modules.values())
    for module in [*network.modules()]:
        if isinstance(module, Residual):
            module.joins, module.twins = _ends_with_norm(module.branch), unseen
        for name, child in [*module.named_children()]:
            if type(child) is nn.Conv2d:
                _fuse_convolution(module, name, child)
            elif isinstance(child, FusedNorm):
                child.ticket = tickets(child.num_features, child.weight.device)
                if places[id(child)] == 1:  # elsewhere there may be no ReLU behind it
                    child.relu = child.relu or _taken(module, name, lambda m: type(m) is nn.ReLU)
            elif isinstance(child, Dropout):
                child.fused = True


def _ends_with_norm(branch: nn.Module) -> bool:
    """Whether a branch is nothing but layers one after another, the last of them a batch norm of this package."""
    from isofed.models.base import FusedNorm

    return type(branch) is nn.Sequential and len(branch) > 0 and type(branch[-1]).forward is FusedNorm.forward


def _fuse_convolution(parent: nn.Module, name: str, layer: nn.Conv2d) -> None:
    relu = layer.bias is not None and _taken(parent, name, lambda m: type(m) is nn.ReLU)
    pool = relu and _taken(parent, name, halves, 2)
    if relu or thin.fits(layer) or tf32.fits(layer):
        setattr(parent, name, FusedConv2d.of(layer, relu, pool))


def halves(layer: nn.Module) -> bool:
    """Whether a layer takes the largest of squares of two by two."""
    if type(layer) is not nn.MaxPool2d or layer.ceil_mode or layer.return_indices:
        return False
    sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return sizes in ((2, 2, 0, 1), ((2, 2), (2, 2), (0, 0), (1, 1)))


def _taken(parent: nn.Module, name: str, wanted: Callable[[nn.Module], bool], steps: int = 1) -> bool:
    """Whether the layer so many steps behind this one is wanted; then nothing is left in its place."""
    if not isinstance(parent, nn.Sequential):
        return False
    behind = list(parent._modules).index(name) + steps
    if behind >= len(parent) or not wanted(parent[behind]):
        return False
    parent[behind] = nn.Identity()
    return True


if triton is not None:

    @triton.jit
    def _drop(x, y, key, count, channels, area, least, scale, mix0, mix1, mix2, BLOCK: tl.constexpr):
        """Zero entries by a hash of the key and their place in the order batch, channel, row, column."""
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = i < count
        c = i % channels
        rest = i // channels
        place = ((rest // area) * channels + c) * area + rest % area
        bits = (place + 1) * mix0 + tl.load(key)
        bits = (bits ^ ((bits >> 33) & 0x7FFFFFFF)) * mix1
        bits = (bits ^ ((bits >> 33) & 0x7FFFFFFF)) * mix2
        bits = bits ^ ((bits >> 33) & 0x7FFFFFFF)
        kept = ((bits >> 40) & 0xFFFFFF) >= least
        v = tl.load(x + i, inside, 0.0).to(tl.float32) * scale
        tl.store(y + i, tl.where(kept, v, 0.0).to(y.dtype.element_ty), inside)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(key)
        ctx.p = p
        return _dropped(x, key, p)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (key,) = ctx.saved_tensors
        return _dropped(g, key, ctx.p), None, None


def _dropped(x: Tensor, key: Tensor, p: float) -> Tensor:
    from isofed.models.dropout import MIX, least_kept

    x = rows_of(x)
    area = x[0, 0].numel()
    y, block = torch.empty_like(x), 1024
    grid = (triton.cdiv(x.numel(), block),)
    _drop[grid](x, y, key, x.numel(), x.shape[1], area, least_kept(p), 1 / (1 - p), *MIX, block)
    return y


def dropout(x: Tensor, key: Tensor, p: float) -> Tensor:
    """Dropout by a planned number, as :class:`isofed.models.dropout.Dropout` defines it."""
    return _Dropout.apply(x, key, p)
