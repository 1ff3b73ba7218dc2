"""The plan of a visit: which samples in which batch, and every random draw, made before the first step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isofed.config import Settings


@dataclass(frozen=True)
class Batches:
    """The batches of one visit."""

    order: np.ndarray  # int32 [steps, batch_size]: positions in the training part; the tail of a short row is 0
    sizes: tuple[int, ...]  # how many of each row count
    skipped: int  # batches of a single sample that were left out for batch norm's sake


def batches(samples: np.ndarray, s: Settings, batch_norm: bool, rng: np.random.Generator) -> Batches:
    """Cut a client's samples, shuffled anew for each epoch, into the batches of a visit."""
    sizes = _sizes(len(samples), s)
    usable = [n for n in sizes if n > 1 or not batch_norm]
    if s.epochs is not None:
        epochs = s.epochs
    else:
        epochs = -(-(s.local_steps or 0) // len(usable)) if usable else 0
    rows: list[np.ndarray] = []
    skipped = 0
    for _ in range(epochs):
        shuffled = rng.permutation(samples)
        for size, end in zip(sizes, np.cumsum(sizes).tolist(), strict=True):
            if len(rows) == s.local_steps:
                break
            if size > 1 or not batch_norm:
                rows.append(shuffled[end - size : end])
            else:
                skipped += 1
    order = np.zeros((len(rows), s.batch_size), np.int32)
    for row, chosen in zip(order, rows, strict=True):
        row[: len(chosen)] = chosen
    return Batches(order, tuple(len(r) for r in rows), skipped)


def _sizes(samples: int, s: Settings) -> list[int]:
    full, rest = divmod(samples, s.batch_size)
    return [s.batch_size] * full + ([rest] if rest and s.last_batch == "keep" else [])


def has_batch(samples: int, s: Settings) -> bool:
    """Whether a client of this size has anything to take a step on."""
    return bool(_sizes(samples, s))


def steps_of(samples: int, s: Settings) -> int:
    """About how many steps a client of this size takes: what the executors schedule by."""
    return s.local_steps or (s.epochs or 0) * len(_sizes(samples, s))


def batch_sizes(samples: int, s: Settings) -> dict[int, int]:
    """About how often each batch size comes in a visit to a client of this many samples."""
    sizes = _sizes(samples, s)
    epochs = s.epochs if s.epochs is not None else (s.local_steps or 0) / max(len(sizes), 1)
    return {size: round(epochs * sizes.count(size)) for size in set(sizes)}
