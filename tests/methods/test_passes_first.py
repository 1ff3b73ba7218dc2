"""Methods around the passes that say to begin with them, and those that only inherit the word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest

from isofed import Federation
from isofed.methods import Method, Step
from isofed.methods.fedsam import FedSAM
from tests.methods.written import same_bytes


@dataclass(frozen=True)
class Centred(Method):
    """Takes the mean from the gradient, also where no weight is."""

    def around(self, step: Step, inner: Callable[[], None]) -> None:
        inner()
        step.grad.sub_(step.grad.mean())


@dataclass(frozen=True)
class Declared(Centred):
    """The same, and says that it begins with the passes."""

    passes_first: ClassVar[bool] = True


@dataclass(frozen=True)
class Pulled(Method):
    """Puts a pull there before the passes."""

    def around(self, step: Step, inner: Callable[[], None]) -> None:
        step.grad.add_(step.weights - step.start, alpha=0.5)
        inner()


@dataclass(frozen=True)
class PulledSharp(FedSAM):
    """The same, written on top of a method that begins with the passes, and here does nothing else."""

    rho: float = 0.0

    def around(self, step: Step, inner: Callable[[], None]) -> None:
        step.grad.add_(step.weights - step.start, alpha=0.5)
        super().around(step, inner)


def federation(method: Method) -> Federation:
    data = "synthetic:samples=120,test=40,classes=4,size=8,channels=1"
    return Federation(
        data=data,
        model="cnn",
        method=method,
        clients=3,
        rounds=2,
        local_epochs=2,
        batch_size=16,
        clip=1.0,
        device="cpu",
    )


@pytest.mark.parametrize(("one", "two"), [(Centred(), Declared()), (Pulled(), PulledSharp())])
def test_the_word_changes_no_result(one: Method, two: Method) -> None:
    assert same_bytes(federation(one), federation(two))
