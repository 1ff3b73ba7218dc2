"""What recording diagnostics every ten rounds adds to a run: whole runs with and without, in turns.

Each pair is timed side by side, first one and then the other going first, and the overhead is the median of the pairs'
ratios. A third measurement needs no second run: the seconds that the recorder itself counted, over those of the run.

    python benchmarks/diagnostics.py                        the table, in some minutes
    python benchmarks/diagnostics.py --repeats 9 --json diagnostics.json
    python benchmarks/diagnostics.py --device cuda
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch

import record
from isofed.engine.workers import Pool
from isofed.federation import Federation

EVERY = 10
CASES: dict[str, dict[str, Any]] = {
    "mlp on digits, serial": {"data": "digits", "model": "mlp", "executor": "serial"},
    "cnn on digits, serial": {"data": "digits", "model": "cnn", "executor": "serial"},
    "cnn on digits, two workers": {"data": "digits", "model": "cnn", "executor": "workers"},
    "resnet8, 16x16x3, two workers": {
        "data": "synthetic:samples=2000,test=2000,size=16,channels=3",
        "model": "resnet8",
        "executor": "workers",
        "local_epochs": 2,
    },
}
ON_A_GPU: dict[str, dict[str, Any]] = {
    "resnet20, 32x32x3, slots": {
        "data": "synthetic:samples=20000,test=2000,size=32,channels=3,classes=100",
        "model": "resnet20",
        "executor": "slots",
    },
    "resnet18, 32x32x3, slots": {
        "data": "synthetic:samples=20000,test=2000,size=32,channels=3,classes=100",
        "model": "resnet18",
        "executor": "slots",
        "local_epochs": 2,
    },
}
COMMON: dict[str, Any] = {"partition": "dirichlet:0.1", "clients": 10, "rounds": 2 * EVERY, "lr": 0.03}


def seconds(chosen: dict[str, Any], pool: Pool | None) -> tuple[float, float]:
    """Of a whole run, evaluations and all, and of its recorder."""
    run = Federation(**chosen, pool=pool if chosen["executor"] == "workers" else None)
    began = time.perf_counter()
    run.fit()
    return time.perf_counter() - began, sum(line["seconds"] for line in run.diagnostics)


def measure(case: dict[str, Any], repeats: int, pool: Pool | None) -> dict[str, Any]:
    """Pairs of runs, one with and one without."""
    without = COMMON | case
    with_them = without | {"diagnose": f"every:{EVERY}"}
    seconds(with_them | {"rounds": EVERY}, pool)  # warm up
    pairs: list[tuple[float, float]] = []
    shares: list[float] = []
    for number in range(repeats):
        times: dict[bool, float] = {}
        for recorded in (True, False) if number % 2 else (False, True):
            times[recorded], own = seconds(with_them if recorded else without, pool)
            if recorded:
                shares.append(own / (times[True] - own))
        pairs.append((times[False], times[True]))
    return {"seconds": pairs, "overhead": [b / a - 1 for a, b in pairs], "recorder": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", type=record.device, default="cpu")
    parser.add_argument("--only", help="a word of the cases to measure")
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gpu = arguments.device != "cpu"
    cases = {k: v for k, v in (ON_A_GPU if gpu else CASES).items() if not arguments.only or arguments.only in k}
    found: dict[str, Any] = {}
    print(f"{'':32}{'seconds':>9}{'overhead %':>26}{'recorder alone %':>26}   load")
    pool = Pool(2) if any(case["executor"] == "workers" for case in cases.values()) else None
    try:
        for name, case in cases.items():
            made = found[name] = measure(case | {"device": arguments.device}, arguments.repeats, pool)
            cells = [
                f"{statistics.median(v):.2f} ({min(v):.2f} to {max(v):.2f})"
                for v in ([100 * x for x in made[key]] for key in ("overhead", "recorder"))
            ]
            whole = statistics.median(a for a, _ in made["seconds"])
            print(f"{name:32}{whole:9.2f}{cells[0]:>26}{cells[1]:>26}   {os.getloadavg()[0]:.1f}", flush=True)
    finally:
        if pool:
            pool.close()
    print(f"median (range) of {arguments.repeats} pairs of runs of {COMMON['rounds']} rounds, diagnose=every:{EVERY}")
    record.write(arguments, arguments.device, cases=found)


if __name__ == "__main__":
    main()
