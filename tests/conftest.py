"""What all tests share: one thread each, because several run side by side, and worker processes, which start slowly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from isofed.engine.workers import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def one_worker() -> Iterator[Pool]:
    with Pool(1) as pool:
        yield pool


@pytest.fixture(scope="session")
def two_workers() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool
