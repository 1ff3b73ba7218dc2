"""What single convolutions take on a GPU: cuDNN's at other widths and on smaller pictures, and ours beside cuDNN's.

Microseconds of a forward pass, of the gradient with respect to the input, and of that with respect to the weights, each
captured many times and started on several streams at once, as slots do; channels-last, deterministic algorithms.

In bf16 these are the 3x3 convolutions of a slimmed ResNet-18, with the widths of GradAug's sub-networks: what led to
`models/narrow.py`. In tf32 they are those of pfl-cnn and ResNet-18, by cuDNN and by the kernels of `models/tf32.py`, in
turns; a star marks the passes for which these are used.

    python benchmarks/convolutions.py
    python benchmarks/convolutions.py --widths 0.5,1 --sizes 32,16 --json convolutions.json
    python benchmarks/convolutions.py --precision tf32
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import record
from isofed.bench import spread
from isofed.models import fused, tf32
from isofed.models.slim import channels

STAGES = (64, 128, 256, 512)  # each on pictures half as large as the one before
PASSES = ("forward", "input", "weight")
TIMES = 20  # in a graph, on each stream
LAYERS = (  # channels, side, outputs, size, stride, padding: pfl-cnn's, then those of the four stages of ResNet-18
    *((32, 30, 64, 3, 1, 0), (64, 32, 64, 3, 1, 1)),
    *((64, 32, 128, 3, 2, 1), (64, 32, 128, 1, 2, 0), (128, 16, 128, 3, 1, 1)),
    *((128, 16, 256, 3, 2, 1), (128, 16, 256, 1, 2, 0), (256, 8, 256, 3, 1, 1)),
    *((256, 8, 512, 3, 2, 1), (256, 8, 512, 1, 2, 0), (512, 4, 512, 3, 1, 1)),
)


def drawn(kind: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=kind).to(memory_format=torch.channels_last)


def work(which: str, count: int, side: int, batch: int) -> Callable[[], object]:
    """One convolution with tensors of its own."""
    kind, sides = torch.bfloat16, (side, side)
    x, weight, g = drawn(kind, batch, count, *sides), drawn(kind, count, count, 3, 3), drawn(kind, batch, count, *sides)
    return by_cudnn(which, x, weight, g, 1, 1)


def by_cudnn(which: str, x: Tensor, weight: Tensor, g: Tensor, stride: int, padding: int) -> Callable[[], object]:
    if which == "forward":
        return lambda: torch.nn.functional.conv2d(x, weight, stride=stride, padding=padding)
    wanted = [which == "input", which == "weight", False]
    shape: tuple[Any, ...] = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
    return lambda: torch.ops.aten.convolution_backward(g, x, weight, [0], *shape, wanted)


def by_ours(which: str, x: Tensor, weight: Tensor, g: Tensor, stride: int, padding: int) -> Callable[[], object]:
    if which == "forward":
        return lambda: tf32.forward(x, weight, stride, padding)
    if which == "input":
        return lambda: tf32.input_gradient(g, weight, x.shape, stride, padding)
    return lambda: tf32.weight_gradient(g, x, weight.shape, stride, padding)


def with_tensors(
    by: Callable[..., Callable[[], object]], which: str, shapes: tuple[tuple[int, ...], ...], stride: int, padding: int
) -> Callable[[], object]:
    return by(which, *(drawn(torch.float32, *shape) for shape in shapes), stride, padding)


def captured(make: Callable[[], Callable[[], object]], o: argparse.Namespace) -> Callable[[], float]:
    """Microseconds of one, with others beside it; each has tensors of its own."""
    jobs = [(make(), torch.cuda.Stream()) for _ in range(o.streams)]
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

    def once() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - began) / (TIMES * len(jobs))  # whose tensors the graph does not keep

    once()  # which warms up
    return once


def slimmed(o: argparse.Namespace) -> list[dict[str, Any]]:
    """cuDNN's convolutions in bf16, at several widths and sizes."""
    print(f"{'channels':>8}{'of':>5}{'side':>6}" + "".join(f"{name:>10}" for name in (*PASSES, "together")))
    found = []
    for stage, full in enumerate(STAGES):
        for size in map(int, o.sizes.split(",")):
            side = -(-size // 2**stage)
            for width in map(float, o.widths.split(",")):
                count = channels(full, width)
                makers = [partial(work, which, count, side, o.batch) for which in PASSES]
                runs = [captured(make, o) for make in makers]
                times = [statistics.median(run() for _ in range(o.repeats)) for run in runs]
                line = "".join(f"{t:10.1f}" for t in (*times, sum(times)))
                print(f"{count:8}{full:5}{side:6}{line}", flush=True)
                found.append({"full": full, "channels": count, "side": side, **dict(zip(PASSES, times, strict=True))})
    return found


def beside_ours(o: argparse.Namespace) -> list[dict[str, Any]]:
    """Convolutions in tf32, cuDNN's and ours."""
    torch.backends.cudnn.allow_tf32 = True
    print(f"{'layer':34}{'pass':>10}{'cuDNN us':>24}{'ours us':>24}{'cuDNN / ours':>24}")
    found: list[dict[str, Any]] = []
    for inside, side, outside, size, stride, padding in LAYERS:
        there = (side + 2 * padding - size) // stride + 1
        shapes = (o.batch, inside, side, side), (outside, inside, size, size), (o.batch, outside, there, there)
        layer = f"{inside} to {outside}, {size}x{size}, {side}x{side}" + (f", stride {stride}" if stride > 1 else "")
        for which in PASSES:
            if which == "weight" and size != 3:
                continue  # for which there is no kernel of ours
            makers = [partial(with_tensors, by, which, shapes, stride, padding) for by in (by_cudnn, by_ours)]
            runs = [captured(make, o) for make in makers]
            times = [[run() for run in runs] for _ in range(o.repeats)]
            theirs, ours = ([t[n] for t in times] for n in range(2))
            weight, ratios = torch.empty(shapes[1]), [a / b for a, b in times]
            used = {"input": tf32.input_is_ours(weight, stride), "weight": tf32.weight_is_ours(weight)}.get(which, True)
            cells = "".join(f"{text:>24}" for text in (spread(theirs), spread(ours), spread(ratios, 2)))
            print(f"{layer:34}{which:>10}{cells}{' *' if used else ''}", flush=True)
            found.append({"layer": layer, "pass": which, "cudnn": theirs, "ours": ours, "used": used})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["bf16", "tf32"], default="bf16")
    parser.add_argument("--widths", default="0.8,0.9,1")
    parser.add_argument("--sizes", default="32,28,24,20", help="sides of the network's pictures")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    o = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    if o.precision == "tf32" and not fused.available():
        raise SystemExit("--precision tf32 needs Triton")
    torch.backends.cudnn.deterministic = True
    torch.manual_seed(0)
    found = slimmed(o) if o.precision == "bf16" else beside_ours(o)
    print(f"microseconds, median of {o.repeats}; batch {o.batch}, {o.streams} streams")
    record.write(o, "cuda", found=found)


if __name__ == "__main__":
    main()
