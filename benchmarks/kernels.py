"""Where the microseconds of a step go: the kernels of one slot, from PyTorch's profiler, and what the GPU could do.

Prints, for each network, kernels a step, their time, and the most expensive ones; before that the rate of a large copy
and of a large bf16 matrix product on the same GPU, to set them beside.

    python benchmarks/kernels.py
    python benchmarks/kernels.py --networks resnet56 --precision tf32 --top 20 --json kernels.json
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import record
from isofed.bench import Federated, chosen
from isofed.engine.choose import exact_arithmetic
from isofed.engine.replica import Job
from isofed.engine.slots import Slots
from isofed.engine.world import World

STEPS = 16


def seconds(work: Callable[[], Any], times: int = 20) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def ceilings() -> dict[str, float]:
    """The rates of a large copy and of a large product."""
    vectors = torch.empty(2, 2**28, device="cuda")
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    copy = vectors.nbytes / seconds(lambda: vectors[0].copy_(vectors[1]))
    product = 2 * 8192**3 / seconds(lambda: matrix @ matrix)
    print(f"copy {copy / 1e12:.2f} TB/s, bf16 product {product / 1e12:.0f} TFLOP/s")
    return {"copy_bytes_per_second": copy, "bf16_product_flops": product}


def kernels(network: str, method: str, o: argparse.Namespace) -> dict[str, Any]:
    common = {"model": network, "precision": o.precision, "batch_size": o.batch, "size": o.size, "samples": 2 * o.batch}
    s = chosen(method=method, device="cuda", slots=1, **common)
    world = World.create(s)
    with exact_arithmetic(s):
        run = Federated(world, 4)
        assert isinstance(run.executor, Slots)
        slot = run.executor.slots[0]
        slot.begin(Job(9, 0, 0.01, 0.1), run.executor.slots[0].replica.initial, {}, None)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(2):  # strides of eight steps
                slot.advance()
            torch.cuda.synchronize()
        run.close()
    counts: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for event in found.events() or []:
        counts[event.name[:100]] += 1
        times[event.name[:100]] += int(event.device_time_total * 1000)
    total = sum(times.values()) / 1000
    count = sum(counts.values()) / STEPS
    print(f"{network} {method} {o.precision}: {count:.0f} kernels and {total / STEPS:.0f} us of them a step")
    for name, spent in times.most_common(o.top):
        print(f"  {spent / 1000 / STEPS:8.1f} us {counts[name] / STEPS:6.1f}x  {name}")
    each = {name: {"microseconds": t / 1000 / STEPS, "times": counts[name] / STEPS} for name, t in times.most_common()}
    return {"network": network, "method": method, "kernels": count, "microseconds": total / STEPS, "each": each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="pfl-cnn,resnet18,resnet56,mobilenetv2")
    parser.add_argument("--methods", default="fedavg")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=32, help="side of the pictures")
    parser.add_argument("--top", type=int, default=12)
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    rates = ceilings()
    cases = [
        kernels(network, method, arguments)
        for network in arguments.networks.split(",")
        for method in arguments.methods.split(",")
    ]
    record.write(arguments, "cuda", ceilings=rates, cases=cases)


if __name__ == "__main__":
    main()
