"""CCVR: the head retrained on virtual features, drawn from Gaussians of all clients' classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from isofed.functional import ClassSums, Gaussians, class_sums, gaussians_of, unit
from isofed.layout import Tensors
from isofed.methods.base import Final, Method, Visit
from isofed.methods.refit import head_of, seen_by_head, shuffled, train_head
from isofed.spec import described, number


@dataclass(frozen=True)
class CCVR(Method):
    """The head retrained on virtual features of all classes.

    After the last round every client sends, per class, the count, sum and sum of squares z z' of the global model's
    features. From the sums the server has the exact mean and covariance of each class over all clients; it draws
    ``samples`` virtual features per class and trains the head on them.

    ``relu=true`` sets what is drawn below zero to zero, as features behind a ReLU are. ``tukey`` below 1 fits the
    Gaussians to relu(z)^tukey, which is less skewed (0.5 in the paper), and raises what is drawn to 1/tukey again.
    """

    samples: int = number(500, "virtual features per class", at_least=1)
    epochs: int = number(10, "over the virtual features", at_least=1)
    lr: float = number(0.01, "of the head", above=0)
    momentum: float = number(0.9, "of the head", at_least=0, below=1)
    batch_size: int = number(64, "of the head's training", at_least=1)
    relu: bool = described(False, "cut virtual features off at zero")
    tukey: float = number(1.0, "power that makes features less skewed; 1 is none", above=0, at_most=1)

    owns: ClassVar[frozenset[str]] = frozenset({"final"})
    exchanges: ClassVar[tuple[str, ...]] = ("ccvr",)
    needs: ClassVar[tuple[str, ...]] = ("features", "linear head")
    paper: ClassVar[str] = "Luo et al. 2021, No fear of heterogeneity: classifier calibration"

    def answer(self, exchange: str, visit: Visit) -> Tensors:
        z, labels = seen_by_head(visit)
        if self.tukey < 1:
            z = z.clamp(min=0) ** self.tukey
        counts, first, second = class_sums(z, labels, visit.run.classes)
        return {"ccvr.counts": counts, "ccvr.first": first, "ccvr.second": second}

    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        gaussians = gaussians_of(ClassSums(total["ccvr.counts"], total["ccvr.first"], total["ccvr.second"]))
        z, labels = self.virtual(gaussians, final.rng)
        if final.network.normalise:
            z = unit(z)
        head = head_of(final.weights)
        z, labels = z.to(head[0]), labels.to(head[0].device)
        batches = shuffled(len(z), self.batch_size, self.epochs, final.rng)
        train_head(head, z, labels, batches, lr=self.lr, momentum=self.momentum)

    def virtual(self, gaussians: Gaussians, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Virtual features of every class that somebody has, and their labels."""
        drawn, labels = [], []
        for label in torch.nonzero(gaussians.counts)[:, 0].tolist():
            mean, covariance = gaussians.mean[label], gaussians.covariance[label]
            values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
            # The symmetric root: there is only one, whatever signs a machine gives its eigenvectors. Rounding can leave
            # an eigenvalue just below zero.
            root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
            noise = torch.from_numpy(rng.standard_normal((self.samples, len(mean)))).to(mean)
            z = mean + noise @ root
            if self.relu or self.tukey < 1:
                z = z.clamp(min=0)
            drawn.append(z ** (1 / self.tukey))
            labels.append(torch.full((self.samples,), label))
        return torch.cat(drawn), torch.cat(labels)
