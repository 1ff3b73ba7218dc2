"""MOON: features like the global model's, unlike the client's own last ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from isofed.functional import model_contrast
from isofed.layout import Tensors
from isofed.methods.base import Method, Run, Step, Visit
from isofed.models.base import Network
from isofed.models.resnet import projection_head
from isofed.spec import described, number

WIDTH = 256  # of MOON's projected features


@dataclass(frozen=True)
class Moon(Method):
    """Features like the global model's, unlike the client's last.

    Adds mu times the batch mean of -log(e^(g/t) / (e^(g/t) + e^(p/t))), with g and p the cosines of a sample's
    features with those that the received model and the client's model at the end of its last visit give. Both are
    frozen and in eval mode. In a client's first visit there is no last model, and no term.

    ``head=auto`` puts MOON's projection head (linear, ReLU, linear to 256) before the classifier unless the network
    has a projector; ``on`` always does, ``none`` never. Its hidden layer is as wide as the features, or ``hidden``.

    FedAlign's code has ``frozen=train``: batch norm of the two frozen models uses the batch; and ``first=initial``: in
    a client's first visit the model that the run began with is the last one. FedDecorr's has ``first=random``, a model
    with initial weights of the client's own.
    """

    mu: float = number(1.0, "weight of the term", at_least=0)
    temperature: float = number(0.5, "t; the lower, the sharper", above=0)
    head: Literal["auto", "on", "none"] = described(
        "auto", "the projection head: auto unless the network has a projector, on always, none never"
    )
    hidden: int | None = number(
        None,
        "width of the projection head's hidden layer; none is that of the features, FedDecorr's code has 640 for 1,280",
        at_least=1,
    )

    frozen: Literal["eval", "train"] = described(
        "eval", "batch norm of the frozen models: eval uses what is stored, train the batch"
    )
    first: Literal["none", "initial", "random"] = described(
        "none",
        "in a client's first visit: no term; or as the last model initial, the one that the run began with, or random, "
        "initial weights drawn for this client",
    )

    needs: ClassVar[tuple[str, ...]] = ("features",)
    copies: ClassVar[tuple[str, ...]] = ("moon.global", "moon.previous")
    paper: ClassVar[str] = "Li et al. 2021, Model-contrastive federated learning"

    def build(self, network: Network, classes: int, rng: np.random.Generator) -> None:
        if self.head == "none" or (self.head == "auto" and network.projector is not None):
            return
        added = projection_head(network.width, self.hidden, WIDTH)
        network.projector = added if network.projector is None else nn.Sequential(network.projector, added)
        network.head, network.width = nn.Linear(WIDTH, classes), WIDTH

    def client_state(self, run: Run) -> Tensors:
        return {
            "moon.model": torch.zeros(run.layout.total, device=run.device),
            "moon.known": torch.zeros(1, device=run.device),  # whether there is such a model
        }

    def begin(self, visit: Visit) -> None:
        visit.copies["moon.global"].copy_(visit.model)
        # Without a last one any model will do whose features are numbers: its term counts for nothing.
        other = visit.initial if self.first == "initial" else visit.model
        if self.first == "random" and visit.first:
            other = visit.another()
        visit.copies["moon.previous"].copy_(
            torch.where(visit.state["moon.known"] > 0, visit.state["moon.model"], other)
        )

    def loss(self, step: Step) -> Tensor | None:
        if not self.mu:
            return None
        copies = [step.copies[name] for name in self.copies]
        if self.frozen == "train":
            for layer in (layer for copy in copies for layer in copy.modules()):
                if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                    layer.train()  # what it stores is written over before the next visit
        with torch.no_grad():
            received, previous = (copy(step.inputs).features for copy in copies)
        contrast = self.mu * model_contrast(step.features, received, previous, self.temperature)
        return step.state["moon.known"][0] * contrast if self.first == "none" else contrast

    def end(self, visit: Visit) -> None:
        visit.state["moon.model"].copy_(visit.model)
        visit.state["moon.known"].fill_(1)
