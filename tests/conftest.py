"""Worker processes that all tests share: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from isofed.engine.workers import Pool


@pytest.fixture(scope="session")
def one_worker() -> Iterator[Pool]:
    with Pool(1) as pool:
        yield pool


@pytest.fixture(scope="session")
def two_workers() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool
