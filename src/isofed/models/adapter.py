"""A network of your own as isofed wants it: an encoder that gives features, and a head."""

from __future__ import annotations

from torch import Tensor, nn

from isofed.errors import UserError
from isofed.models.base import Network


class _Vectors(nn.Module):
    """One vector per sample, whatever the encoder gives: feature maps are averaged over their pixels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) if x.dim() == 4 else x.flatten(1)


def adapt(
    module: nn.Module,
    head: nn.Module | str,
    *,
    width: int | None = None,
) -> Network:
    """Make a :class:`Network` of any ``nn.Module``.

    Either give the encoder and the head apart, ``adapt(encoder, nn.Linear(512, 10))``, or the whole and the name of
    its last layer, ``adapt(model, "fc")`` or ``adapt(model, "classifier.1")``. An ``nn.Sequential`` as encoder keeps
    its parts as stages, which is what FedAlign looks at.

    Args:
        module: the encoder, or the whole network with its head inside.
        head: the head, or where in ``module`` it is.
        width: of the features, where the head is not a linear layer that says so.

    >>> net = adapt(nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3)), "3")
    >>> net.width, list(net.stages)
    (5, ['0', '1', '2', '3'])
    """
    if isinstance(head, str):
        module, head = _cut(module, head)
    if width is None:
        if not isinstance(head, nn.Linear):
            raise UserError("the head is not a linear layer: say how wide its input is, adapt(..., width=512)")
        width = head.in_features
    stages = dict(module.named_children()) if isinstance(module, nn.Sequential) and len(module) else {"encoder": module}
    return Network(stages, _Vectors(), head, width)


def _cut(module: nn.Module, name: str) -> tuple[nn.Module, nn.Module]:
    """Take the layer of this name out of a network; what is left gives the features."""
    known = dict(module.named_modules())
    if not name or name not in known:
        last = list(known)[-1]
        raise UserError(f"the network has no layer '{name}'; its last one is '{last}'")
    head = known[name]
    owner, _, attribute = name.rpartition(".")
    setattr(known[owner], attribute, nn.Identity())
    return module, head
