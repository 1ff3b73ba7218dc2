"""What each remedy costs: time of a round relative to FedAvg's, in one run on a GPU.

Every method trains the same clients for as many steps from the same weights, on the ``slots`` executor, taking turns. A
second visit is measured, so that client states (SCAFFOLD's control variates, MOON's last models) are there.

    python benchmarks/methods.py
    python benchmarks/methods.py --networks resnet18 --methods fedprox,feduv --repeats 9 --json methods.json
    python benchmarks/methods.py --networks feduv-cnn --size 96 --batch 128     as FedUV uses it, on STL-10
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

import record
from isofed.bench import Federated, chosen, spread
from isofed.engine.choose import exact_arithmetic
from isofed.engine.world import World
from isofed.records import environment

METHODS = "fedprox,feddecorr,feduv,univarfl,spherefed,scaffold,fedalign,moon,gradaug:n=2"
GOALS = {"fedprox": 1.05, "feddecorr": 1.05, "feduv": 1.05, "univarfl": 1.05, "spherefed": 1.02, "scaffold": 1.05}
GOALS |= {"fedalign": 1.25, "moon": 1.7, "gradaug:n=2": 2.3}


def measure(network: str, o: argparse.Namespace) -> dict[str, Any]:
    """Rates of FedAvg and of each method in turn; one method's replicas are on the GPU at a time beside FedAvg's."""
    common: dict[str, Any] = {"model": network, "precision": o.precision, "slots": o.slots, "device": "cuda"}
    common |= {"batch_size": o.batch, "size": o.size, "clients": o.clients, "samples": 2 * o.batch}
    plain = World.create(chosen(**common))
    found: dict[str, Any] = {}
    with exact_arithmetic(plain.settings):
        base = Federated(plain, o.clients)
        base()
        for method in o.methods.split(","):
            # The small network has no pixel left of the smallest pictures.
            small = "gradaug" in method and network == "feduv-cnn" and o.size == 32
            text = f"{method},sizes=32/28/24" if small else method
            run = Federated(World.create(chosen(**common, method=text)), o.clients)
            for _ in range(o.warmup):
                run()
            pairs = [(base(), run()) for _ in range(o.repeats)]
            peak = torch.cuda.max_memory_allocated() / 1e9
            ratios = [without / with_it for without, with_it in pairs]
            found[method] = {"ratios": ratios, "rates": [b for _, b in pairs], "setup": run.seconds, "peak": peak}
            run.close()
            goal = f"at most {GOALS[method]}" if method in GOALS else ""
            print(f"{network:16}{method:16}{spread(ratios, 3):>28}{goal:>16}{run.seconds:>10.1f}", flush=True)
        found["fedavg"] = {"rates": [base() for _ in range(o.repeats)]}
        base.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="resnet18,feduv-cnn")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--clients", type=int, default=32, help="visits in a round, of 32 steps each")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=32, help="side of the pictures")
    parser.add_argument("--warmup", type=int, default=0, help="rounds before, in which GradAug captures what it draws")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    about = environment("cuda", "")
    print(f"{about['device_name']}, torch {about['torch']}, {arguments.precision}, {arguments.slots} slots")
    print(f"batch {arguments.batch}, pictures of {arguments.size} x {arguments.size}")
    print(f"{'network':16}{'method':16}{'time, FedAvg = 1':>28}{'goal':>16}{'set-up s':>10}")
    found = {}
    for network in arguments.networks.split(","):
        found[network] = measure(network, arguments)
        rate = statistics.median(found[network]["fedavg"]["rates"])
        print(f"{network:16}{'fedavg':16}{rate:>20.0f} steps/s")
    print(f"median (range) of {arguments.repeats} repeats in turns with FedAvg")
    record.write(arguments, "cuda", found=found)


if __name__ == "__main__":
    main()
