"""What a diagnosis looks at: a sample of data that is always the same, and what a network makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from isofed.draws import generator

if TYPE_CHECKING:
    from isofed.data import Dataset
    from isofed.models import Network

Data = tuple[Tensor, Tensor]  # normalised inputs [samples, ...] and labels [samples]


class Observed(NamedTuple):
    """What a network in eval mode says about samples, on the CPU."""

    features: Tensor  # [samples, width]
    logits: Tensor  # [samples, classes]


def fixed_sample(dataset: Dataset, part: str = "train", count: int | None = 1024, seed: int = 0) -> Data:
    """Normalised inputs, not augmented, and labels of some samples; the same ones whenever it is asked for.

    Args:
        dataset: as in ``Federation(...).world.dataset``.
        part: ``train`` or ``test``.
        count: at most so many, drawn without replacement, in their order; all with ``None``.
        seed: of the draw.
    """
    # The engine may record diagnostics, so they do not load it before they are used.
    from isofed.engine.step import Pictures

    if part not in ("train", "test"):
        raise ValueError(f"part must be train or test, not '{part}'")
    chosen = dataset.train if part == "train" else dataset.test
    if count is not None and count < len(chosen):
        chosen = chosen.subset(np.sort(generator(seed, "diagnostics/sample").permutation(len(chosen))[:count]))
    pictures = Pictures(chosen, dataset, torch.device("cpu"))
    return pictures.normalised(pictures.images), pictures.labels


@torch.no_grad()
def observe(network: Network, inputs: Tensor, batch_size: int = 512) -> Observed:
    """Features and logits in eval mode, batch by batch where the network is."""
    with judging(network):
        outputs = [network(x.to(place(network))) for x in inputs.split(batch_size)]
    return Observed(torch.cat([o.features.cpu() for o in outputs]), torch.cat([o.logits.cpu() for o in outputs]))


@contextmanager
def judging(network: nn.Module) -> Iterator[None]:
    """Eval mode in this block, in which no pass changes a network and no layer is a fused one."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def trained(network: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that an optimiser would move, by name; a flat vector holds them in this order."""
    found = {name: p for name, p in network.named_parameters() if p.requires_grad}
    if not found:
        raise ValueError("the network has no parameter that is trained: set requires_grad on some")
    return found


def place(network: nn.Module) -> torch.device:
    """Where a network is."""
    return next(network.parameters()).device


def logits_of(output: Tensor | NamedTuple) -> Tensor:
    """The logits, whether a network gives them alone or with more."""
    return output if isinstance(output, Tensor) else output.logits  # type: ignore[attr-defined]
