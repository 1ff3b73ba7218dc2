"""FedUV: predictions as varied and features as uniform as IID data would make them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from isofed.functional import classifier_variance, uniformity
from isofed.methods.base import Method, Step
from isofed.spec import described, number


@dataclass(frozen=True)
class FedUV(Method):
    """Predictions as varied, features as uniform as with IID data.

    Adds mu L_U + lam L_V to the local loss: L_U is the mean over pairs of exp(-||z_i - z_j||^2 / median), L_V the mean
    over classes of max(0, c - std of the class's probability over the batch), c = 1/sqrt(classes).

    ``lam=none`` is classes/4. ``mu=0`` leaves only L_V, ``lam=0`` only L_U. ``form=paper`` has twice the median;
    ``detach=true`` takes the median as a constant, so that features may also grow apart. ``c=`` sets another target.
    ``sphere``, ``diagonal`` and ``statistic=var`` are what the paper's text may also be read as.
    """

    mu: float = number(0.5, "weight of L_U; 0 leaves only L_V", at_least=0)
    lam: float | None = number(None, "weight of L_V; none is C/4, 0 leaves only L_U", at_least=0)
    form: Literal["code", "paper"] = described("code", "code divides by the median, paper by twice the median")
    detach: bool = described(
        False, "take the median as a constant, so that L_U can also be lowered by growing features"
    )
    hinge: Literal["linear", "squared", "none"] = described(
        "linear", "of L_V: linear as above, squared, or none without the maximum"
    )
    c: float | None = number(
        None, "the spread that L_V asks for; none is 1/√C, a smaller one accepts less certain answers", at_least=0
    )
    sigma: float | None = number(None, "a fixed number in place of the median", above=0)
    sphere: bool = described(False, "L_U on features scaled to length 1")
    diagonal: bool = described(False, "count each feature with itself in L_U, as 1")
    statistic: Literal["std", "var"] = described(
        "std", "spread of L_V: the standard deviation, or var, the variance, whose target is 1/C"
    )

    needs: ClassVar[tuple[str, ...]] = ("features",)
    paper: ClassVar[str] = "Son et al. 2024, FedUV: uniformity and variance for heterogeneous federated learning"

    def loss(self, step: Step) -> Tensor | None:
        lam = step.run.classes / 4 if self.lam is None else self.lam
        total = None
        if self.mu:
            kind = self.form, self.detach, self.sigma, self.mu, self.sphere, self.diagonal
            total = uniformity(step.features, *kind)
        if not lam:
            return total
        return classifier_variance(step.logits, self.statistic, self.c, self.hinge, weight=lam, onto=total)
