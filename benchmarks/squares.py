"""What 3x3 convolutions on one core of a processor take: PyTorch's own, and those of `models/winograd.c` beside them.

Milliseconds of a forward pass and all gradients, in turns, over a grid of channels, sides of pictures and batches. By
its numbers `Cut.pays` was set, which says for which layers the second are used: those with a star.

    python benchmarks/squares.py
    python benchmarks/squares.py --channels 32x64 --sides 30 --batches 10,50 --repeats 40 --json squares.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import conv2d

import record
from isofed.bench import spread
from isofed.models.winograd import Cut, available, convolution

MOST = 2**28  # multiplications of a layer, squares counted by the definition: what takes longer is left out


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last).requires_grad_()


def both(cut: Cut, repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds of PyTorch's own and of ours."""
    x, weight = drawn(cut.pictures, cut.inside, cut.rows, cut.columns), drawn(cut.outside, cut.inside, 3, 3)
    g = drawn(cut.pictures, cut.outside, cut.height, cut.width).detach()
    ways: list[Callable[[], Tensor]] = [
        lambda: conv2d(x, weight, padding=1),
        lambda: convolution(x, weight, None, (1, 1), pool=False),
    ]
    found: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 2):
        for way, times in zip(ways, found, strict=True):
            taken = seconds(lambda way=way: torch.autograd.grad(way(), [x, weight], g))  # type: ignore[misc]
            if repeat >= 2:  # the first ones make things ready
                times.append(1e3 * taken)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", default="16x16,32x32,64x64,128x128,256x256,512x512")
    parser.add_argument("--sides", default="4,8,16,32", help="of pictures")
    parser.add_argument("--batches", default="1,10,64")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    given = parser.parse_args()
    if not available():
        raise SystemExit("these convolutions need a processor with AVX-512 and a C compiler")
    torch.set_num_threads(1)
    found = []
    print(f"{'layer':>12}{'side':>6}{'batch':>7}{'PyTorch, ms':>26}{'ours, ms':>26}{'ratio':>24}")
    for channels in given.channels.split(","):
        inside, outside = map(int, channels.split("x"))
        for side in map(int, given.sides.split(",")):
            for batch in map(int, given.batches.split(",")):
                if batch * side**2 * inside * outside > MOST:
                    continue
                cut = Cut(batch, inside, outside, side, side, 1, 1, pool=False)
                theirs, ours = both(cut, given.repeats)
                ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
                cells = f"{spread(theirs, 3):>26}{spread(ours, 3):>26}{spread(ratios, 2):>24}"
                print(f"{channels:>12}{side:6}{batch:7}{cells}{' *' if cut.pays else ''}", flush=True)
                found.append({"layer": [batch, inside, outside, side], "theirs": theirs, "ours": ours})
    print(f"median (range) of {given.repeats} repeats in turns, one core")
    record.write(given, "cpu", milliseconds=found)


if __name__ == "__main__":
    main()
