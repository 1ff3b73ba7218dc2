"""In which precision a formula sees its inputs, and a loss that has nothing to say."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from isofed.functional.precision import full_precision, nothing

HALF = [torch.float16, torch.bfloat16]
WIDE = [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]


def given(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """What arrives inside, and whether autocast is on there."""
    return args, kwargs, torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_widened_wherever_it_comes(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 2.5, -3.0]).to(dtype)
    args, kwargs, _ = full_precision(given)(x, 2, x, named=x, other="text")
    for found in (args[0], args[2], kwargs["named"]):
        assert found.dtype == torch.float32 and torch.equal(found, x.float())
    assert args[1] == 2 and kwargs["other"] == "text" and x.dtype == dtype


@pytest.mark.parametrize("dtype", WIDE)
def test_anything_else_is_passed_on_as_it_is(dtype: torch.dtype) -> None:
    x = torch.ones(3).to(dtype)
    args, kwargs, _ = full_precision(given)(x, named=x)
    assert args[0] is x and kwargs["named"] is x


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_come_back_in_the_precision_of_the_inputs(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 2.5, -3.0], dtype=dtype, requires_grad=True)
    square = full_precision(lambda z: z.square().sum())(x)
    assert square.dtype == torch.float32
    square.backward()
    assert x.grad is not None and x.grad.dtype == dtype and x.grad.tolist() == [2.0, 5.0, -6.0]


@pytest.mark.parametrize("cast", HALF)
@pytest.mark.parametrize("by_name", [False, True])
def test_autocast_is_off_inside_only(cast: torch.dtype, by_name: bool) -> None:
    x = torch.tensor([[1.0, 1e-3], [1e-3, 1.0]])

    @full_precision
    def product(z: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("cpu")
        return z @ z

    with torch.autocast("cpu", cast):
        assert full_precision(given)(x)[2] is False
        assert full_precision(given)("no tensor at all")[2] is False
        found = product(z=x) if by_name else product(x)
        assert torch.is_autocast_enabled("cpu") and (x @ x).dtype == cast
    assert found.dtype == torch.float32 and torch.equal(found, x @ x)
    assert full_precision(given)(x)[2] is False  # and where it was off it stays off


def test_autocast_is_on_again_after_an_error() -> None:
    @full_precision
    def fails(z: Tensor) -> Tensor:
        raise RuntimeError("no")

    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="no"):
            fails(torch.ones(2))
        assert torch.is_autocast_enabled("cpu")


def test_a_wrapped_formula_keeps_its_name_and_signature() -> None:
    def formula(z: Tensor, strength: float = 2.0) -> Tensor:
        """What it says."""
        return strength * z

    wrapped = full_precision(formula)
    assert wrapped.__name__ == "formula" and wrapped.__doc__ == "What it says."
    assert inspect.signature(wrapped) == inspect.signature(formula)


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (4, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_zero_with_a_gradient_of_zero(shape: tuple[int, int], dtype: torch.dtype) -> None:
    z = (1e4 * torch.ones(shape, dtype=dtype)).requires_grad_()
    value = nothing(z)
    assert value.shape == () and value.dtype == dtype and value.item() == 0
    (gradient,) = torch.autograd.grad(value, z)
    assert torch.equal(gradient, torch.zeros_like(z))
