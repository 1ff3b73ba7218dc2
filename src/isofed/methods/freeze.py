"""Freeze and FedBABU: a classifier that the federation does not train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from isofed.layout import Policy, Tensors
from isofed.methods.base import Final, Method, Visit
from isofed.methods.refit import accuracy_by_class, head_of, seen_by_head, train_head
from isofed.models.base import Network
from isofed.spec import described, number


@dataclass(frozen=True)
class Freeze(Method):
    """The classifier stays as it was initialised.

    The head is the same at all clients, never trained, decayed or sent again; the rest is FedAvg. ``reset=true`` is
    what FedUV's released code does under this name: clients train the head, but every visit starts from the first one
    and it is never averaged.
    """

    reset: bool = described(False, "train the head in each visit, from the first one, and throw it away")

    owns: ClassVar[frozenset[str]] = frozenset({"head"})
    paper: ClassVar[str] = "Son et al. 2024, FedUV: uniformity and variance for heterogeneous federated learning"

    def build(self, network: Network, classes: int, rng: np.random.Generator) -> None:
        if not self.reset:
            network.head.requires_grad_(False)

    def share(self, network: Network) -> dict[str, Policy]:
        if not self.reset:
            return {}
        return {f"head.{name}": Policy.RESET for name, _ in network.head.named_parameters()}


@dataclass(frozen=True)
class FedBABU(Method):
    """Only the body is federated; clients fine-tune the head at the end.

    The head stays as it was initialised. After the last round each client trains it for ``epochs`` epochs on its own
    samples, with the body as it is; the record then has the accuracy before and after as the mean over clients,
    classes weighted as they occur at the client. The global model itself keeps the initial head. Momentum and batch
    size are the run's, and so is the learning rate with ``lr=none``; there is no weight decay.
    """

    epochs: int = number(5, "of the fine-tuning", at_least=1)
    lr: float | None = number(
        None,
        "of the fine-tuning; none is the lr of the run as it was set, whatever lr_schedule has made of it since",
        above=0,
    )

    owns: ClassVar[frozenset[str]] = frozenset({"head"})
    exchanges: ClassVar[tuple[str, ...]] = ("personal",)
    needs: ClassVar[tuple[str, ...]] = ("features", "linear head")
    paper: ClassVar[str] = "Oh et al. 2022, FedBABU: toward enhanced representation for federated image classification"

    def build(self, network: Network, classes: int, rng: np.random.Generator) -> None:
        network.head.requires_grad_(False)

    def answer(self, exchange: str, visit: Visit) -> Tensors:
        weight, bias = head_of(dict(visit.network.named_parameters()))
        own = (weight.detach().clone(), None if bias is None else bias.detach().clone())
        tests, answers = seen_by_head(visit, tests=True)
        before = accuracy_by_class(own, tests, answers)
        z, labels = seen_by_head(visit)
        # The visit's generator of torch is seeded by run and client.
        batches = (b for _ in range(self.epochs) for b in torch.randperm(len(z)).split(visit.run.batch_size))
        lr = visit.lr if self.lr is None else self.lr
        train_head(own, z, labels, batches, lr=lr, momentum=visit.run.momentum)
        after = accuracy_by_class(own, tests, answers)
        judged = ~before.isnan()  # classes that the test part has
        shares = torch.where(judged, visit.label_counts, 0).double()
        known = shares.sum() > 0
        shares = shares / shares.sum().clamp(min=1)
        return {
            "before": (shares * before.nan_to_num()).sum().view(1),
            "after": (shares * after.nan_to_num()).sum().view(1),
            "clients": known.double().view(1),
        }

    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        clients = total["clients"].clamp(min=1)
        final.report["personal_accuracy_before"] = float(total["before"] / clients)
        final.report["personal_accuracy"] = float(total["after"] / clients)
