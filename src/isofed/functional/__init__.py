"""The formulas of the methods as pure functions, usable in anyone's training loop.

Features are ``z`` [batch, width], logits [batch, classes]. Every loss is a scalar, is computed in at least float32
(also under autocast and from half-precision inputs; only where torch is told to multiply matrices in TF32 does it do
so here, distances and cosines excepted), and is finite with finite gradients where there is nothing to measure: one
sample, constant features, a class that nobody predicts. None has a shape that depends on values, so all can be
captured in a CUDA graph.
"""

from isofed.functional.calibration import Calibration, calibration_sums, solve_calibration
from isofed.functional.contrast import model_contrast
from isofed.functional.decorrelation import decorrelation, decov, structured_decov
from isofed.functional.gaussians import (
    ClassSums,
    Gaussians,
    class_gaussians,
    class_sums,
    gaussians_of,
    merge_gaussians,
)
from isofed.functional.lipschitz import spectral_norm, stage_norm, transmitting_matrix
from isofed.functional.sphere import orthonormal_classifier, sphere_mse, unit
from isofed.functional.steps import normalising_steps
from isofed.functional.uniformity import hyperspherical_energy, uniformity
from isofed.functional.variance import classifier_variance

__all__ = [
    "Calibration",
    "ClassSums",
    "Gaussians",
    "calibration_sums",
    "class_gaussians",
    "class_sums",
    "classifier_variance",
    "decorrelation",
    "decov",
    "gaussians_of",
    "hyperspherical_energy",
    "merge_gaussians",
    "model_contrast",
    "normalising_steps",
    "orthonormal_classifier",
    "solve_calibration",
    "spectral_norm",
    "sphere_mse",
    "stage_norm",
    "structured_decov",
    "transmitting_matrix",
    "uniformity",
    "unit",
]
