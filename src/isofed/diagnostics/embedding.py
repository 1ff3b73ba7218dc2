"""Features on a plane."""

from __future__ import annotations

import torch
from torch import Tensor

from isofed import extras
from isofed.errors import NotFinite, UserError


@torch.no_grad()
def tsne(z: Tensor, perplexity: float = 30.0, seed: int = 0) -> Tensor:
    """A t-SNE of features, started from their principal components; colour it by class or by client.

    Neighbours stay neighbours; distances between far groups, and their sizes, mean nothing. FedUV (Figure 4) draws the
    features of one class by every client's model, coloured by client: with drift each client has an island of its own.
    The papers do not give their parameters.

    Args:
        z: features [samples, width]; a few thousand at most.
        perplexity: about how many neighbours count; lowered where there are fewer than three times as many samples.
        seed: of the optimisation.

    Returns:
        float64 [samples, 2].
    """
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        raise UserError(f"t-SNE needs scikit-learn: {extras.command('plot')}") from None
    if z.dim() != 2 or len(z) < 4 or z.shape[1] < 2:
        raise ValueError(f"a t-SNE needs features [samples, width] of at least four samples, not {list(z.shape)}")
    if not bool(z.isfinite().all()):
        raise NotFinite("a t-SNE needs finite features, and here some are NaN or infinite")
    perplexity = min(perplexity, (len(z) - 1) / 3)
    made = TSNE(n_components=2, perplexity=perplexity, init="pca", random_state=seed)
    return torch.from_numpy(made.fit_transform(z.cpu().double().numpy())).double()
