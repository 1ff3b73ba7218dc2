"""What all tests share: one thread each, because several run side by side, and worker processes, which start slowly."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest
import torch

from isofed.engine.workers import Pool

torch.set_num_threads(1)

# A script that is run in the background ignores Ctrl-C, and so would every command that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Thousands of tests and what they import stay to the end: no garbage collection need look through them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Decoded pictures of tests are kept apart from the user's, and no data set of the user's is found by chance."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("ISOFED_DATA", raising=False)
        yield


@pytest.fixture(scope="session")
def one_worker() -> Iterator[Pool]:
    with Pool(1) as pool:
        yield pool


@pytest.fixture(scope="session")
def two_workers() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool
