"""The spread of the predictions, column by column."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from isofed.functional import classifier_variance
from tests.functional.tools import (
    SHAPES,
    Array,
    array,
    assert_exact_in_half,
    assert_finite,
    assert_needs_no_values,
    assert_same_under_autocast,
    assert_smooth,
    features,
    value_and_gradient,
)

STATISTICS, HINGES = ["std", "var"], ["linear", "squared", "none"]


def spreads(logits: Array, statistic: str) -> list[float]:
    probabilities = []
    for row in logits:
        powers = [math.exp(x - max(row)) for x in row]
        probabilities.append([p / sum(powers) for p in powers])
    found = []
    for column in zip(*probabilities, strict=True):
        mean = sum(column) / len(column)
        variance = sum((p - mean) ** 2 for p in column) / (len(column) - 1)
        found.append(math.sqrt(variance) if statistic == "std" else variance)
    return found


def lacking(logits: Array, statistic: str = "std", target: float | None = None, hinge: str = "linear") -> float:
    if len(logits) < 2:
        return 0.0
    classes = logits.shape[1]
    if target is None:
        target = 1 / math.sqrt(classes) if statistic == "std" else 1 / classes
    total = 0.0
    for s in spreads(logits, statistic):
        short = target - s
        if hinge != "none":
            short = max(0.0, short)
        total += short**2 if hinge == "squared" else short
    return total / classes


def decided(count: int, classes: int, seed: int = 0) -> Tensor:
    """Logits that are certain enough for some classes to vary more than the target and others less."""
    logits = features(count, classes, seed)
    logits = 4 * (logits - logits.mean(0))
    logits[:, -1] -= 3
    return logits


@pytest.mark.parametrize("shape", [(c, w) for c, w in SHAPES if w > 1], ids=str)
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("hinge", HINGES)
@pytest.mark.parametrize("target", [None, 0.05, 0.4])
def test_against_columns(shape: tuple[int, int], statistic: Any, hinge: Any, target: float | None) -> None:
    for logits in (features(*shape), decided(*shape)):
        found = classifier_variance(logits, statistic=statistic, target=target, hinge=hinge)
        wanted = lacking(array(logits), statistic, target, hinge)
        assert found.shape == () and found.item() == pytest.approx(wanted, rel=1e-11, abs=1e-15)
        single = classifier_variance(logits.float(), statistic, target, hinge).item()
        assert single == pytest.approx(lacking(array(logits.float()), statistic, target, hinge), rel=1e-5, abs=1e-7)


def test_the_default_is_that_of_feduv() -> None:
    logits = decided(9, 5)
    assert classifier_variance(logits).item() == pytest.approx(lacking(array(logits), "std", None, "linear"))


@pytest.mark.parametrize("classes", [2, 3, 7, 10, 65, 100])
def test_each_class_once_lacks_nothing(classes: int) -> None:
    once = 1e4 * torch.eye(classes, dtype=torch.float64)
    for statistic in ("std", "var"):
        assert abs(classifier_variance(once, statistic).item()) < 1e-15
        # That is the target itself, not something above it that the hinge cuts off.
        assert abs(classifier_variance(once, statistic, hinge="none").item()) < 1e-15
    assert classifier_variance(torch.zeros(8, classes)).item() == pytest.approx(1 / math.sqrt(classes))
    assert classifier_variance(torch.zeros(8, classes), "var").item() == pytest.approx(1 / classes)


def test_by_hand() -> None:
    logits = torch.full((4, 10), -1e4)
    logits[:2, 0] = logits[2:, 1] = 0  # two classes, half and half: unbiased variances 1/3, and eight of zero
    c, s = 10**-0.5, 3**-0.5
    assert classifier_variance(logits).item() == pytest.approx(0.8 * c)
    assert classifier_variance(logits, hinge="squared").item() == pytest.approx(0.8 * c**2)
    assert classifier_variance(logits, hinge="none").item() == pytest.approx(c - 0.2 * s)
    assert classifier_variance(logits, "var").item() == pytest.approx(0.08)
    assert classifier_variance(logits, "var", hinge="none").item() == pytest.approx(0.1 - 0.2 / 3)
    assert classifier_variance(logits, "var", target=0.5).item() == pytest.approx(0.8 * 0.5 + 0.2 * (0.5 - 1 / 3))
    assert classifier_variance(logits, target=0.0).item() == 0.0


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("hinge", HINGES)
def test_gradients(statistic: Any, hinge: Any) -> None:
    for shape in ((2, 3), (4, 9), (7, 4)):
        logits = decided(*shape)
        target = {"std": shape[1] ** -0.5, "var": 1 / shape[1]}[statistic]
        away = [s - target for s in spreads(array(logits), statistic)]
        assert all(abs(a) > 1e-3 for a in away), "at the kink there is nothing to compare"
        assert any(a < 0 for a in away)
        assert_smooth(partial(classifier_variance, statistic=statistic, hinge=hinge), logits)
    assert any(a > 0 for a in away)  # a class that varies enough


HARD = {
    "one": torch.randn(1, 4, generator=torch.Generator().manual_seed(0)),
    "two": torch.tensor([[1.0, 2.0, -1.0], [0.0, 0.3, 1.0]]),
    "all the same": torch.tensor([[0.3, -0.2, 1.0, 0.1]]).repeat(7, 1),
    "all zero": torch.zeros(6, 4),
    "one class": torch.tensor([[1e4, 0.0, 0.0]]).repeat(5, 1),
    "a class that nobody predicts": torch.cat([torch.full((6, 1), -1e4), features(6, 3).float()], 1),
    "one class for all but one": torch.cat([1e4 * torch.eye(4)[:1].repeat(5, 1), 1e4 * torch.eye(4)[1:2]]),
    "huge": 1e4 * features(6, 4).float(),
    "tiny": 1e-4 * features(6, 4).float(),
    "hardly likely": torch.cat([features(6, 1).float() - 40, features(6, 3).float()], 1),
    "next to impossible": torch.cat([features(6, 1).float() - 86, features(6, 3).float()], 1),
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("hinge", HINGES)
def test_hard_batches(name: str, statistic: Any, hinge: Any) -> None:
    logits = HARD[name]
    value = assert_finite(partial(classifier_variance, statistic=statistic, hinge=hinge), logits)
    wanted = lacking(array(logits), statistic, None, hinge)
    assert value.item() == pytest.approx(wanted, rel=1e-5, abs=1e-7)
    _, gradient = value_and_gradient(partial(classifier_variance, statistic=statistic, hinge=hinge), logits)
    # Neither a standard deviation nor a probability can change faster than what it is made from.
    assert gradient.abs().max() <= 1.0


def test_no_spread_has_no_gradient() -> None:
    for logits in (torch.zeros(6, 4), torch.tensor([[0.3, -0.2, 1.0, 0.1]]).repeat(7, 1), torch.zeros(1, 3)):
        _, gradient = value_and_gradient(classifier_variance, logits)
        assert gradient.abs().max() < 1e-6
    # A class that nobody predicts hides nothing of the others.
    alone = features(6, 3)
    beside = torch.cat([torch.full((6, 1), -1e4, dtype=torch.float64), alone], 1)
    _, gradient = value_and_gradient(partial(classifier_variance, target=0.5), beside)
    _, wanted = value_and_gradient(partial(classifier_variance, target=0.5), alone)
    torch.testing.assert_close(gradient[:, 1:], wanted * 3 / 4)
    assert wanted.abs().max() > 1e-3 and gradient[:, 0].abs().max() == 0


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("hinge", HINGES)
def test_any_precision(statistic: Any, hinge: Any) -> None:
    loss = partial(classifier_variance, statistic=statistic, hinge=hinge)
    for shape in ((5, 4), (4, 30), (30, 4)):
        logits = features(*shape)
        assert_exact_in_half(loss, partial(lacking, statistic=statistic, hinge=hinge), logits)
        assert_same_under_autocast(loss, logits)
        assert_needs_no_values(loss, logits)
    assert_needs_no_values(loss, logits[:1])
    assert_needs_no_values(partial(loss, target=0.2), logits)
