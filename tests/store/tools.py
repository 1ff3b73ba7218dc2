"""What clients remember, made and compared in the tests."""

from __future__ import annotations

import pytest
import torch

from isofed import state_file
from isofed.files import Tensors, raw
from isofed.store import Remembered


def vector(*numbers: float) -> Tensors:
    return {"v": torch.tensor(numbers, dtype=torch.float32)}


def after(before: Remembered, states: dict[int, Tensors]) -> Remembered:
    """The next moment."""
    made = before.copy()
    made.take(dict(states))
    assert sorted(made.taken) == sorted(states)
    return made


def same(one: Tensors, other: Tensors) -> bool:
    """Whether two states have the same tensors in the same order, bit by bit."""
    kinds = [[(name, v.dtype, v.shape) for name, v in state.items()] for state in (one, other)]
    return kinds[0] == kinds[1] and all(raw(one[name]) == raw(other[name]) for name in one)


def in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no C compiler."""
    monkeypatch.setattr(state_file, "_functions", lambda: None)
