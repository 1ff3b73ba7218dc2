"""Draws that depend on their key and on nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from isofed.draws import generator, torch_seeded


def test_the_same_key_gives_the_same_numbers_and_no_other_does() -> None:
    def numbers(*key: object) -> tuple[float, ...]:
        return tuple(generator(*key).random(4))  # type: ignore[arg-type]

    keys = [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0), (0, "a", 1), (0, "a", 0, 0), (0, "a", 1, 0), (0, "a", 0, 1)]
    assert len({numbers(*k) for k in keys}) == len(keys)
    assert all(numbers(*k) == numbers(*k) for k in keys)


def test_draws_do_not_depend_on_other_draws() -> None:
    first = generator(3, "x", 1)
    second = generator(3, "x", 2)
    a = [first.random(), second.random(), first.random()]
    again = generator(3, "x", 1)
    assert [again.random(), again.random()] == [a[0], a[2]]


def test_they_look_uniform() -> None:
    # One draw from each of many neighbouring keys: mean 1/2, variance 1/12, and no correlation from key to key.
    values = np.array([generator(0, "order", r, c).random() for r in range(60) for c in range(60)])
    assert abs(values.mean() - 0.5) < 4 / np.sqrt(12 * len(values))
    assert values.var() == pytest.approx(1 / 12, rel=0.06)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / np.sqrt(len(values))


def test_torch_is_seeded_inside_and_restored_outside() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with torch_seeded(0, "network"):
        inside = torch.randn(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.randn(7)
    with torch_seeded(0, "network"):
        assert torch.equal(torch.randn(3), inside)
    with torch_seeded(1, "network"):
        assert not torch.equal(torch.randn(3), inside)
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), torch_seeded(0, "network"):
        torch.randn(1)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_global_is_touched() -> None:
    states = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    generator(0, "x").random(100)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states  # type: ignore[index]
