"""What the tests of refitted heads share: features and answers of a run, and a head trained by torch itself."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from isofed.engine.replica import Job, Replica
from isofed.federation import Federation
from isofed.functional import Gaussians
from isofed.layout import Tensors
from isofed.models import Network
from tests.engine.plain import Named, Plain

SAMPLES = 100  # of ``small``
WIDTH, CLASSES = 64, 4


def network_of(run: Federation, weights: Named) -> Network:
    network = run.world.network()
    network.load_state_dict(weights)
    return network.eval()


@torch.no_grad()
def features(run: Federation, weights: Named, part: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """What the final extractor makes of a part's samples, in their order, and their labels."""
    inputs, labels = Plain(run, torch.float32).part(part)
    return network_of(run, weights)(inputs).features.double().numpy(), labels.numpy()


def answers(run: Federation, weights: Tensor) -> list[Tensors]:
    """What each client says in the run's one exchange."""
    replica, name = Replica(run.world, torch.device("cpu")), run.settings.method.exchanges[0][0]
    jobs = [Job(run.settings.rounds + 1, c, 0.1, 0.25) for c in range(len(run.world.clients))]
    return [replica.answer(name, job, weights, {}, None) for job in jobs]


def trained_by_torch(
    head: tuple[Tensor, Tensor | None],
    z: Tensor,
    labels: Tensor,
    orders: list[Tensor],
    lr: float,
    momentum: float,
    size: int,
) -> Named:
    weight, bias = head
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).double()
    layer.load_state_dict({"weight": weight.double()} | ({} if bias is None else {"bias": bias.double()}))
    optimiser = torch.optim.SGD(layer.parameters(), lr=lr, momentum=momentum)
    for order in orders:
        for index in order.split(size):
            optimiser.zero_grad()
            cross_entropy(layer(z.double()[index]), labels[index]).backward()
            optimiser.step()
    return {f"head.{k}": v.detach() for k, v in layer.named_parameters()}


class Seen:
    """What went into the finish of a :class:`Spying` method."""

    totals: ClassVar[list[Tensors]] = []
    gaussians: ClassVar[list[Gaussians]] = []
