"""Local steps a second on a GPU: the ``slots`` executor against the bare eager loop, in one process.

The bare loop is what one would write by hand: the data on the device as normalised floats, channels-last,
``torch.optim.SGD`` and autocast. isofed's time includes all of a visit: arrival, plan, steps and what is sent back; its
slots are made and captured before the clock starts, and that time is a column of its own. Both take turns. For a quick
look at any machine there is ``isofed bench``; this compares precisions and numbers of slots over longer rounds.

    python benchmarks/steps.py                                     the table
    python benchmarks/steps.py --networks pfl-cnn,resnet18 --precision bf16 --slots 1,4,16 --json steps.json
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import record
from isofed.bench import MODELS, Federated, bare_loop, chosen, spread
from isofed.engine.choose import exact_arithmetic
from isofed.engine.slots import Slots
from isofed.engine.world import World
from isofed.records import environment


def measure(network: str, precision: str, batch: int, counts: list[int | None], repeats: int, **more: Any) -> Any:
    common = {"model": network, "precision": precision, "batch_size": batch, "device": "cuda", **more}
    world = World.create(chosen(**common))
    with exact_arithmetic(world.settings):
        eager = bare_loop(world)
        eager(20)
        cases = {count: Federated(World.create(chosen(**common, slots=count))) for count in counts}
        rates: dict[Any, list[float]] = {key: [] for key in ["eager", *cases]}
        for _ in range(repeats):
            rates["eager"].append(eager(60))
            for count, run in cases.items():
                rates[count].append(run())
        found = {"eager": rates.pop("eager")}
        rows = []
        for count, run in cases.items():
            ratios = [a / b for a, b in zip(rates[count], found["eager"], strict=True)]
            assert isinstance(run.executor, Slots)
            rows.append(
                {
                    "asked": count,
                    "slots": run.count,
                    "graphs": run.executor.slots[0].graphs is not None,
                    "rates": rates[count],
                    "ratios": ratios,
                    "setup": run.seconds,
                    "notes": run.notes,
                }
            )
        peak = torch.cuda.max_memory_allocated() / 1e9
        for run in cases.values():
            run.close()
    return {"network": network, "precision": precision, "eager": found["eager"], "slots": rows, "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=MODELS["cuda"])
    parser.add_argument("--precision", default="bf16,tf32")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--slots", default="auto", help="numbers of slots, or auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nondeterministic", action="store_true")
    parser.add_argument("--json", type=record.file, help="write all numbers here")
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
    record.write(arguments, "cuda", cases=cases)


if __name__ == "__main__":
    main()
