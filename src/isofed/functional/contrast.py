"""Agreement with one model and not with another: MOON."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

from isofed.functional.precision import full_precision, rows
from isofed.functional.sphere import unit


@full_precision
def model_contrast(z: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float = 0.5) -> Tensor:
    """MOON's contrastive loss: features should resemble the global model's and not the client's own earlier ones.

    MOON (Li et al. 2021), Eq. 3: the batch mean of -log(e^(g/t) / (e^(g/t) + e^(p/t))), with g and p the cosines of z
    with the features of the global and of the previous model. Where these two agree it is log 2.

    Args:
        z: features of the model in training [batch, width].
        z_global: of the global model on the same inputs; give them without a gradient.
        z_previous: of the client's previous model, likewise.
        temperature: t.

    >>> import torch; z = torch.randn(4, 3)
    >>> round(float(model_contrast(z, z_global=z, z_previous=z)), 6)
    0.693147
    """
    rows("z", z)
    for what, other in (("z_global", z_global), ("z_previous", z_previous)):
        if other.shape != z.shape:
            raise ValueError(f"{what} must have the shape of z, {list(z.shape)}, not {list(other.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    z = unit(z)
    to_global, to_previous = (z * unit(z_global)).sum(1), (z * unit(z_previous)).sum(1)
    return softplus((to_previous - to_global) / temperature).mean()
