"""FedDecorr: features that do not collapse onto a few directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from isofed.functional import decorrelation
from isofed.methods.base import Method, Step
from isofed.spec import described, number


@dataclass(frozen=True)
class FedDecorr(Method):
    """Decorrelated features, against dimensional collapse.

    Adds beta times the mean squared correlation between different features over the batch, scaled as in the authors'
    code, which is about batch-size times as strong as the paper's formula. ``form=paper`` is the latter; there 0.1
    times the batch size is the beta that matches.
    """

    beta: float = number(0.1, "weight of L_D", at_least=0)
    form: Literal["code", "paper"] = described(
        "code", "code or paper, see above; in the paper's form 0.1 · N is the beta that matches"
    )

    needs: ClassVar[tuple[str, ...]] = ("features",)
    paper: ClassVar[str] = "Shi et al. 2023, Towards understanding and mitigating dimensional collapse"

    def loss(self, step: Step) -> Tensor | None:
        return decorrelation(step.features, self.form, weight=self.beta) if self.beta else None
