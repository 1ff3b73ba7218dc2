"""Flattening hands gradients back as the pictures lie, with the numbers of PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian

from isofed.models.flatten import Flatten


def gradient(layer: nn.Module, x: Tensor) -> Tensor:
    """What arrives at the layer before."""
    inside = x.clone().requires_grad_() * 1
    (found,) = torch.autograd.grad(layer(inside).mul(torch.arange(36.0)).square().sum(), inside)
    return found


@pytest.mark.parametrize("format_", [torch.channels_last, torch.contiguous_format])
def test_a_gradient_lies_as_its_input_does_and_has_the_same_bits(format_: torch.memory_format) -> None:
    x = torch.randn(2, 4, 3, 3).contiguous(memory_format=format_)
    ours, own = gradient(Flatten(), x), gradient(nn.Flatten(), x)
    assert torch.equal(Flatten()(x), nn.Flatten()(x)) and torch.equal(ours, own)
    assert ours.stride() == x.stride()
    assert own.is_contiguous()  # which is why there is a layer of our own


def test_a_second_derivative_goes_through_it() -> None:
    x = torch.randn(1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
    found = hessian(lambda y: Flatten()(y * 1).pow(3).sum(), x).reshape(8, 8)
    assert torch.allclose(found, torch.diag(6 * x.flatten()))
