"""What a federation costs beyond the training itself.

Times rounds of a federation against a bare PyTorch loop over the same batches, side by side in one run, and prints the
ratio of each repeat: ``serial`` should stay within a few percent of the bare loop, ``workers`` should approach the
number of cores. The bare loop is what one would write by hand: load the global weights, run ``torch.optim.SGD`` over
the client's batches on one thread, add up the weighted weights; its pictures are already normalised floats.

    python benchmarks/overhead.py                      the table
    python benchmarks/overhead.py --repeats 9 --json overhead.json
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import record
from isofed.config import settings
from isofed.draws import generator
from isofed.engine.plan import batches
from isofed.engine.step import Pictures
from isofed.engine.workers import Pool
from isofed.engine.world import World
from isofed.federation import Federation
from isofed.models import has_batch_norm

CASES = {
    "cnn, 8x8x1, batch 32": {"data": "digits", "batch_size": 32, "local_epochs": 5},
    "cnn, 32x32x3, batch 64": {
        "data": "synthetic:samples=2000,test=100,size=32,channels=3",
        "batch_size": 64,
        "local_epochs": 2,
    },
}
COMMON: dict[str, Any] = {
    "partition": "dirichlet:0.5",
    "clients": 10,
    "rounds": 3,
    "evaluate_every": 3,
    "train_loss": False,
    "weight_decay": 1e-4,
}


def bare_loop(world: World) -> Callable[[], float]:
    """A function that trains all rounds and gives the seconds."""
    s = world.settings
    pictures = Pictures(world.parts["train"], world.dataset, torch.device("cpu"))
    inputs, labels = pictures.normalised(pictures.images).contiguous(memory_format=torch.channels_last), pictures.labels
    initial = world.network().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    batch_norm = has_batch_norm(initial)
    order = [
        [
            [torch.from_numpy(row[:n].astype(np.int64)) for row, n in zip(made.order, made.sizes, strict=True)]
            for client, samples in enumerate(world.clients)
            for made in [batches(samples, s, batch_norm, generator(s.seed, "order", round, client))]
        ]
        for round in range(1, s.rounds + 1)
    ]
    total = sum(map(len, world.clients))

    def train() -> float:
        network = copy.deepcopy(initial)
        weights = {k: v.clone() for k, v in network.state_dict().items()}
        began = time.perf_counter()
        for round in order:
            mean = {k: torch.zeros_like(v) for k, v in weights.items()}
            for client, rows in enumerate(round):
                network.load_state_dict(weights)
                optimiser = torch.optim.SGD(network.parameters(), s.lr, s.momentum, weight_decay=s.weight_decay)
                network.train()
                for row in rows:
                    loss = cross_entropy(network(inputs[row]).logits, labels[row])
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
                for name, value in network.state_dict().items():
                    mean[name].add_(value, alpha=len(world.clients[client]) / total)
            weights = mean
        return time.perf_counter() - began

    return train


def federation(chosen: dict[str, Any], pool: Pool | None) -> float:
    """Seconds spent in the rounds of a federation."""
    return Federation(**chosen, pool=pool).fit().seconds


def measure(case: dict[str, Any], repeats: int, pool: Pool) -> dict[str, Any]:
    chosen = COMMON | case
    world = World.create(settings(chosen))
    train = bare_loop(world)
    times: dict[str, list[float]] = {"bare": [], "serial": [], "workers": []}
    train()  # warm up
    federation(chosen | {"executor": "workers"}, pool)
    for _ in range(repeats):
        times["bare"].append(train())
        times["serial"].append(federation(chosen | {"executor": "serial"}, None))
        times["workers"].append(federation(chosen | {"executor": "workers"}, pool))
    steps = sum(
        len(batches(c, world.settings, True, generator(0, "order", 1, n)).sizes) for n, c in enumerate(world.clients)
    )
    ratios = {
        "serial over bare": [s / b for s, b in zip(times["serial"], times["bare"], strict=True)],
        "speed-up of two workers": [b / w for w, b in zip(times["workers"], times["bare"], strict=True)],
    }
    bare = statistics.median(times["bare"]) / steps / COMMON["rounds"]
    return {"milliseconds_per_bare_step": 1e3 * bare, "seconds": times, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with Pool(2) as pool:
        for name, case in CASES.items():
            found[name] = measure(case, arguments.repeats, pool)
    print(f"{'':24}{'bare ms/step':>14}{'serial / bare':>24}{'bare / two workers':>26}")
    for name, result in found.items():
        cells = [
            f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
            for values in result["ratios"].values()
        ]
        print(f"{name:24}{result['milliseconds_per_bare_step']:14.2f}{cells[0]:>24}{cells[1]:>26}")
    print(f"median (range) of {arguments.repeats} repeats, each beside its own bare loop")
    record.write(arguments, "cpu", cases=found)


if __name__ == "__main__":
    main()
