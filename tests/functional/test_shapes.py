"""Inputs of the wrong shape, and numbers that mean nothing, are refused in words rather than in those of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from isofed import functional as F

LABELS = torch.zeros(4, dtype=torch.int64)
OF_FEATURES: dict[str, Callable[[Any], Any]] = {
    "uniformity": F.uniformity,
    "hyperspherical_energy": F.hyperspherical_energy,
    "classifier_variance": F.classifier_variance,
    "decorrelation": F.decorrelation,
    "decov": F.decov,
    "structured_decov": F.structured_decov,
    "sphere_mse": lambda z: F.sphere_mse(z, torch.eye(3), LABELS),
    "model_contrast": lambda z: F.model_contrast(z, z, z),
    "calibration_sums": lambda z: F.calibration_sums(z, LABELS, 2),
    "class_sums": lambda z: F.class_sums(z, LABELS, 2),
    "class_gaussians": lambda z: F.class_gaussians(z, LABELS, 2),
}


@pytest.mark.parametrize("name", OF_FEATURES)
@pytest.mark.parametrize("shape", [(4,), (4, 3, 2, 2), ()])
def test_only_a_matrix_of_features_is_taken(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=rf"^(z|logits) must be \[(batch|samples), \w+\], not \[{'.*' if shape else ''}\]$"
    ):
        OF_FEATURES[name](torch.zeros(shape))
    OF_FEATURES[name](torch.randn(4, 3))


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan")])
def test_a_temperature_must_be_above_zero(temperature: float) -> None:
    z = torch.randn(4, 3)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        F.model_contrast(z, z, z, temperature)
    with pytest.raises(ValueError, match=r"z_previous must have the shape of z, \[4, 3\], not \[3, 3\]"):
        F.model_contrast(z, z, z[:3])
    with pytest.raises(ValueError, match="eps must be above 0, not 0"):
        F.hyperspherical_energy(z, eps=0)
