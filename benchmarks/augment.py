"""What an augmentation costs, next to the training step it belongs to.

Times each augmentation of a batch of 128 pictures of 32 x 32 x 3, and one training step of a ResNet-18 (11 M
parameters, the form for small pictures) on the same batch and device, in turns, so that whatever else the machine does
falls on all of them. On a GPU the pictures of several steps are changed together and each is captured as a CUDA graph
and replayed, both as the engine does it; ``--eager`` calls it, ``--together 1`` takes one batch at a time. Random
numbers are drawn beforehand, on the host; a column says what that takes.

    python benchmarks/augment.py                       the table, on the GPU if there is one
    python benchmarks/augment.py --device cpu --repeats 5 --json augment.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import record
from isofed.data.augment import parse
from isofed.draws import generator
from isofed.engine.step import steps_ahead
from isofed.records import environment

BATCH, SHAPE = 128, (3, 32, 32)
TEXTS = [
    "crop:4+flip",
    "rotation:15",
    "rotation:15,bilinear",
    "resized_crop",
    "jitter:0.4",
    "resized_crop+jitter:0.4+flip",
    "autoaugment",
    "crop:4+flip+autoaugment",
]
STEP = "training step"
DRAWN_STEPS = 100


class Block(nn.Module):
    """Two convolutions of 3 x 3 and a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *(nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()),
            *(nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.branch(x) + self.shortcut(x))


def resnet18(classes: int = 10) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(SHAPE[0], 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    inside = 64
    for outside, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(inside, outside, stride), Block(outside, outside, 1)]
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


def training_step(images: Tensor, bf16: bool) -> Callable[[], None]:
    """Forward, backward and a plain update, as a function that reads no value on the host."""
    network = resnet18().to(images.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parameters = list(network.parameters())
    labels = torch.arange(BATCH, device=images.device) % 10

    def step() -> None:
        inputs = images.float().mul_(1 / 255).permute(0, 3, 1, 2)
        cast = torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False) if bf16 else nullcontext()
        with cast:
            loss = cross_entropy(network(inputs), labels)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, list(gradients), alpha=-1e-4)

    return step


def captured(work: Callable[[], Any]) -> Callable[[], None]:
    """The same work as one CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def milliseconds(work: Callable[[], Any], calls: int, device: torch.device) -> float:
    """A call's share of the time that several take, one after the other."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - began) / calls


def measure(device: torch.device, repeats: int, eager: bool, bf16: bool, together: int) -> dict[str, dict[str, Any]]:
    channels, height, width = SHAPE
    levels = generator(0, "pictures").integers(0, 256, (together * BATCH, height, width, channels), dtype=np.uint8)
    images = torch.from_numpy(levels).to(device)
    works: dict[str, Callable[[], Any]] = {STEP: training_step(images[:BATCH], bf16)}
    drawing: dict[str, float] = {}
    for text in TEXTS:
        made = parse(text)
        made.draw(1, BATCH, generator(0, "draws"), SHAPE)  # warms up
        began = time.perf_counter()
        drawn = made.draw(DRAWN_STEPS, BATCH, generator(0, "draws"), SHAPE)
        drawing[text] = 1e3 * (time.perf_counter() - began) / DRAWN_STEPS
        here = {k: torch.from_numpy(v[:together]).to(device).flatten(0, 1) for k, v in drawn.items()}
        works[text] = lambda made=made, here=here: made.apply(images, here)  # type: ignore[misc]
    if device.type == "cuda" and not eager:
        works = {name: captured(work) for name, work in works.items()}
    few = device.type == "cpu"
    calls = {name: (1 if name == STEP else 5) if few else 50 for name in works}
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(repeats + 1):
        for name, work in works.items():
            found = milliseconds(work, calls[name], device)
            if repeat:  # the first round warms up
                times[name].append(found if name == STEP else found / together)
    return {
        name: {"milliseconds": values, "drawing": drawing.get(name), "share": _shares(values, times[STEP])}
        for name, values in times.items()
    }


def _shares(values: list[float], steps: list[float]) -> list[float]:
    return [100 * value / step for value, step in zip(values, steps, strict=True)]


def _cell(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=record.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--eager", action="store_true", help="on a GPU, call instead of replaying a CUDA graph")
    parser.add_argument("--together", type=int, help="steps whose pictures are changed together; as the engine does")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16 autocast")
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    one = torch.empty((1, *SHAPE), dtype=torch.uint8, device=device)
    together = arguments.together or steps_ahead(BATCH, one)
    found = measure(device, arguments.repeats, arguments.eager, arguments.bf16, together)
    about = environment(str(device), "")
    print(f"{about['device_name']}, torch {about['torch']}, {torch.get_num_threads()} threads")
    print(f"{'':30}{'ms a batch':>30}{'% of a training step':>30}{'ms drawing':>12}")
    for name, result in found.items():
        share = "" if name == STEP else _cell(result["share"], 2)
        drawing = "" if result["drawing"] is None else f"{result['drawing']:.3f}"
        print(f"{name:30}{_cell(result['milliseconds'], 3):>30}{share:>30}{drawing:>12}")
    print(f"median (range) of {arguments.repeats} repeats in turns, batches of {BATCH} pictures of 32 x 32 x 3")
    print(f"pictures of {together} steps are changed together")
    arguments.together = together
    record.write(arguments, str(device), cases=found)


if __name__ == "__main__":
    main()
