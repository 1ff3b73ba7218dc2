"""Rounds a second and accuracy beside other frameworks, on the CIFAR-10 benchmark of pfl-research.

IID, 1,000 users of 50 pictures, 50 a round, one local epoch in batches of 10, plain SGD with a local learning rate of
0.1 and a server learning rate of 1, a central evaluation every 10 rounds, no augmentation, two convolutions with
1,626,442 parameters and dropout. Every framework gets the same split, the same normalised pictures and the same initial
weights. Each run is a process of its own (or several), and the frameworks take turns.

    python benchmarks/peers.py --data DATA                      isofed, pfl, Flower and a bare loop
    python benchmarks/peers.py --data DATA --frameworks isofed,pfl:1x2,pfl:2x1 --repeats 5
    python benchmarks/peers.py --data DATA --device cuda --precision tf32 --rounds 110 --frameworks isofed,pfl,pfl:4x1

DATA holds ``cifar-10-batches-bin``. A framework may be followed by processes x threads; on the CPU it is given two
processes of one thread each, and the bare loop (``loop``) one. ``loop:2x1`` is two bare loops side by side, each with
half of a round's clients, which exchange nothing: what two cores can do at best. Where others use the machine as well,
the processor time of a round (of all processes of a framework) says more than the clock does. The peers are not part of
isofed's environment: ``pip install pfl==0.6.0 'flwr[simulation]==1.41.0'``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import record
from peer_frameworks import RUN, arithmetic
from peer_task import Case, Clock

PACKAGES = {"pfl": "pfl", "flower": "flwr"}  # what a framework is installed and imported as


def child() -> None:
    """What a process of one run does: its case comes as JSON, and the times go to a file."""
    case, out = Case(**json.loads(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(case.threads)
    if case.framework != "isofed":
        arithmetic(case.precision)
    clock = Clock(case)
    RUN[case.framework](case, clock)
    out.write_text(json.dumps({"marks": clock.marks, "accuracy": clock.accuracy, "cpu": clock.cpu}))


def run(case: Case) -> dict[str, Any]:
    """Start the processes of one run and wait for them; the slowest one's times count."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        several = case.processes if case.framework in ("pfl", "loop") else 1
        path = os.pathsep.join([str(Path(__file__).parent), *(p for p in sys.path if p)])
        common = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(case.threads), "RAY_DEDUP_LOGS": "0"}
        common |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
        processes = []
        for rank in range(several):
            world = {"RANK": rank, "WORLD_SIZE": several, "LOCAL_WORLD_SIZE": several, "MASTER_PORT": port}
            # What torchrun would set; the rank on the machine chooses the GPU, and there is one.
            world |= {"LOCAL_RANK": rank if case.device == "cpu" else 0, "MASTER_ADDR": "127.0.0.1"}
            world |= {"TORCHELASTIC_RUN_ID": "peers", "PFL_PYTORCH_DEVICE": case.device}
            extra = {k: str(v) for k, v in world.items()} if several > 1 else {"PFL_PYTORCH_DEVICE": case.device}
            mine = dataclasses.replace(case, rank=rank)
            words = [sys.executable, "-c", "import peers; peers.child()", json.dumps(dataclasses.asdict(mine))]
            log = open(f"{folder}/{rank}.log", "wb")  # noqa: SIM115
            process = subprocess.Popen([*words, f"{folder}/{rank}"], env=common | extra, stdout=log, stderr=log)
            processes.append(process)
        for rank, process in enumerate(processes):
            if process.wait():
                tail = Path(f"{folder}/{rank}.log").read_text(errors="replace")[-3000:]
                for other in processes:
                    other.kill()
                raise SystemExit(f"{case.shape} failed:\n{tail}")
        results = [json.loads(Path(f"{folder}/{rank}").read_text()) for rank in range(several)]
    found: dict[str, Any] = max(results, key=lambda r: r["marks"][-1])
    timed = case.rounds - case.warmup
    return {
        "rate": timed / (found["marks"][-1] - found["marks"][case.warmup - 1]),
        "cpu": sum(r["cpu"] for r in results) / timed,
        "marks": found["marks"],
        "accuracy": results[0]["accuracy"],
    }


# Tables


