"""What it takes to refit the head after the last round: FFC against CCVR, and SphereFed's memory against FedAvg's.

The closed form (FFC) asks each client for two matrices, CCVR for the statistics of its features class by class, from
which the server draws virtual features and trains a new head. Both see the same model and the same clients, in turns.
The clock runs over the whole exchange: the clients' passes over their data, the sums, and the server's part. On a GPU
the peak memory of a training round under SphereFed is set beside FedAvg's as well.

    python benchmarks/refit.py --device cuda
    python benchmarks/refit.py --device cpu --samples 2000 --model cnn --json refit.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import record
from isofed.engine.choose import exact_arithmetic, executor_for
from isofed.federation import Federation
from isofed.questions import Questions
from isofed.records import environment


def federation(method: str, arguments: argparse.Namespace) -> Federation:
    return Federation(
        method=method,
        data=f"synthetic:samples={arguments.samples},test=500,size=32,channels=3,classes={arguments.classes}",
        partition="dirichlet:0.5",
        clients=10,
        model=arguments.model,
        rounds=1,
        local_epochs=1,
        batch_size=64,
        train_loss=False,
        device=arguments.device,
    )


def exchange_seconds(methods: list[str], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each method's last exchange, from the initial weights, in turns."""
    found: dict[str, list[float]] = {method: [] for method in methods}
    runs = {method: federation(method, arguments) for method in methods}
    for repeat in range(arguments.repeats + 1):
        for name, run in runs.items():
            ((question, method),) = run.settings.method.exchanges
            questions = Questions(run.world, run.layout, run.device)
            with exact_arithmetic(run.settings), executor_for(run.world, run.device, None) as executor:
                executor.score("test", torch.arange(500).numpy(), run.state.weights)  # the data are on the device
                began = time.perf_counter()
                sent = run.settings.method.send(run.state.server)
                questions.ask(question, method, run.state.weights, sent, run.state.clients.get, executor)
                if run.device.type == "cuda":
                    torch.cuda.synchronize()
                if repeat:  # the first one warms up
                    found[name].append(time.perf_counter() - began)
    return found


def peaks(arguments: argparse.Namespace) -> dict[str, float]:
    """Megabytes that a round takes at most on the GPU, for FedAvg and SphereFed."""
    found = {}
    for method in ("fedavg", "spherefed"):
        run = federation(method, arguments)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run.fit()
        found[method] = (torch.cuda.max_memory_allocated() - before) / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=record.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    arguments = parser.parse_args()
    about = environment(arguments.device, "")
    print(
        f"{about['device_name']}, torch {about['torch']}, {arguments.model}, {arguments.samples} pictures, 10 clients"
    )
    found: dict[str, Any] = {"seconds": exchange_seconds(["ffc", "ccvr"], arguments)}
    for name, values in found["seconds"].items():
        print(f"{name:12}{statistics.median(values):8.2f} s ({min(values):.2f} to {max(values):.2f})")
    pairs = zip(*found["seconds"].values(), strict=True)
    print(f"CCVR takes {statistics.median(c / f for f, c in pairs):.1f} times as long")
    if arguments.device.startswith("cuda"):
        found["peak_megabytes"] = peaks(arguments)
        print(
            ", ".join(f"{name} {value:.0f} MB" for name, value in found["peak_megabytes"].items()), "at most in a round"
        )
    record.write(arguments, arguments.device, **found)


if __name__ == "__main__":
    main()
