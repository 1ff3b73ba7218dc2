"""In which precision the formulas are computed: at least float32, whatever the inputs and whatever autocast says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def full_precision(function: F) -> F:
    """Give a formula its half-precision inputs as float32, and switch autocast off inside it.

    Distances between neighbours and variances of probabilities are differences of nearly equal numbers: in half
    precision they are mostly rounding.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_widened(a) for a in args)
        kwargs = {k: _widened(v) for k, v in kwargs.items()}
        device = next((a.device.type for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), "cpu")
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def _widened(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.is_floating_point() and value.element_size() < 4
    return value.float() if half else value


def nothing(z: Tensor) -> Tensor:
    """A loss of zero that is still a function of ``z``, for batches in which there is nothing to compare."""
    return torch.where(z.isfinite(), z, 0).sum() * 0.0


def rows(what: str, values: Tensor, shape: str = "[batch, width]") -> None:
    """Refuse what is not a matrix with a row for each sample, in words rather than in torch's."""
    if values.dim() != 2:
        raise ValueError(f"{what} must be {shape}, not {list(values.shape)}")


def one_of(what: str, given: str, *known: str) -> None:
    """Refuse an option that does not exist, rather than take it for another."""
    if given not in known:
        raise ValueError(f"{what} must be one of {', '.join(known)}, not '{given}'")
