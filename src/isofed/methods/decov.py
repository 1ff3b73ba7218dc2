"""DeCov and Structured-DeCov: features with small covariances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from isofed.functional import decov, structured_decov
from isofed.methods.base import Method, Step
from isofed.spec import number


@dataclass(frozen=True)
class DeCov(Method):
    """Small covariances between features.

    Adds weight times half the sum of squared covariances between different features over the batch. It depends on the
    features' scale and number, so tune the weight: 1e-4 to 1e-1.
    """

    weight: float = number(0.001, "of the term; tune it for each network, between 0.0001 and 0.1", at_least=0)

    needs: ClassVar[tuple[str, ...]] = ("features",)
    paper: ClassVar[str] = (
        "Cogswell et al. 2016, Reducing overfitting in deep networks by decorrelating representations"
    )

    def loss(self, step: Step) -> Tensor | None:
        return self.weight * decov(step.features) if self.weight else None


@dataclass(frozen=True)
class StructuredDeCov(Method):
    """Small covariances between groups of features.

    As ``decov``, but features within a group of ``group`` neighbours may repeat each other.
    """

    weight: float = number(0.001, "of the term; tune it for each network, between 0.0001 and 0.1", at_least=0)
    group: int = number(8, "neighbouring features that form a group; 1 is decov", at_least=1)

    needs: ClassVar[tuple[str, ...]] = ("features",)
    paper: ClassVar[str] = "Xiong et al. 2016, Regularizing deep CNNs with a structured decorrelation constraint"

    def loss(self, step: Step) -> Tensor | None:
        return self.weight * structured_decov(step.features, self.group) if self.weight else None