def spread(values: list[float], digits: int) -> str:
    middle, low, high = (f"{v:.{digits}f}" for v in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def show(shapes: list[str], found: dict[str, list[dict[str, Any]]], warmup: int) -> None:
    first = shapes[0]
    print(f"\n{'':14}{'rounds a second':>26}{f'{first} is faster by':>28}{'CPU seconds a round':>28}")
    for shape in shapes:
        ratios = [a["rate"] / b["rate"] for a, b in zip(found[first], found[shape], strict=True)]
        rates, cpu = ([r[key] for r in found[shape]] for key in ("rate", "cpu"))
        faster = spread(ratios, 2) if shape != first else ""
        print(f"{shape:14}{spread(rates, 3):>26}{faster:>28}{spread(cpu, 2):>28}")
    print(f"median (range) of {len(found[first])} runs in turns; evaluations included, {warmup} rounds of warm-up not")
    judged = sorted({int(n) for r in found[first] for n in r["accuracy"]})
    if not judged:
        return
    print(f"\n{'accuracy %':14}" + "".join(f"{f'round {n}':>10}" for n in judged))
    means = {shape: [_mean(found[shape], n) for n in judged] for shape in shapes}
    for shape in shapes:
        print(f"{shape:14}" + "".join(f"{100 * m:10.2f}" for m in means[shape]))
    for shape in shapes[1:]:
        pairs = zip(means[first], means[shape], strict=True)
        print(f"{f'less {shape}':14}" + "".join(f"{100 * (a - b):+10.2f}" for a, b in pairs))
    print(f"means over {len(found[first])} runs")


def _mean(runs: list[dict[str, Any]], number: int) -> float:
    return statistics.fmean(r["accuracy"].get(str(number), float("nan")) for r in runs)


def shape_of(text: str, device: str) -> tuple[str, int, int]:
    """``pfl:2x1`` as a framework, its processes and the threads of each."""
    name, _, size = text.partition(":")
    if name not in RUN:
        raise SystemExit(f"there is no framework '{name}'; choose of {', '.join(RUN)}")
    several = device == "cpu" and name != "loop"
    processes, _, threads = (size or ("2x1" if several else "1x1")).partition("x")
    return name, int(processes), int(threads or 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="the folder that holds cifar-10-batches-bin")
    parser.add_argument(
        "--frameworks", default="isofed,pfl,flower,loop", help="each with :PROCESSESxTHREADS or without"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["fp32", "tf32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2, help="rounds that are not timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seeds", default="0,1,2", help="one for each repeat, from the beginning when they run out")
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    given = parser.parse_args()
    if not 0 < given.warmup < given.rounds:
        raise SystemExit("--warmup must be at least 1 and less than --rounds")
    if not (Path(given.data) / "cifar-10-batches-bin").is_dir():
        raise SystemExit(f"there is no folder cifar-10-batches-bin in {given.data}: isofed data get cifar10 fetches it")
    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda needs a GPU that PyTorch can use, and there is none here")
    seeds = [int(s) for s in given.seeds.split(",")]
    shapes = [shape_of(text, given.device) for text in given.frameworks.split(",")]
    if missing := sorted({p for name, p in PACKAGES.items() if name in {s[0] for s in shapes} and not find_spec(p)}):
        raise SystemExit(f"{' and '.join(missing)} cannot be imported; install the peers, or choose --frameworks")
    found: dict[str, list[dict[str, Any]]] = {}
    for repeat in range(given.repeats):
        for name, processes, threads in shapes:
            seed = seeds[repeat % len(seeds)]
            size = given.rounds, given.warmup
            case = Case(name, given.data, seed, *size, given.device, given.precision, processes, threads)
            result = run(case) | {"seed": seed}
            found.setdefault(case.shape, []).append(result)
            said = ", ".join(f"{100 * a:.2f} % after {n}" for n, a in result["accuracy"].items())
            speed = f"{result['rate']:.3f} rounds a second, {result['cpu']:.2f} CPU seconds a round"
            print(f"{case.shape}, seed {seed}: {speed}; {said}", flush=True)
    show(list(found), found, given.warmup)
    record.write(given, given.device, tuple({PACKAGES[name] for name, _, _ in shapes if name in PACKAGES}), runs=found)


if __name__ == "__main__":
    main()
