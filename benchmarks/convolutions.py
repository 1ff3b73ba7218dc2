"""What a 3x3 convolution takes at other widths and on smaller pictures: the layers of a slimmed ResNet-18 on a GPU.

Microseconds of a forward pass, of the gradient with respect to the input, and of that with respect to the weights, each
captured many times and started on several streams at once, as slots do; bf16, channels-last, deterministic algorithms.
The widths are those of GradAug's sub-networks. `models/narrow.py` is what this led to.

    python benchmarks/convolutions.py
    python benchmarks/convolutions.py --widths 0.5,1 --sizes 32,16 --json convolutions.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import record
from isofed.models.slim import channels

STAGES = (64, 128, 256, 512)  # each on pictures half as large as the one before
PASSES = ("forward", "input", "weight")
TIMES = 20  # in a graph, on each stream


def work(which: str, count: int, side: int, batch: int) -> Callable[[], object]:
    """One convolution with tensors of its own."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)

    x, weight, gradient = drawn(batch, count, side, side), drawn(count, count, 3, 3), drawn(batch, count, side, side)
    if which == "forward":
        return lambda: torch.nn.functional.conv2d(x, weight, padding=1)
    wanted = [which == "input", which == "weight", False]
    shape: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    return lambda: torch.ops.aten.convolution_backward(gradient, x, weight, [0], *shape, wanted)


def microseconds(which: str, count: int, side: int, o: argparse.Namespace) -> float:
    """Of one, with others beside it."""
    jobs = [(work(which, count, side, o.batch), torch.cuda.Stream()) for _ in range(o.streams)]
    for job, _ in jobs:
        job()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        for job, stream in jobs:
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                for _ in range(TIMES):
                    job()
        for _, stream in jobs:
            here.wait_stream(stream)
    taken = []
    for _ in range(o.repeats + 1):  # the first one warms up
        torch.cuda.synchronize()
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        taken.append(1e6 * (time.perf_counter() - began) / (TIMES * o.streams))
    return statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="0.8,0.9,1")
    parser.add_argument("--sizes", default="32,28,24,20", help="sides of the network's pictures")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    o = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    print(f"{'channels':>8}{'of':>5}{'side':>6}" + "".join(f"{name:>10}" for name in (*PASSES, "together")))
    found = []
    for stage, full in enumerate(STAGES):
        for size in map(int, o.sizes.split(",")):
            side = -(-size // 2**stage)
            for width in map(float, o.widths.split(",")):
                count = channels(full, width)
                times = [microseconds(which, count, side, o) for which in PASSES]
                line = "".join(f"{t:10.1f}" for t in (*times, sum(times)))
                print(f"{count:8}{full:5}{side:6}{line}", flush=True)
                found.append({"full": full, "channels": count, "side": side, **dict(zip(PASSES, times, strict=True))})
    print(f"microseconds, median of {o.repeats}; batch {o.batch}, {o.streams} streams")
    record.write(o, "cuda", found=found)


if __name__ == "__main__":
    main()
