"""Local steps a second on a GPU: the ``slots`` executor against the bare eager loop, in one process.

The bare loop is what one would write by hand: the data on the device as normalised floats, channels-last,
``torch.optim.SGD`` and autocast. isofed's time includes all of a visit: arrival, plan, steps and what is sent back; its
slots are made and captured before the clock starts, and that time is a column of its own. Both take turns.

    python benchmarks/steps.py                                     the table
    python benchmarks/steps.py --networks pfl-cnn,resnet18 --precision bf16 --slots 1,4,16 --json steps.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from isofed.config import settings
from isofed.engine.choose import exact_arithmetic
from isofed.engine.replica import Job
from isofed.engine.slots import Slots
from isofed.engine.step import Pictures
from isofed.engine.world import World
from isofed.layout import Layout, Tensors
from isofed.models.dropout import Dropout
from isofed.records import environment

NETWORKS = "pfl-cnn,resnet56,mobilenetv2,resnet18"
CLIENTS, STEPS = 64, 32  # in a round: the steps of each client
LR, MOMENTUM, DECAY = 0.01, 0.9, 1e-4


def world_of(network: str, precision: str, batch: int, slots: int | None, **more: Any) -> World:
    chosen: dict[str, Any] = {
        "data": f"synthetic:samples={CLIENTS * 512},test=512,size=32,channels=3,classes=10",
        "partition": "iid",
        "clients": CLIENTS,
        "model": network,
        "batch_size": batch,
        "local_steps": STEPS,
        "lr": LR,
        "momentum": MOMENTUM,
        "weight_decay": DECAY,
        "precision": precision,
        "device": "cuda",
        "slots": slots,
        "rounds": 1000,  # so that as many slots are made as a long run would
    }
    return World.create(settings(chosen | more))


def eager_loop(world: World) -> Callable[[int], float]:
    """A function that takes some steps and gives steps a second."""
    s, device = world.settings, torch.device("cuda")
    pictures = Pictures(world.parts["train"], world.dataset, device)
    inputs = pictures.normalised(pictures.images)
    network = world.network().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in network.modules():  # PyTorch's own dropout, which draws by itself
        for name, layer in module.named_children():
            if isinstance(layer, Dropout):
                setattr(module, name, torch.nn.Dropout(layer.p))
    optimiser = torch.optim.SGD(network.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    order = torch.randperm(len(inputs), device=device)

    def run(steps: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for step in range(steps):
            start = step * s.batch_size % (len(order) - s.batch_size)
            index = order[start : start + s.batch_size]
            optimiser.zero_grad()
            with torch.autocast("cuda", torch.bfloat16) if s.precision == "bf16" else nullcontext():
                loss = cross_entropy(network(inputs[index]).logits.float(), pictures.labels[index])
            loss.backward()
            optimiser.step()
        torch.cuda.synchronize()
        return steps / (time.perf_counter() - began)

    return run


class Federated:
    """Rounds of visits on the ``slots`` executor, from the same weights each time."""

    def __init__(self, world: World, clients: int = CLIENTS) -> None:
        began, device = time.perf_counter(), torch.device("cuda")
        self.notes: list[str] = []
        self.slots = Slots(world, device, self.notes.append)
        self.method, self.fractions, self.clients = world.settings.method, world.fractions(), clients
        network = world.network()
        layout = Layout.of(network, self.method.share(network))
        self.weights = layout.pack(network, device)
        self.server = self.method.server_state(world.context(layout, device))
        self.states: dict[int, Tensors] = {}
        self.number = 0
        self()  # makes the slots
        self.seconds = time.perf_counter() - began

    def __call__(self) -> float:
        """One round; steps a second."""
        self.number += 1
        jobs = [Job(self.number, c, LR, float(self.fractions[c])) for c in range(self.clients)]
        torch.cuda.synchronize()
        began = time.perf_counter()
        steps, new = 0, {}
        for outcome in self.slots.train(jobs, self.weights, self.method.send(self.server), self.states.get):
            assert outcome.problem is None, outcome.problem
            steps += outcome.steps
            new[outcome.client] = outcome.state
        torch.cuda.synchronize()
        self.states |= new
        return steps / (time.perf_counter() - began)


def measure(network: str, precision: str, batch: int, counts: list[int | None], repeats: int, **more: Any) -> Any:
    world = world_of(network, precision, batch, None, **more)
    with exact_arithmetic(world.settings):
        eager = eager_loop(world)
        eager(20)
        cases = {count: Federated(world_of(network, precision, batch, count, **more)) for count in counts}
        rates: dict[Any, list[float]] = {key: [] for key in ["eager", *cases]}
        for _ in range(repeats):
            rates["eager"].append(eager(60))
            for count, run in cases.items():
                rates[count].append(run())
        found = {"eager": rates.pop("eager")}
        rows = []
        for count, run in cases.items():
            ratios = [a / b for a, b in zip(rates[count], found["eager"], strict=True)]
            rows.append(
                {
                    "asked": count,
                    "slots": len(run.slots.slots),
                    "graphs": run.slots.slots[0].graphs is not None,
                    "rates": rates[count],
                    "ratios": ratios,
                    "setup": run.seconds,
                    "notes": run.notes,
                }
            )
        peak = torch.cuda.max_memory_allocated() / 1e9
        for run in cases.values():
            run.slots.close()
    return {"network": network, "precision": precision, "eager": found["eager"], "slots": rows, "peak": peak}


def spread(values: list[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=NETWORKS)
    parser.add_argument("--precision", default="bf16,tf32")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--slots", default="auto", help="numbers of slots, or auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nondeterministic", action="store_true")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    counts = [None if n == "auto" else int(n) for n in arguments.slots.split(",")]
    about = environment("cuda", "")
    print(f"{about['device_name']}, torch {about['torch']}, batch {arguments.batch}, pictures of 32 x 32 x 3")
    print(f"{'':24}{'eager steps/s':>26}{'slots':>7}{'steps/s':>30}{'ratio':>24}{'set-up s':>10}")
    cases = []
    for precision in arguments.precision.split(","):
        for network in arguments.networks.split(","):
            more = {"deterministic": not arguments.nondeterministic}
            case = measure(network, precision, arguments.batch, counts, arguments.repeats, **more)
            cases.append(case)
            for row in case["slots"]:
                first = f"{network} {precision}"
                print(
                    f"{first:24}{spread(case['eager']):>26}{row['slots']:>7}{spread(row['rates']):>30}"
                    f"{spread(row['ratios'], 2):>24}{row['setup']:>10.1f}",
                    *row["notes"],
                    flush=True,
                )
    print(f"median (range) of {arguments.repeats} repeats in turns")
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": about, "cases": cases}, indent=2) + "\n")


if __name__ == "__main__":
    main()
