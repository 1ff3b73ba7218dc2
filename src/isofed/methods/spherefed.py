"""SphereFed: a fixed orthonormal classifier on normalised features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot

from isofed.errors import UserError
from isofed.functional import orthonormal_classifier
from isofed.layout import Tensors
from isofed.methods.base import Final, Method, Step, Visit
from isofed.methods.ffc import ffc_solve, ffc_sums
from isofed.models.base import Network
from isofed.spec import described, number

if TYPE_CHECKING:
    from isofed.config import Settings


@dataclass(frozen=True)
class SphereFed(Method):
    """A fixed orthonormal classifier on features of length 1.

    All clients share a classifier with orthonormal rows that is never trained, decayed or sent again, and minimise the
    mean squared error between W z/||z|| and the one-hot label. After the last round the head is refitted in closed
    form (``calibrate=ffc``, see ``ffc``; ``ridge`` is its). Gradients are small, and smaller the more classes there
    are: use a larger ``lr``, 0.1 to 3 for ten of them and 3 to 30 for a hundred.

    Its ablations: ``head=random`` is frozen as the network made it, ``head=trained`` is trained; ``normalise=false``
    leaves features as they are; ``loss=ce`` is cross-entropy of the logits divided by ``temperature`` (``none``: 0.1
    with normalised features, otherwise 1).
    """

    head: Literal["orthonormal", "random", "trained"] = described(
        "orthonormal", "the fixed classifier; random is frozen as the network made it, trained is trained"
    )
    normalise: bool = described(True, "scale features to length 1 before the head")
    loss_: Literal["mse", "ce"] = described(
        "mse", "squared error as above, or ce: cross-entropy of the logits divided by temperature"
    )
    temperature: float | None = number(
        None, "only with loss=ce; none is 0.1 with normalised features, otherwise 1", above=0
    )
    calibrate: Literal["ffc", "none"] = described("ffc", "refit the head at the end as ffc does, or none")
    ridge: float = number(1e-6, "of the refit, as for ffc", at_least=0)

    needs: ClassVar[tuple[str, ...]] = ("features", "linear head")
    leaves: ClassVar[dict[str, str]] = {"final": "calibrate=none"}
    paper: ClassVar[str] = "Dong et al. 2022, SphereFed: hyperspherical federated learning"

    def check(self, settings: Settings) -> None:
        if self.temperature is not None and self.loss_ == "mse":
            raise UserError("temperature of method 'spherefed' belongs to loss=ce; with loss=mse leave it out")

    @property
    def owns(self) -> frozenset[str]:
        return frozenset({"head", "base"} | ({"final"} if self.calibrate == "ffc" else set()))

    @property
    def exchanges(self) -> tuple[str, ...]:
        return ("ffc",) if self.calibrate == "ffc" else ()

    def build(self, network: Network, classes: int, rng: np.random.Generator) -> None:
        network.normalise = self.normalise
        if self.head == "orthonormal":
            network.head = nn.Linear(network.width, classes, bias=False)
            generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
            with torch.no_grad():
                network.head.weight.copy_(orthonormal_classifier(classes, network.width, generator))
        if self.head != "trained":
            network.head.requires_grad_(False)

    def base(self, step: Step) -> Tensor:
        if self.loss_ == "ce":
            temperature = (0.1 if self.normalise else 1.0) if self.temperature is None else self.temperature
            return cross_entropy(step.logits / temperature, step.targets)
        wanted = one_hot(step.labels, step.run.classes).float() if step.soft is None else step.soft
        return mse_loss(step.logits, wanted)

    def answer(self, exchange: str, visit: Visit) -> Tensors:
        return ffc_sums(visit, normalise=False)  # what the head sees is normalised already, where it is to be

    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        ffc_solve(total, final, self.ridge)
