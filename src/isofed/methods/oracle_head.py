"""The head retrained on the pooled real features: what calibration is meant to come close to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from isofed.layout import Tensors
from isofed.methods.base import Final, Method, Visit
from isofed.methods.refit import head_of, seen_by_head, shuffled, train_head
from isofed.spec import number

FEWEST = 2000  # steps: a few epochs of few samples would leave the head where it was


@dataclass(frozen=True)
class OracleHead(Method):
    """The head retrained on all clients' real features: simulation only.

    After the last round the features of all samples are pooled, which no real federation could do, and the head is
    trained on them with cross-entropy, for ``epochs`` epochs and at least 2,000 steps. It says how much of what is
    missing is the head's fault.
    """

    epochs: int = number(10, "over all samples", at_least=1)
    lr: float = number(0.01, "of the head", above=0)
    momentum: float = number(0.9, "of the head", at_least=0, below=1)
    batch_size: int = number(64, "of the head's training", at_least=1)

    owns: ClassVar[frozenset[str]] = frozenset({"final"})
    exchanges: ClassVar[tuple[str, ...]] = ("oracle_head",)
    raw_answers: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("features", "linear head")
    paper: ClassVar[str] = "Dong et al. 2022, SphereFed: hyperspherical federated learning (sanity check of Table 4)"

    def answer(self, exchange: str, visit: Visit) -> Tensors:
        z, labels = seen_by_head(visit)
        return {"oracle.features": z, "oracle.labels": labels}

    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        head = head_of(final.weights)
        z, labels = total["oracle.features"].to(head[0]), total["oracle.labels"].long()
        batches = shuffled(len(z), self.batch_size, self.epochs, final.rng, at_least=FEWEST)
        train_head(head, z, labels, batches, lr=self.lr, momentum=self.momentum)
