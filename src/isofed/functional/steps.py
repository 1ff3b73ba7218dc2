"""How far an optimiser moves under a constant gradient: the measure of local progress in FedNova and SCAFFOLD."""

from __future__ import annotations


def normalising_steps(steps: int, momentum: float = 0.0, *, nesterov: bool = False, proximal: float = 0.0) -> float:
    """The distance that SGD goes in ``steps`` steps of learning rate 1 under a constant gradient of 1.

    FedNova (Wang et al. 2020) calls it ||a||_1. Without momentum it is the number of steps; with momentum rho it is
    (steps - rho (1 - rho^steps) / (1 - rho)) / (1 - rho); with a proximal pull each step adds 1 to (1 - proximal) a.

    Args:
        steps: local steps taken.
        momentum: of the local optimiser, its buffer zero at the start.
        nesterov: whether that momentum is Nesterov's, as ``torch.optim.SGD`` defines it.
        proximal: learning rate times the strength mu of a proximal term.

    >>> normalising_steps(5)
    5.0
    >>> normalising_steps(2, momentum=0.5)
    2.5
    """
    distance = buffer = 0.0
    for _ in range(steps):
        gradient = 1.0 - proximal * distance
        buffer = momentum * buffer + gradient
        distance += gradient + momentum * buffer if nesterov else buffer
    return distance
