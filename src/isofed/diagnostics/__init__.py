"""What a run costs, and what heterogeneity does to a model: measurements as plain functions of tensors and networks.

Nothing here knows about runs. A function takes tensors, or a network and a fixed sample of data, and gives numbers in
float64 with names; those that estimate say how sure they are. All are deterministic.
"""

from isofed.diagnostics.alignment import Alignment, classifier_alignment
from isofed.diagnostics.calibration import Calibration, calibration
from isofed.diagnostics.curvature import (
    Diagonal,
    Match,
    Trace,
    hessian_diagonal,
    hessian_match,
    hessian_top_eigenvalues,
    hessian_trace,
)
from isofed.diagnostics.drift import Drift, client_drift
from isofed.diagnostics.embedding import tsne
from isofed.diagnostics.hessian import Eigenvalues
from isofed.diagnostics.labels import Labels, label_distribution
from isofed.diagnostics.landscape import Landscape, loss_landscape
from isofed.diagnostics.linear import Collapse, linear_collapse, singular_speeds
from isofed.diagnostics.sampling import Observed, fixed_sample, observe
from isofed.diagnostics.spectra import (
    Spectrum,
    classifier_spectrum,
    representation_spectrum,
    significant,
    singular_spread,
    spectrum_gap,
)

__all__ = [
    "Alignment",
    "Calibration",
    "Collapse",
    "Diagonal",
    "Drift",
    "Eigenvalues",
    "Labels",
    "Landscape",
    "Match",
    "Observed",
    "Spectrum",
    "Trace",
    "calibration",
    "classifier_alignment",
    "classifier_spectrum",
    "client_drift",
    "fixed_sample",
    "hessian_diagonal",
    "hessian_match",
    "hessian_top_eigenvalues",
    "hessian_trace",
    "label_distribution",
    "linear_collapse",
    "loss_landscape",
    "observe",
    "representation_spectrum",
    "significant",
    "singular_speeds",
    "singular_spread",
    "spectrum_gap",
    "tsne",
]
