"""MOON's term, sample by sample."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from isofed.functional import model_contrast
from tests.functional.tools import (
    HARD,
    SHAPES,
    Array,
    array,
    arrays,
    assert_exact_in_half,
    assert_finite,
    assert_needs_no_values,
    assert_same_under_autocast,
    assert_smooth,
    features,
    hard,
    value_and_gradient,
)


def cosine(one: Array, other: Array) -> float:
    lengths = [math.sqrt(math.fsum(float(x) ** 2 for x in row)) for row in (one, other)]
    if min(lengths) <= 1e-6:
        return 0.0
    return math.fsum(float(a) * float(b) for a, b in zip(one, other, strict=True)) / (lengths[0] * lengths[1])


def contrast(z: Array, z_global: Array, z_previous: Array, temperature: float = 0.5) -> float:
    total = 0.0
    for row, g, p in zip(z, z_global, z_previous, strict=True):
        to_global, to_previous = cosine(row, g) / temperature, cosine(row, p) / temperature
        most = max(to_global, to_previous)
        total += most + math.log(math.exp(to_global - most) + math.exp(to_previous - most)) - to_global
    return total / len(z)


def three(count: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    return features(count, width, 1), features(count, width, 2), features(count, width, 3)


@pytest.mark.parametrize("shape", [(1, 4), *SHAPES], ids=str)
@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0, 7.0])
def test_sample_by_sample(shape: tuple[int, int], temperature: float) -> None:
    z, g, p = three(*shape)
    found = model_contrast(z, g, p, temperature=temperature)
    wanted = contrast(array(z), array(g), array(p), temperature)
    assert found.shape == () and found.item() == pytest.approx(wanted, rel=1e-11)
    single = model_contrast(z.float(), g.float(), p.float(), temperature)
    assert single.dtype == torch.float32 and single.item() == pytest.approx(wanted, rel=1e-5)


def test_by_hand() -> None:
    z, same, across = (torch.tensor([row]) for row in ([3.0, 0.0], [0.5, 0.0], [0.0, 2.0]))
    # By default the temperature is a half, so that a cosine of 1 counts 2.
    assert model_contrast(z, same, across).item() == pytest.approx(math.log(1 + math.exp(-2)), rel=1e-6)
    assert model_contrast(z, across, same).item() == pytest.approx(math.log(1 + math.exp(2)), rel=1e-6)
    assert model_contrast(z, same, -z, 1.0).item() == pytest.approx(math.log(1 + math.exp(-2)), rel=1e-6)
    named = model_contrast(z, z_previous=same, z_global=across, temperature=0.5)
    assert named.item() == pytest.approx(math.log(1 + math.exp(2)), rel=1e-6)


@pytest.mark.parametrize("temperature", [0.01, 0.5, 10.0])
def test_two_models_that_agree_give_log_2(temperature: float) -> None:
    z, other, _ = three(7, 5)
    for pair in ((other, other), (other, 3 * other), (z, z)):
        assert model_contrast(z, *pair, temperature).item() == pytest.approx(math.log(2), rel=1e-12)


def test_lengths_are_not_seen() -> None:
    z, g, p = three(6, 4)
    by = torch.logspace(-3, 3, 6, dtype=torch.float64)[:, None]
    assert model_contrast(by * z, 5 * g, p / by).item() == pytest.approx(model_contrast(z, g, p).item(), rel=1e-12)


@pytest.mark.parametrize("shape", [(1, 3), (4, 3), (3, 12)], ids=str)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_gradients(shape: tuple[int, int], temperature: float) -> None:
    assert_smooth(partial(model_contrast, temperature=temperature), *three(*shape))


def test_the_pull_is_towards_the_global_model() -> None:
    z, g, p = three(5, 8)
    _, gradient = value_and_gradient(model_contrast, z, g, p)
    moved = z - 0.1 * gradient
    for row, new, to_global, to_previous in zip(*arrays(z, moved, g, p), strict=True):
        assert cosine(new, to_global) - cosine(new, to_previous) > cosine(row, to_global) - cosine(row, to_previous)


@pytest.mark.parametrize("name", HARD)
def test_hard_batches(name: str) -> None:
    z = hard()[name]
    g, p = (features(len(z), z.shape[1], seed).float() for seed in (2, 3))
    for inputs in ((z, g, p), (g, z, p), (g, p, z), (z, z, z), (z, z, -z), (z, 1e4 * g, 1e-4 * p)):
        for temperature in (0.5, 1e-3):
            value = assert_finite(partial(model_contrast, temperature=temperature), *inputs)
            wanted = contrast(array(inputs[0]), array(inputs[1]), array(inputs[2]), temperature)
            assert value.item() == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_any_precision() -> None:
    for shape in ((1, 3), (6, 4), (5, 30)):
        inputs = three(*shape)
        assert_exact_in_half(model_contrast, contrast, *inputs)
        assert_same_under_autocast(model_contrast, *inputs)
        assert_needs_no_values(model_contrast, *inputs)
