"""SGD as ``torch.optim.SGD`` defines it, on all weights as one vector; and how gradients get into theirs."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isofed.config import Settings
from isofed.functional.kernels import tl, triton
from isofed.layout import Entry
from isofed.models.dense import Factors, go_along

BLOCK = 1024  # numbers of a program on a GPU
_LARGE = 2**18  # numbers of a gradient that are worth a kernel of their own


@dataclass
class Piece:
    """Weights that are updated together, with the places of their gradient and their momentum."""

    weights: Tensor
    gradient: Tensor
    momentum: Tensor
    number: int | None = None  # of the one tensor that this is, among those that are trained
    found: Tensor | None = None  # its gradient, as long as that is not in its place,
    factors: Factors | None = None  # or what it is a product of


def pieces(entries: Sequence[Entry], weights: Tensor, gradient: Tensor, momentum: Tensor) -> list[Piece]:
    """All weights, in order: each large tensor of ``entries`` alone, and together what is between two of them."""

    def between(start: int, end: int) -> list[Piece]:
        here = slice(start, end)
        return [Piece(weights[here], gradient[here], momentum[here])] if end > start else []

    made, end = [], 0
    for number, entry in enumerate(entries):
        if entry.size >= _LARGE:
            made += between(end, entry.offset)
            made.append(Piece(entry.view(weights), entry.view(gradient), entry.view(momentum), number))
            end = entry.offset + entry.size
    return made + between(end, len(weights))


def update(s: Settings, pieces: Sequence[Piece], lr: Tensor, counter: Tensor) -> None:
    """One update of the weights, in place, and one more in the counter. The gradient's values are used up."""
    if triton is not None and counter.is_cuda:
        (all_of_it,) = pieces
        weights = all_of_it.weights
        # PyTorch's fused optimiser gives a program 65,536 numbers: too few programs for a small network.
        _update[(triton.cdiv(weights.numel(), BLOCK),)](
            weights, all_of_it.gradient, all_of_it.momentum, lr, counter, weights.numel(), s.momentum, s.weight_decay,
            bool(s.momentum), s.nesterov, BLOCK,
        )  # fmt: skip
        return
    for piece in pieces:
        if piece.factors:  # there is no momentum or decay then: see LocalStep
            go_along(piece.weights, piece.factors, lr)
            piece.factors = None
            continue
        direction = piece.gradient if piece.found is None else piece.found
        piece.found = None
        if s.weight_decay:
            direction = torch.add(direction, piece.weights, alpha=s.weight_decay, out=piece.gradient)
        if s.momentum:
            made = piece.momentum.mul_(s.momentum).add_(direction)
            direction = torch.add(direction, made, alpha=s.momentum, out=piece.gradient) if s.nesterov else made
        piece.weights.addcmul_(direction, lr, value=-1)
    counter.add_(1)


def collect(places: Sequence[Tensor], found: Sequence[Tensor | None], first: bool, apart: Sequence[Piece] = ()) -> None:
    """Add gradients to their places, no two of them the same, or put them there if they are the first ones.

    Those of tensors that are pieces ``apart`` stay where they are: to copy megabytes takes a processor as long as the
    update itself.
    """
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # one kernel for each kind
    alone = {piece.number: piece for piece in apart if piece.number is not None}
    for number, (place, gradient) in enumerate(zip(places, found, strict=True)):
        if number in alone and alone[number].factors:
            continue
        if number in alone and gradient is not None:
            alone[number].found = gradient
        elif gradient is not None and gradient.numel() >= _LARGE:
            put(place, gradient, add=not first)
        elif gradient is not None:
            here, gradients = kinds.setdefault(gradient.dtype, ([], []))
            here.append(place)
            gradients.append(gradient)
        elif first:  # a tensor that this loss does not depend on
            place.zero_()
    for kind, (here, gradients) in kinds.items():
        if first:
            torch._foreach_copy_(here, gradients)
            continue
        if kind != here[0].dtype:  # PyTorch copies many from one precision to another at once, but adds them singly
            same = [torch.empty_like(place) for place in here]
            torch._foreach_copy_(same, gradients)
            gradients = same
        torch._foreach_add_(here, gradients)


def put(place: Tensor, gradient: Tensor, add: bool = False) -> None:
    """Copy a gradient to its place, which may be of another precision; or add it to what is there."""
    # PyTorch's own kernel for two precisions reads one number at a time.
    dense = gradient.is_contiguous() or gradient.is_contiguous(memory_format=torch.channels_last)
    if triton is not None and place.is_cuda and dense and gradient.stride() == place.stride():
        _put[(triton.cdiv(place.numel(), BLOCK),)](place, gradient, place.numel(), add, BLOCK)
    elif add:
        place.add_(gradient)
    else:
        place.copy_(gradient)


if triton is not None:

    @triton.jit
    def _put(place, gradient, size, ADD: tl.constexpr, BLOCK: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(gradient + i, i < size, 0.0).to(place.dtype.element_ty)
        if ADD:
            v += tl.load(place + i, i < size, 0.0)
        tl.store(place + i, v, i < size)

    @triton.jit
    def _update(
        weights, gradient, momentum, lr, counter, size, factor, decay,
        MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = i < size
        w = tl.load(weights + i, inside, 0.0)
        d = tl.load(gradient + i, inside, 0.0) + decay * w
        if MOMENTUM:
            m = factor * tl.load(momentum + i, inside, 0.0) + d
            tl.store(momentum + i, m, inside)
            d = d + factor * m if NESTEROV else m
        tl.store(weights + i, w - tl.load(lr) * d, inside)
        if tl.program_id(0) == 0:
            tl.store(counter, tl.load(counter) + 1)
