"""Vectors that are scaled down to a length."""

from __future__ import annotations

import math

import pytest
import torch

from isofed.functional.shorten import shorten
from tests.functional.test_distance import DEVICES


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 1000, 5000, 700_001])
@pytest.mark.parametrize("limit", [0.5, 1e9])
def test_a_vector_is_as_long_as_it_may_be(device: str, count: int, limit: float) -> None:
    before = torch.randn(count, generator=torch.Generator().manual_seed(count))
    found = before.clone().to(device)
    shorten(found, limit)
    length = math.sqrt(sum(x * x for x in before.double().tolist()))
    wanted = before.double() * min(1, limit / (length + 1e-6))
    # Some 700,000 squares in float32, one after another, are off by several bits.
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-6 if count < 10_000 else 2e-5, atol=0)
    assert limit < 1 or torch.equal(found.cpu(), before)


@pytest.mark.parametrize("device", DEVICES)
def test_a_number_that_is_none_is_handed_on(device: str) -> None:
    vector = torch.tensor([1.0, math.nan, 2.0], device=device)
    shorten(vector, 10.0)
    assert vector.isnan().all()
