"""A distance rescaled to the value of another loss, against the same by hand."""

from __future__ import annotations

import pytest
import torch

from isofed.functional.distance import distance_like

_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
DEVICES = ["cpu", pytest.param("cuda", marks=_GPU)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 10, 64, 100])
def test_value_and_gradient_by_hand(device: str, count: int) -> None:
    draws = torch.Generator().manual_seed(count)
    z, target = (torch.randn(count, generator=draws) for _ in range(2))
    here = z.to(device).requires_grad_()
    value = distance_like(here, target.to(device), torch.tensor(2.5, device=device), weight=0.45)
    (gradient,) = torch.autograd.grad(3 * value, here, create_graph=count == 10)
    squares = [(a - b) ** 2 for a, b in zip(z.tolist(), target.tolist(), strict=True)]
    assert float(value.detach()) == pytest.approx(0.45 * 2.5, rel=1e-6)
    factor = 3 * 0.45 * 2.5 * 2 / sum(squares)  # the mean's count is in the distance and in its gradient
    wanted = [factor * (a - b) for a, b in zip(z.tolist(), target.tolist(), strict=True)]
    torch.testing.assert_close(gradient.detach().cpu(), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_no_distance_is_no_loss(device: str) -> None:
    z = torch.ones(4, device=device, requires_grad=True)
    value = distance_like(z, torch.ones(4, device=device), torch.tensor(2.0, device=device))
    (gradient,) = torch.autograd.grad(value, z)
    assert float(value.detach()) == 0 and not gradient.any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_base_loss_that_is_no_number_is_handed_on(device: str) -> None:
    z = torch.ones(4, device=device, requires_grad=True)
    value = distance_like(z, torch.zeros(4, device=device), torch.tensor(float("nan"), device=device))
    assert value.isnan().all() and torch.autograd.grad(value, z)[0].isnan().all()
