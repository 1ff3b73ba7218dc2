"""1x1 convolutions of few channels with a stride: the gradients of float64, where PyTorch's own ends the process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from isofed.models.pointwise import Pointwise, seen
from isofed.models.quick import quicken
from isofed.models.slim import slimmed


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("padding", [0, "valid"])
@pytest.mark.parametrize(("inside", "outside", "side", "stride"), [(8, 16, 64, 2), (4, 8, 57, 2), (2, 6, 40, (1, 3))])
def test_values_and_gradients_are_those_of_float64(
    inside: int, outside: int, side: int, stride: Any, padding: Any, groups: int
) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, padding, groups=groups))
    quicken(network)
    (layer,) = network
    assert type(layer) is Pointwise
    x = torch.randn(8, inside, side, side).contiguous(memory_format=torch.channels_last).requires_grad_()
    leaves = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]  # type: ignore[union-attr]
    wanted = conv2d(leaves[0], leaves[1], leaves[2], stride, groups=groups)
    found = network(x)
    g = torch.randn_like(found)
    gradients = torch.autograd.grad(found, [x, *layer.parameters()], g)
    for a, b in zip([found, *gradients], [wanted, *torch.autograd.grad(wanted, leaves, g.double())], strict=True):
        assert a.shape == b.shape and (a.double() - b).norm() < 1e-5 * b.norm()


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(16, 4, 1, 2),
        nn.Conv2d(8, 4, 1),
        nn.Conv2d(8, 4, 3, 2),
        nn.Conv2d(8, 4, 1, 2, padding=1),
        nn.Conv2d(8, 4, 1, padding="same"),
    ],
    ids=str,
)
def test_others_are_left_to_pytorch(layer: nn.Conv2d) -> None:
    padding = (0, 0) if isinstance(layer.padding, str) else layer.padding
    x = torch.randn(2, layer.in_channels, 8, 8)
    assert seen(x, layer.weight, layer.stride, padding) is None
    wanted = layer(x)
    quicken(nn.Sequential(layer))
    assert torch.equal(layer(x), wanted)


def test_what_is_changed_later_is_heeded() -> None:
    layer, x = nn.Conv2d(3, 4, 1, 2), torch.randn(2, 3, 6, 6)
    quicken(nn.Sequential(layer))

    def same(given: Tensor) -> bool:
        return torch.allclose(layer(given), conv2d(given, layer.weight, layer.bias, layer.stride, layer.padding))

    assert same(x) and same(x[0])
    layer.padding = (1, 1)
    assert same(x)
    with pytest.raises(RuntimeError, match="3D .unbatched. or 4D .batched. input"):
        layer(torch.randn(6, 6))


def test_so_does_a_slimmed_pass() -> None:
    """Which has few channels where the whole network has more."""
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 32, 1, 2)
    x = torch.randn(8, 8, 64, 64).contiguous(memory_format=torch.channels_last)
    with slimmed(nn.Sequential(layer), 0.5):
        (found,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
    weight = layer.weight[:16, :8].detach().double().requires_grad_()
    y = conv2d(x.double(), weight, layer.bias[:16].double(), 2)  # type: ignore[index]
    (wanted,) = torch.autograd.grad(y.square().sum(), weight)
    assert (found[:16, :8].double() - wanted).norm() < 1e-5 * wanted.norm() and not found[16:].any()
