"""UniVarFL: FedUV with hyperspherical energy, and variance in place of standard deviation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from isofed.functional import classifier_variance, hyperspherical_energy
from isofed.methods.base import Method, Step
from isofed.spec import described, number


@dataclass(frozen=True)
class UniVarFL(Method):
    """FedUV with hyperspherical energy, and variance for deviation.

    Adds mu L_HE + lam L_V to the local loss: L_HE is the mean over pairs i != j of 1 / (1 - z_i . z_j + eps) on
    features of length 1, L_V the mean over classes of max(0, 1/classes - variance of the class's probability).

    The paper gives neither mu, lam nor eps: mu and lam (``none`` is classes/4) are FedUV's. ``diagonal=true`` counts
    each feature with itself, as the paper writes the sum, which adds a constant.
    """

    mu: float = number(0.5, "weight of L_HE; 0 leaves only L_V", at_least=0)
    lam: float | None = number(None, "weight of L_V; none is C/4, 0 leaves only L_HE", at_least=0)
    eps: float = number(
        0.01, "keeps the energy of two equal features finite; the larger, the less close neighbours count", above=0
    )
    diagonal: bool = described(
        False, "count each feature with itself, as the paper writes the sum, which adds a constant"
    )
    hinge: Literal["linear", "squared", "none"] = described(
        "linear", "of L_V: linear as above, squared, or none without the maximum"
    )
    c: float | None = number(
        None, "the variance that L_V asks for; none is 1/C, (C-1)/C² that of a biased estimate", at_least=0
    )

    needs: ClassVar[tuple[str, ...]] = ("features",)
    paper: ClassVar[str] = "Gupta et al. 2025, UniVarFL: uniformity and variance regularized federated learning"

    def loss(self, step: Step) -> Tensor | None:
        lam = step.run.classes / 4 if self.lam is None else self.lam
        total = hyperspherical_energy(step.features, self.eps, self.diagonal, weight=self.mu) if self.mu else None
        if not lam:
            return total
        return classifier_variance(step.logits, "var", self.c, self.hinge, weight=lam, onto=total)
