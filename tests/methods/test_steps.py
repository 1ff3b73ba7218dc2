"""How far an optimiser goes under a constant gradient: closed forms, and ``torch.optim.SGD`` itself."""

from __future__ import annotations

import pytest
import torch

from isofed.functional import normalising_steps


def simulated(steps: int, momentum: float, nesterov: bool, proximal: float) -> float:
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.SGD([weight], lr=1.0, momentum=momentum, nesterov=nesterov)
    for _ in range(steps):
        optimiser.zero_grad()
        (-weight + proximal / 2 * weight**2).backward()  # a unit gradient, and the pull back to the start
        optimiser.step()
    return weight.item()


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 100])
def test_without_momentum_it_is_the_number_of_steps(steps: int) -> None:
    assert normalising_steps(steps) == steps


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("tau", [1, 2, 5, 50])
def test_closed_form_with_momentum(rho: float, tau: int) -> None:
    wanted = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    assert normalising_steps(tau, rho) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("rho", [0.3, 0.9])
def test_the_running_counter_gives_the_same(rho: float) -> None:
    # FedNova's code adds up a counter: the momentum's own answer to ones.
    counter = total = 0.0
    for _ in range(20):
        counter = counter * rho + 1
        total += counter
    assert normalising_steps(20, rho) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("pull", [0.01, 0.3])
def test_proximal_recursion(pull: float) -> None:
    a = 0.0
    for _ in range(30):
        a = a * (1 - pull) + 1
    assert normalising_steps(30, proximal=pull) == pytest.approx(a, rel=1e-12)
    assert a == pytest.approx((1 - (1 - pull) ** 30) / pull, rel=1e-12)


@pytest.mark.parametrize("steps", [1, 3, 20])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True), (0.4, True)])
@pytest.mark.parametrize("proximal", [0.0, 0.05])
def test_it_is_what_torch_does(steps: int, momentum: float, nesterov: bool, proximal: float) -> None:
    found = normalising_steps(steps, momentum, nesterov=nesterov, proximal=proximal)
    assert found == pytest.approx(simulated(steps, momentum, nesterov, proximal), rel=1e-12)
