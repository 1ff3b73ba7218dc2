"""A network of your own as isofed wants it: an encoder that gives features, and a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from isofed.draws import torch_seeded
from isofed.errors import UserError
from isofed.models.base import Network
from isofed.models.residual import watched
from isofed.traces import place_of


class _Whole:
    """A network that was cut before its head, as it was before."""

    def __init__(self, module: nn.Module, name: str) -> None:
        owner, _, self._attribute = name.rpartition(".")
        self.module, self.name, self._owner = module, name, module.get_submodule(owner)
        self.head = module.get_submodule(name)
        self._gap = nn.Identity()
        setattr(self._owner, self._attribute, self._gap)

    def __call__(self, x: Tensor) -> Any:
        setattr(self._owner, self._attribute, self.head)
        try:
            return self.module(x)
        finally:
            setattr(self._owner, self._attribute, self._gap)


class _Adapted(Network):
    """A network of the user's; until it has been looked at, it knows what it was made of."""

    whole: _Whole | None = None


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
    its last layer, ``adapt(model, "fc")`` or ``adapt(model, "classifier.1")``. That layer must give the logits: nothing
    may come after it. An ``nn.Sequential`` as encoder keeps its parts as stages, which is what FedAlign looks at.

    Args:
        module: the encoder, or the whole network with its head inside.
        head: the head, or where in ``module`` it is.
        width: of the features, where the head is not a linear layer that says so.

    >>> net = adapt(nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3)), "3")
    >>> net.width, list(net.stages)
    (5, ['0', '1', '2', '3'])
    """
    whole = None
    if isinstance(head, str):
        whole = _cut(module, head)
        head = whole.head
    if width is None:
        if not isinstance(head, nn.Linear):
            raise UserError("the head is not a linear layer: say how wide its input is, adapt(..., width=512)")
        width = head.in_features
    network = _Adapted(_stages(module), _Vectors(), head, width)
    network.whole = whole
    return network


def _stages(module: nn.Module) -> dict[str, nn.Module]:
    """The parts of a network that does nothing but one after another; the same one may stand in several places."""
    plain = type(module).forward is nn.Sequential.forward and "forward" not in vars(module) and not watched(module)
    return dict(module._modules) if plain and module._modules else {"encoder": module}  # type: ignore[arg-type]


def _cut(module: nn.Module, name: str) -> _Whole:
    """Take the layer of this name out of a network; what is left gives the features."""
    known = dict(module.named_modules())
    if not name or name not in known:
        last = list(known)[-1]
        raise UserError(f"the network has no layer '{name}'; its last one is '{last}'")
    return _Whole(module, name)


def check_outputs(said: str, network: Network, shape: tuple[int, int, int], classes: int) -> None:
    """Refuse a network that fails on pictures of this shape, or whose outputs are not one number a class.

    One that was adapted must also give what it gave before. ``said`` is what a message calls it.
    """
    logits = _seen(said, network, network, shape).logits
    if not isinstance(logits, Tensor) or logits.shape != (2, classes):
        given = "x".join(map(str, logits.shape[1:])) if isinstance(logits, Tensor) else "no"
        raise UserError(
            f"{said} gives {given} outputs for a picture, and there are {classes} classes: "
            f"give its last layer as many outputs as the function is told in `classes`"
        )
    if isinstance(network, _Adapted) and network.whole is not None:
        whole, network.whole = network.whole, None
        before = _seen(said, network, whole, shape)
        near = 1e-4 * float(logits.abs().max())
        same = isinstance(before, Tensor) and before.shape == logits.shape
        if not same or not torch.allclose(before, logits, rtol=1e-4, atol=near):
            raise UserError(
                f"{said} does something after the layer '{whole.name}', which adapt would not: the named layer "
                "must give the logits; leave a softmax out, and put a scaling before that layer"
            )


def _seen(said: str, network: nn.Module, forward: Callable[[Tensor], Any], shape: tuple[int, int, int]) -> Any:
    """What is given for two pictures, the same each time."""
    training = network.training
    weight = next(network.parameters(), torch.empty(0))
    pictures = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(weight.device)
    try:
        with torch.no_grad(), torch_seeded(0, "look"):
            network.eval()
            return forward(pictures)
    except Exception as error:
        why = f"{said} fails on a picture of the shape {shape}: {type(error).__name__}: {error}"
        raise UserError(why + place_of(error)) from error
    finally:
        network.train(training)
