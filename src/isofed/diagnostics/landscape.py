"""The loss around a model, as a curve or a map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from isofed.diagnostics.hessian import Loss, Progress
from isofed.diagnostics.sampling import Data, judging, logits_of, place, trained


class Landscape(NamedTuple):
    """The mean loss at w + a d0, or w + a d0 + b d1; float64 on the CPU."""

    steps: Tensor  # [points], the values of a and of b
    loss: Tensor  # [points], or [points, points] with a by row and b by column


@torch.no_grad()
def loss_landscape(
    network: nn.Module,
    data: Data,
    directions: Sequence[Tensor],
    *,
    points: int = 41,
    reach: float = 1.0,
    loss: Loss = cross_entropy,
    batch_size: int = 1024,
    progress: Progress | None = None,
) -> Landscape:
    """The mean loss over a sample on a grid around the network's weights, which stay as they are.

    FedAlign draws 41 by 41 points of [-1, 1] along the two top eigenvectors of the Hessian. A sharp valley is narrow on
    that map. Running statistics of batch norm are kept as they are.

    Args:
        network: plain, as :func:`isofed.models.load` gives it; only parameters that require a gradient are moved.
        data: inputs and labels, as from ``fixed_sample``.
        directions: one or two flat vectors, taken as they are, such as ``hessian_top_eigenvalues(...).vectors``.
        points: along each direction; an odd number puts the network itself into the middle.
        reach: the grid goes from -reach to reach.
        loss: of logits and labels, a mean over samples.
        batch_size: of a pass.
        progress: is told after each point.
    """
    found = trained(network)
    centre = torch.cat([p.detach().flatten() for p in found.values()])
    if len(directions) not in (1, 2) or any(d.shape != centre.shape for d in directions):
        raise ValueError(f"a landscape needs one or two directions of {len(centre)} numbers each")
    if points < 1 or len(data[0]) != len(data[1]) or not len(data[0]):
        raise ValueError("a landscape needs at least one point, and inputs with as many labels")
    steps = torch.linspace(-reach, reach, points, dtype=torch.float64)
    grid = torch.cartesian_prod(*[steps] * len(directions)).view(-1, len(directions))
    along = torch.stack([d.to(centre) for d in directions])
    batches = [
        (x.to(place(network)), y.to(place(network))) for x, y in zip(*(d.split(batch_size) for d in data), strict=True)
    ]
    values = []
    with judging(network):
        for number, step in enumerate(grid, 1):
            moved = (centre + step.to(centre) @ along).split([p.numel() for p in found.values()])
            weights = {name: m.view_as(p) for (name, p), m in zip(found.items(), moved, strict=True)}
            losses = (len(y) * loss(logits_of(functional_call(network, weights, (x,))), y).double() for x, y in batches)
            values.append(sum(losses) / len(data[1]))
            if progress:
                progress(number, len(grid))
    return Landscape(steps, torch.stack(values).cpu().view([points] * len(directions)))  # type: ignore[arg-type]
