"""Where the milliseconds of a step on a processor go: PyTorch's operations on one core, and what that core could do.

Prints the time of a local step, how much of it are convolutions and matrix products and at which rate they run, and the
rate of a large matrix product on the same core.

    python benchmarks/operations.py
    python benchmarks/operations.py --network resnet20 --batch 32 --json operations.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import record
from isofed.config import settings
from isofed.diagnostics.cost import pass_macs
from isofed.engine.replica import Job, Replica
from isofed.engine.world import World

STEPS, REPEATS = 5, 9
PRODUCTS = ("aten::convolution_backward", "aten::mkldnn_convolution", "aten::mm", "aten::addmm")


def seconds(work: Callable[[], Any]) -> float:
    """The median of some repeats."""
    found = []
    for _ in range(REPEATS + 2):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="pfl-cnn")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    values = {"data": "synthetic:samples=2000,size=32,channels=3", "partition": "iid", "clients": 2}
    values |= {"local_steps": STEPS, "batch_size": arguments.batch, "model": arguments.network}
    world = World.create(settings(values))
    replica = Replica(world, torch.device("cpu"))
    weights = replica.flat.clone()

    def visit() -> None:
        replica.visit(Job(1, 0, 0.01, 0.5), weights, {}, None)

    step = seconds(visit) / STEPS
    with profile(activities=[ProfilerActivity.CPU]) as found:
        visit()
    spent = {event.key: event.self_cpu_time_total / 1e6 for event in found.key_averages()}
    products = step * sum(spent.get(name, 0.0) for name in PRODUCTS) / sum(spent.values())
    flops = 6 * pass_macs(world.network()) * arguments.batch  # forward once, and twice that back
    matrix = torch.randn(2048, 2048)
    rate = 2 * 2048**3 / seconds(lambda: matrix @ matrix)
    print(f"{arguments.network}, batch {arguments.batch}: a step takes {1e3 * step:.1f} ms")
    print(f"convolutions and products: {1e3 * products:.1f} ms of it, at {flops / products / 1e9:.0f} GFLOP/s")
    print(f"a large product: {rate / 1e9:.0f} GFLOP/s")
    times = {"step_seconds": step, "products_seconds": products}
    record.write(arguments, "cpu", **times, products_flops=flops / products, large_product_flops=rate)


if __name__ == "__main__":
    main()
