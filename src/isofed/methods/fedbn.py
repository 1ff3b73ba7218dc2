"""FedBN: batch norm stays at home."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from isofed.errors import UserError
from isofed.layout import Policy
from isofed.methods.base import Method
from isofed.models.base import Network


@dataclass(frozen=True)
class FedBN(Method):
    """Batch norm stays with its client.

    Scales, shifts and running statistics of batch norm are never sent; everything else is averaged.
    Batch norm is found by module type, so that no layer is missed for its name. Each client is judged by its own
    model: on its own domain's test pictures where the data have domains, otherwise on the whole test part.
    """

    paper: ClassVar[str] = "Li et al. 2021, FedBN: federated learning on non-IID features via local batch normalization"

    def share(self, network: Network) -> dict[str, Policy]:
        own = {
            f"{path}.{name}": Policy.HOME
            for path, module in network.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
            for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            if tensor.is_floating_point()
        }
        if not own:
            raise UserError(
                "fedbn keeps batch norm at home, and this network has none; use norm=batch or another model"
            )
        return own
