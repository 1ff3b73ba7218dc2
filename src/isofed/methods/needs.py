"""What a method can ask of a network, checked before any work."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isofed.errors import UserError, unknown
from isofed.models.base import Network
from isofed.models.residual import residual_blocks

NEEDS = ("features", "linear head", "two stages", "residual blocks")


def check_need(name: str, need: str, network: Network) -> None:
    """Refuse a network that does not have what the method called ``name`` works on."""
    if need == "features":
        if not _has_features(network):
            raise UserError(f"'{name}' works on features, one vector per sample, and this network gives none")
    elif need == "linear head":
        if not isinstance(network.head, nn.Linear):
            kind = type(network.head).__name__
            raise UserError(f"'{name}' needs a network whose head is one linear layer; this one has a {kind}")
    elif need == "two stages":
        if len(network.stages) < 2:
            raise UserError(f"'{name}' compares the last two stages, and this network has {len(network.stages)}")
    elif need == "residual blocks":
        if not residual_blocks(network):
            raise UserError(
                f"'{name}' drops residual blocks, and this network has none; use a ResNet, like resnet20, or build the "
                "blocks of your own with isofed.models.residual.Residual"
            )
    else:
        raise unknown(f"thing that '{name}' could have in `needs` called", need, NEEDS)


def _has_features(network: Network) -> bool:
    """Whether a pass gives one vector per sample. A network of unknown input is believed."""
    if network.shape is None:
        return True
    before = network.training
    try:
        with torch.no_grad():
            pictures = torch.zeros(2, *network.shape, device=next(network.parameters()).device)
            given = network.eval()(pictures).features
    except Exception as error:
        raise UserError(f"the network fails on a picture of its own shape {network.shape}: {error}") from error
    finally:
        network.train(before)
    if isinstance(given, Tensor) and given.dim() == 2 and given.shape[1] != network.width:
        raise UserError(f"the network says that its features are {network.width} wide, and gives {given.shape[1]}")
    return isinstance(given, Tensor) and given.dim() == 2
