"""Where the milliseconds of a step on a processor go: PyTorch's operations on one core, and what that core could do.

Prints the time of a local step, and that of the same step with PyTorch's own layers and all gradients in one vector, in
turns; how much of it are convolutions and matrix products and at which rate they run; and the rate of a large matrix
product on the same core, by each of PyTorch's two libraries. Convolutions count with the multiplications of their
definition; those of ``isofed/models/winograd.py`` do a quarter of them, so their rate may be above that of a product.

    python benchmarks/operations.py
    python benchmarks/operations.py --network resnet20 --batch 32 --json operations.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

import record
from isofed.config import settings
from isofed.diagnostics.cost import pass_macs
from isofed.engine.replica import Job, Replica
from isofed.engine.world import World
from isofed.models import dense

STEPS, REPEATS = 5, 15
PRODUCTS = [f"aten::{name}" for name in ("convolution_backward", "mkldnn_convolution", "mm", "addmm")]
PRODUCTS += ["mkldnn::_linear_pointwise", "_Convolution", "_ConvolutionBackward"]


def in_turns(*works: Callable[[], Any]) -> list[list[float]]:
    """The seconds of each, again and again, so that a slow moment of the machine hits all."""
    found: list[list[float]] = [[] for _ in works]
    for repeat in range(REPEATS + 2):
        for work, seconds in zip(works, found, strict=True):
            began = time.perf_counter()
            work()
            if repeat >= 2:  # the first ones make things ready
                seconds.append(time.perf_counter() - began)
    return found


def spread(values: Sequence[float], form: str) -> str:
    """The median and the range."""
    middle, low, high = (format(v, form) for v in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="pfl-cnn")
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    values = {"data": "synthetic:samples=2000,size=32,channels=3", "partition": "iid", "clients": 2}
    values |= {"local_steps": STEPS, "batch_size": arguments.batch, "model": arguments.network}
    world = World.create(settings(values | {"momentum": arguments.momentum}))
    replica = Replica(world, torch.device("cpu"))
    with patch("isofed.engine.step.quicken", lambda *_, **__: None), patch("isofed.engine.sgd._LARGE", 2**60):
        plain = Replica(world, torch.device("cpu"))
    weights = replica.flat.clone()

    def visit(who: Replica) -> Callable[[], Any]:
        return lambda: who.visit(Job(1, 0, 0.01, 0.5), weights, {}, None)

    ours, own = ([s / STEPS for s in seconds] for seconds in in_turns(visit(replica), visit(plain)))
    step = statistics.median(ours)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        visit(replica)()
    spent = {event.key: event.self_cpu_time_total / 1e6 for event in found.key_averages()}
    products = step * sum(spent.get(name, 0.0) for name in PRODUCTS) / sum(spent.values())
    flops = 6 * pass_macs(world.network()) * arguments.batch  # forward once, and twice that back
    matrix = torch.randn(2048, 2048)
    large = {"PyTorch's": lambda: matrix @ matrix}
    if dense.available():
        large["oneDNN's"] = lambda: torch.ops.mkldnn._linear_pointwise(matrix, matrix, None, "none", [], "")
    rates = {k: 2 * 2048**3 / statistics.median(s) for k, s in zip(large, in_turns(*large.values()), strict=True)}
    ratios = [b / a for a, b in zip(ours, own, strict=True)]
    print(f"{arguments.network}, batch {arguments.batch}: a step takes {spread([1e3 * s for s in ours], '.2f')} ms")
    print(f"with PyTorch's own layers, and gradients copied: {spread(ratios, '.2f')} times as long")
    print(
        f"convolutions and products: {1e3 * products:.2f} ms of it, {flops / products / 1e9:.0f} GFLOP/s by definition"
    )
    print(f"a large product: {', '.join(f'{k} {rate / 1e9:.0f} GFLOP/s' for k, rate in rates.items())}")
    times = {"step_seconds": ours, "plain_step_seconds": own, "products_seconds": products}
    record.write(arguments, "cpu", **times, products_flops=flops / products, large_product_flops=rates)


if __name__ == "__main__":
    main()
