"""What the tests of the formulas share: inputs of all kinds, and the checks that every loss has to pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Array = NDArray[np.float64]
Loss = Callable[..., Tensor]

# Batch and width: as small as can be, square, much wider than the batch, much narrower.
SHAPES = [(2, 1), (2, 5), (3, 1), (3, 2), (5, 3), (6, 6), (4, 50), (60, 4), (16, 33)]


def features(count: int, width: int, seed: int = 0) -> Tensor:
    """Features in float64 whose dimensions differ in mean and scale and depend on each other."""
    rng = np.random.default_rng([seed, count, width])
    mixed = rng.normal(size=(count, width)) @ (np.eye(width) + 0.3 * rng.normal(size=(width, width)) / width**0.5)
    return torch.from_numpy(mixed * rng.uniform(0.5, 2, width) + rng.normal(size=width))


def array(tensor: Tensor) -> Array:
    """The same numbers, for a computation that has nothing to do with torch."""
    return tensor.detach().cpu().double().numpy()


def arrays(*tensors: Tensor) -> list[Array]:
    return [array(t) for t in tensors]


def hard() -> dict[str, Tensor]:
    """Batches on which a formula has little or nothing to measure, in float32."""
    usual, wide = features(8, 6).float(), features(8, 40).float()
    dead, wide_dead, zero_row = usual.clone(), wide.clone(), usual.clone()
    dead[:, 1:4], wide_dead[:, 3:] = 0, 0
    zero_row[2] = 0
    return {
        "one": usual[:1],
        "two": usual[:2],
        "two the same": usual[:1].repeat(2, 1),
        "constant": torch.full((8, 6), 0.7),
        "constant, wide": torch.full((7, 40), -1.3),
        "zero": torch.zeros(8, 6),
        "zero, wide": torch.zeros(8, 40),
        "zero, one": torch.zeros(1, 6),
        "dead dimensions": dead,
        "dead dimensions, wide": wide_dead,
        "a row of zeros": zero_row,
        "each row twice": torch.cat([usual, usual]),
        "all but one the same": torch.cat([usual[:1].repeat(7, 1), usual[1:2]]),
        "huge": 1e4 * usual,
        "huge, wide": 1e4 * wide,
        "tiny": 1e-4 * usual,
        "tiny, wide": 1e-4 * wide,
    }


HARD = list(hard())


def value_and_gradient(loss: Loss, z: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    leaf = z.detach().clone().requires_grad_()
    value = loss(leaf, *others)
    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), gradient


def numeric(function: Callable[[Array], float], z: Array, step: float = 1e-5) -> Array:
    """The gradient by central differences."""
    gradient = np.zeros_like(z)
    for place in np.ndindex(*z.shape):
        up, down = z.copy(), z.copy()
        up[place] += step
        down[place] -= step
        gradient[place] = (function(up) - function(down)) / (2 * step)
    return gradient


def assert_finite(loss: Loss, z: Tensor, *others: Tensor) -> Tensor:
    """Value and gradient are numbers; returns the value."""
    value, gradient = value_and_gradient(loss, z, *others)
    assert value.isfinite().all(), value
    assert gradient.isfinite().all(), gradient
    assert gradient.shape == z.shape and gradient.dtype == z.dtype
    return value


def assert_smooth(loss: Loss, *inputs: Tensor) -> None:
    """The gradient in all inputs that are float64 is that of the values, and is not nothing."""
    leaves = tuple(i.detach().clone().requires_grad_(i.dtype == torch.float64) for i in inputs)
    assert torch.autograd.gradcheck(loss, leaves, eps=1e-6, atol=1e-7, rtol=1e-5)
    assert any(
        g.abs().max() > 1e-6 for g in torch.autograd.grad(loss(*leaves).sum(), [x for x in leaves if x.requires_grad])
    )


def assert_exact_in_half(loss: Loss, reference: Callable[..., float], *inputs: Tensor) -> None:
    """From half-precision inputs comes the float32 value that these very inputs have."""
    for dtype in (torch.float16, torch.bfloat16):
        rounded = [i.to(dtype) if i.is_floating_point() else i for i in inputs]
        wanted, exact = value_and_gradient(loss, *(i.double() if i.is_floating_point() else i for i in rounded))
        value, gradient = value_and_gradient(loss, *rounded)
        assert value.dtype == torch.float32 and gradient.dtype == dtype
        np.testing.assert_allclose(value.item(), reference(*arrays(*rounded)), rtol=1e-5, atol=1e-7)
        # The gradient is exact up to its own rounding, and the steps near zero that float16 has.
        torch.testing.assert_close(gradient.double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-7)
        assert wanted.dtype == torch.float64 and gradient.abs().max() > 1e-5
        # One argument in half precision and the others not, in either way.
        if len(inputs) > 1 and inputs[1].is_floating_point():
            for mixed in ((rounded[0], inputs[1].float()), (inputs[0].float(), rounded[1])):
                value = loss(*mixed, *(i.float() if i.is_floating_point() else i for i in inputs[2:]))
                assert value.dtype == torch.float32


def assert_same_under_autocast(loss: Loss, *inputs: Tensor) -> None:
    single = [i.float() if i.is_floating_point() else i for i in inputs]
    plain, gradient = value_and_gradient(loss, *single)
    leaf = single[0].clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(leaf, *single[1:])
        assert torch.is_autocast_enabled("cpu")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert value.dtype == torch.float32 and torch.equal(value, plain)
    assert torch.equal(torch.autograd.grad(value.sum(), leaf)[0], gradient)


def assert_needs_no_values(loss: Loss, *inputs: Tensor) -> None:
    """The loss runs, forward and backward, on tensors that have shapes only, as the capture of a CUDA graph asks."""
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(i.float() if i.is_floating_point() else i) for i in inputs]
    with mode:
        value, gradient = value_and_gradient(loss, *fakes)
    assert isinstance(value, FakeTensor) and isinstance(gradient, FakeTensor)
    assert value.shape == loss(*inputs).shape and gradient.shape == inputs[0].shape
