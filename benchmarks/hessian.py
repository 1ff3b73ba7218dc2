"""Products of a Hessian with vectors, and beside them the same with PyTorch's own second derivatives of convolutions.

A network as it is before round 1, in float32 without TF32, on random pictures of 32 x 32. Each repeat times both in
turns, with one vector and with eight that share the forward pass. How far apart the two ways' products are is found in
float64, on four pictures: in float32 a ReLU at its kink may fall to either side.

    python benchmarks/hessian.py --device cpu
    python benchmarks/hessian.py --device cuda --samples 640 --json hessian.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import cross_entropy

import record
from isofed.diagnostics import hessian as module
from isofed.models import create

TOGETHER = (1, 8)  # vectors


@contextmanager
def by(way: str) -> Iterator[None]:
    """PyTorch's own, or isofed's."""
    with patch.object(module, "TwiceDifferentiable", nullcontext) if way == "PyTorch" else nullcontext():
        yield


def measure(model: str, samples: int, device: str, repeats: int) -> dict[str, Any]:
    """Milliseconds a product by the number of vectors and the way, and how far apart the two ways' products are."""
    draws = torch.Generator().manual_seed(0)
    pictures = torch.randn(samples, 3, 32, 32, generator=draws).to(device, memory_format=torch.channels_last)
    labels = torch.randint(0, 100, (samples,), generator=draws).to(device)
    torch.manual_seed(0)
    network = create(model, classes=100).to(device)
    hessian = module.Hessian(network, (pictures, labels), cross_entropy, samples)
    vectors = torch.stack([hessian.normal(0, n) for n in range(max(TOGETHER))])
    taken: dict[str, list[float]] = {f"{way}, {n}": [] for n in TOGETHER for way in ("isofed", "PyTorch")}
    for repeat in range(repeats + 1):  # the first one warms up
        for case, times in taken.items():
            way, _, count = case.partition(", ")
            with by(way):
                began = time.perf_counter()
                float(hessian.times(vectors[: int(count)]).sum())  # waits for a GPU
            if repeat:
                times.append(1000 * (time.perf_counter() - began) / int(count))
    exact = module.Hessian(network.double(), (pictures[:4].double(), labels[:4]), cross_entropy, 4)
    products = []
    for way in ("isofed", "PyTorch"):
        with by(way):
            products.append(exact.times(vectors[:1].double()))
    return {"milliseconds": taken, "apart": float((products[0] - products[1]).norm() / products[1].norm())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=record.device, default="cpu")
    parser.add_argument("--networks", default="resnet56,resnet18")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    print(f"{'':16}{'vectors':>8}{'isofed, ms each':>26}{'PyTorch, ms each':>26}{'ratio':>8}{'apart':>10}")
    for model in arguments.networks.split(","):
        made = found[model] = measure(model, arguments.samples, arguments.device, arguments.repeats)
        for count in TOGETHER:
            times = [made["milliseconds"][f"{way}, {count}"] for way in ("isofed", "PyTorch")]
            cells = [f"{statistics.median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in times]
            ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
            print(f"{model:16}{count:8}{cells[0]:>26}{cells[1]:>26}{ratio:8.2f}{made['apart']:10.0e}", flush=True)
    print(f"median (range) of {arguments.repeats} repeats in turns; {arguments.samples} pictures")
    record.write(arguments, arguments.device, found=found)


if __name__ == "__main__":
    main()
