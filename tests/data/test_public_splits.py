"""Splits as public code has them after ``numpy.random.seed``, sample by sample."""

from __future__ import annotations

import numpy as np
import pytest

from isofed.data.dirichlet import Dirichlet
from isofed.data.partition import split
from isofed.errors import UserError
from tests.data.test_partition import Index, assert_cover, part


def as_in_public_code(labels: Index, clients: int, alpha: float, seed: int) -> list[list[int]]:
    """MOON's rule as its code has it, in plain lists, with numpy's global generator."""
    np.random.seed(seed)
    held: list[list[int]] = []
    while not held or min(map(len, held)) < 10:
        held = [[] for _ in range(clients)]
        for label in range(labels.max() + 1):
            mine = np.where(labels == label)[0]
            np.random.shuffle(mine)
            weights = np.random.dirichlet(np.repeat(alpha, clients))
            weights = np.array([w * (len(own) < len(labels) / clients) for w, own in zip(weights, held, strict=True)])
            with np.errstate(invalid="ignore"):
                cuts = (np.cumsum(weights / weights.sum()) * len(mine)).astype(int)[:-1]
            held = [own + new.tolist() for own, new in zip(held, np.split(mine, cuts), strict=True)]
    return held


@pytest.mark.parametrize(("alpha", "clients", "classes"), [(0.01, 10, 10), (0.5, 16, 20), (0.05, 4, 3)])
def test_a_numpy_seed_gives_the_split_of_public_code(alpha: float, clients: int, classes: int) -> None:
    data = part(2000, classes)
    for seed in (0, 1, 42):
        want = as_in_public_code(np.asarray(data.labels), clients, alpha, seed)
        for run in (0, 7):  # whatever the seed of the run
            got = split(f"dirichlet:{alpha},numpy_seed={seed}", data, clients, classes, run)
            assert [sorted(own) for own in got] == [sorted(own) for own in want]


def test_the_split_of_a_published_experiment() -> None:
    """FedUV's on STL-10, ten classes of 500: seed 42, alpha 0.01. Sizes depend on no more than that."""
    got = split("dirichlet:0.01,numpy_seed=42", part(5000, 10), 10, 10, 0)
    assert [len(own) for own in got] == [26, 364, 988, 998, 485, 11, 998, 491, 510, 129]


def test_public_code_gives_the_last_client_what_divides_by_zero() -> None:
    data = part(300, 10)
    numpy_seed = next(s for s in range(100) if _divides_by_zero(s))
    got = split(f"dirichlet:1e-4,min=0,numpy_seed={numpy_seed}", data, 4, 10, 0)
    assert_cover(got, 300)
    assert len(got[-1]) > 0


def _divides_by_zero(seed: int) -> bool:
    old, kind, held = np.random.RandomState(seed), Dirichlet(1e-4, min=0), np.zeros(4, dtype=np.int64)
    for _ in range(10):
        old.shuffle(np.arange(30))
        share = kind._share(old.dirichlet([1e-4] * 4), 30, held, 300)
        if share is None:
            return True
        held += share
    return False


def test_equal_clients_of_a_numpy_seed() -> None:
    np.random.seed(3)
    want = np.array_split(np.random.permutation(103), 4)
    got = split("dirichlet:inf,numpy_seed=3", part(103, 2), 4, 2, 0)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(UserError, match="numpy_seed must be from 0 to 4294967295, not -1"):
        split("dirichlet:1,numpy_seed=-1", part(103, 2), 4, 2, 0)
