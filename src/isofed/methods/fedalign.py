"""FedAlign: the last stage distils itself, at a quarter of its width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor
from torch.nn.functional import mse_loss

from isofed.errors import UserError
from isofed.functional.distance import distance_like
from isofed.functional.lipschitz import two_stage_norms
from isofed.functional.shorten import shorten
from isofed.methods.base import Method, Step
from isofed.models.base import Network
from isofed.models.slim import channels, check_slimmable, slimmed, widens
from isofed.models.tiles import rows_of
from isofed.spec import described, number


@dataclass(frozen=True)
class FedAlign(Method):
    """The last stage distils itself, slimmed to a part of its width.

    Adds mu times the mean squared difference between the Lipschitz estimate of the last stage and that of the same
    stage at ``width`` of its channels, on an input cut to as many of its channels. The estimate is the spectral norm
    of the matrix between input and output channels, by 10 power iterations. Only the slimmed stage learns from it.
    The last stage is the last one that has convolutions or linear layers.

    As in the authors' code the term is rescaled to mu times the base loss in value (``rescale``), and gradients longer
    than ``clip`` are scaled down; the paper has neither. ``input=whole`` is the paper's input of the slimmed stage.
    """

    mu: float = number(0.45, "weight of the term; 0 is FedAvg", at_least=0)
    width: float = number(
        0.25, "of the slimmed stage, a share of its channels, rounded to a multiple of 8", above=0, below=1
    )
    rescale: bool = described(True, "give the term the value mu · base loss")
    clip: float | None = number(10.0, "the largest norm of a gradient; none for no limit", above=0)
    iterations: int = number(10, "power iterations", at_least=1)
    input: Literal["cut", "whole"] = described(
        "cut", "of the slimmed stage: as many channels as it has at this width, or whole, all of the stage before"
    )

    needs: ClassVar[tuple[str, ...]] = ("two stages",)
    paper: ClassVar[str] = "Mendieta et al. 2022, Local learning matters: rethinking data heterogeneity"

    def build(self, network: Network, classes: int, rng: np.random.Generator) -> None:
        check_slimmable(network.stages[_last_two(network)[1]], "fedalign")

    def loss(self, step: Step) -> Tensor | None:
        if not self.mu:
            return None
        before, last = _last_two(step.network)
        inside, outside = step.stages[before].detach(), step.stages[last].detach()
        seen = channels(inside.shape[1], self.width) if self.input == "cut" else inside.shape[1]
        cut = rows_of(inside[:, :seen])
        stage = step.network.stages[last]
        with slimmed(stage, self.width, cuts=step.cuts):
            slim = stage(cut)
        teacher, student = two_stage_norms((inside, outside), (cut, slim), self.iterations)
        if self.rescale:
            return distance_like(student, teacher, step.base_loss, self.mu)
        return self.mu * mse_loss(student, teacher)

    def gradient(self, step: Step) -> None:
        if self.mu and self.clip is not None:
            shorten(step.grad, self.clip)


def _last_two(network: Network) -> tuple[str, str]:
    """The last stage that can be slimmed, and the one before it.

    Where each layer is a stage of its own, as in an ``nn.Sequential``, behind it may be norms, pools and the place from
    which the head was taken: none of them has a width.
    """
    names = list(network.stages)
    wide = [n for n, name in enumerate(names) if any(widens(m) for m in network.stages[name].modules())]
    if not wide or not wide[-1]:
        raise UserError(
            "'fedalign' slims the last stage that has convolutions or linear layers and looks at what comes before it; "
            f"this network has {'nothing before that one' if wide else 'no such stage'}"
        )
    return names[wide[-1] - 1], names[wide[-1]]
