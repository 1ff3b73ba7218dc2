"""Random draws that depend on what they are for and on nothing else.

There is no global seed. Every draw comes from a counter-based generator keyed by the run's seed, a purpose
and the place it is drawn for (round, client), so a result cannot depend on the order in which clients are
trained, on the executor, on where a run was interrupted, or on other draws in the same process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def _digest(seed: int, purpose: str, place: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(repr((seed, purpose, place)).encode(), digest_size=16).digest()


def generator(seed: int, purpose: str, *place: int) -> np.random.Generator:
    """A fresh generator for one purpose at one place, for example ``generator(seed, "order", round, client)``."""
    key = np.frombuffer(_digest(seed, purpose, place), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def drawn(clients: int, participation: float) -> int:
    """How many clients take part in a round."""
    return max(1, int(clients * participation + 1e-9))


def draw_clients(seed: int, round: int, clients: int, participation: float) -> np.ndarray:
    """The clients of a round: so many of all, each as likely, in ascending order."""
    rng = generator(seed, "clients", round)
    return np.sort(rng.choice(clients, drawn(clients, participation), replace=False))


@contextmanager
def torch_seeded(seed: int, purpose: str, *place: int) -> Iterator[None]:
    """Run a block whose draws from torch's default generators are keyed like :func:`generator`.

    PyTorch's own initialisers and dropout draw from those generators; their states before the block are restored
    afterwards, so the caller's random numbers are not disturbed either.
    """
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    before = [g.get_state() for g in generators]
    number = int.from_bytes(_digest(seed, purpose, place)[:7], "little")
    for g in generators:
        g.manual_seed(number)
    try:
        yield
    finally:
        for g, state in zip(generators, before, strict=True):
            g.set_state(state)
