"""How long it takes to add up clients' updates, exactly and in any order.

Times the exact sum of a round, with the largest number of each update known (as it is after a visit) and unknown, and a
plain sum in float64, which depends on the order, in turns on one core.

    python benchmarks/sums.py
    python benchmarks/sums.py --numbers 11000000 --largest 0.2 --json sums.json
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import record
from isofed.engine.exact import ExactSum

UPDATES = 50  # of a round


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def exactly(updates: list[Tensor], largest: float) -> None:
    total = ExactSum(UPDATES)
    for n in range(UPDATES):
        total.add(updates[n % len(updates)], 1.0, largest)
    total.mean()


def plainly(updates: list[Tensor]) -> None:
    total = torch.zeros_like(updates[0], dtype=torch.float64)
    for n in range(UPDATES):
        total.add_(updates[n % len(updates)])
    total.div_(UPDATES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=1_626_442, help="of an update")
    parser.add_argument("--largest", type=float, default=0.02, help="of these numbers")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    given = parser.parse_args()
    torch.set_num_threads(1)
    drawn = torch.Generator().manual_seed(0)
    updates = [(2 * torch.rand(given.numbers, generator=drawn) - 1) * given.largest for _ in range(4)]
    ways: dict[str, Callable[[], object]] = {
        "exact, largest known": lambda: exactly(updates, given.largest),
        "exact": lambda: exactly(updates, math.inf),
        "float64": lambda: plainly(updates),
    }
    for work in ways.values():  # the first time makes things ready
        work()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.repeats):
        for name, work in ways.items():
            found[name].append(seconds(work) / UPDATES)
    first, *_ = found.values()
    print(f"{given.numbers:,} numbers, {UPDATES} updates\n{'':22}{'ms an update':>24}{'times the first':>24}")
    for name, times in found.items():
        ratios = [b / a for a, b in zip(first, times, strict=True)]
        print(f"{name:22}{spread([1e3 * t for t in times]):>24}{spread(ratios):>24}")
    print(f"median (range) of {given.repeats} repeats in turns")
    record.write(given, "cpu", seconds=found)


def spread(values: list[float]) -> str:
    middle, low, high = (f"{v:.2f}" for v in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


if __name__ == "__main__":
    main()
