"""What isofed aims at on a GPU, measured by one command: runs the benchmarks that say so, and shows each aim beside it.

Each benchmark writes its numbers into ``--out``, and one whose numbers are there is not run again. So what a time
limit cuts off, the next call goes on with; delete a file to measure anew.

    python benchmarks/goals.py --out found --data DATA         everything; DATA holds CIFAR-10 and 100
    python benchmarks/goals.py --out found --only clients,steps-bf16 --seconds 540
    python benchmarks/goals.py --out found --show              only the table
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import methods

Found = dict[str, Any]  # what the benchmarks have written, by the names of the parts
FASTER: dict[str, dict[str, float]] = {  # steps a second of the slots, relative to the eager loop
    "bf16": {"pfl-cnn": 15, "resnet56": 10, "mobilenetv2": 6, "resnet18": 7},
    "tf32": {"pfl-cnn": 12, "resnet56": 5, "mobilenetv2": 3.8, "resnet18": 3.5},
}


@dataclass(frozen=True)
class Aim:
    """Something that was measured, and what it should be: at least, or at most, this. Without either it is told."""

    what: str
    values: list[float]
    least: float | None = None
    most: float | None = None

    @property
    def aimed(self) -> str:
        if self.least is not None:
            return f"at least {self.least:g}"
        return "" if self.most is None else f"at most {self.most:g}"

    @property
    def verdict(self) -> str:
        middle = statistics.median(self.values)
        missed = (self.least is not None and middle < self.least) or (self.most is not None and middle > self.most)
        return "" if not self.aimed else "missed" if missed else "met"


@dataclass(frozen=True)
class Part:
    """A benchmark with its words, and how to read what it has found."""

    words: str
    read: Callable[[Found], Iterator[Aim]]
    data: bool = False  # whether it needs the folder of data


def _clients(found: Found) -> Iterator[Aim]:
    """The last of two populations is the large one."""
    (_, small), (name, large) = found["clients"]["runs"].items()
    pairs = list(zip(small, large, strict=True))
    who = f"{int(name):,} clients"
    for key, what, most in (("round", "a round", 1.05), ("peak", "memory", 1.1), ("gpu", "memory of the GPU", 1.1)):
        if key in small[0]:
            yield Aim(f"{who}: {what}, beside 100 clients", [b[key] / a[key] for a, b in pairs], most=most)
    yield Aim(f"{who}: start-up, seconds", [run["start"] for run in large], most=10)
    yield Aim(f"{who}: states kept, of those visited", [run["kept"] / run["visited"] for run in large], least=1)


def _steps(name: str) -> Callable[[Found], Iterator[Aim]]:
    def read(found: Found) -> Iterator[Aim]:
        for case in found[name]["cases"]:
            network, precision = case["network"], case["precision"]
            least = FASTER.get(precision, {}).get(network)
            yield Aim(f"steps: {network} {precision}, beside the eager loop", case["slots"][0]["ratios"], least=least)

    return read


def _fixed_order(found: Found) -> Iterator[Aim]:
    """Rates of two processes, so these are medians and no neighbours."""
    fixed = {c["network"]: c["slots"][0]["rates"] for c in found.get("steps-tf32", {}).get("cases", [])}
    for case in found["free"]["cases"]:
        network = case["network"]
        if network in fixed:
            ratio = statistics.median(case["slots"][0]["rates"]) / statistics.median(fixed[network])
            yield Aim(f"time of a fixed order: {network} tf32, beside a free one", [ratio], most=1.1)


def _methods(name: str) -> Callable[[Found], Iterator[Aim]]:
    def read(found: Found) -> Iterator[Aim]:
        for network, by_method in found[name]["found"].items():
            for method, case in by_method.items():
                if "ratios" in case:
                    most = methods.GOALS.get(method)
                    yield Aim(f"time of a round: {method} on {network}, beside FedAvg", case["ratios"], most=most)

    return read


def _peers(found: Found) -> Iterator[Aim]:
    runs = found["peers"]["runs"]
    ours = next(name for name in runs if name.startswith("isofed"))
    for name, theirs in runs.items():
        if name == ours:
            continue
        pairs = list(zip(runs[ours], theirs, strict=True))
        yield Aim(f"rounds a second, beside {name}", [a["rate"] / b["rate"] for a, b in pairs], least=10)
        for number in runs[ours][0]["accuracy"]:
            if int(number) > 20:
                means = [statistics.fmean(r["accuracy"][number] for r in some) for some in (runs[ours], theirs)]
                what = f"accuracy after round {number}, points from {name}'s"
                yield Aim(what, [100 * abs(means[0] - means[1])], most=1)


def _precision(found: Found) -> Iterator[Aim]:
    exact, other = found["precision"]["accuracy"].values()
    yield Aim("accuracy in bf16, points more than in fp32", [b - a for a, b in zip(exact, other, strict=True)])


def _refit(found: Found) -> Iterator[Aim]:
    seconds, peaks = found["refit"]["seconds"], found["refit"].get("peak_megabytes")
    ratios = [c / f for f, c in zip(seconds["ffc"], seconds["ccvr"], strict=True)]
    yield Aim("time of CCVR, beside FFC", ratios)
    if peaks:
        yield Aim("memory of SphereFed, beside FedAvg", [peaks["spherefed"] / peaks["fedavg"]])


def _limits(found: Found) -> Iterator[Aim]:
    for case in found["limits"]["cases"]:
        if "largest_deviation" in case:
            line = f"{case['constant_megabytes']:.0f} MB + {case['slot_megabytes']:.0f} MB a slot"
            yield Aim(f"memory of {case['network']}: away from {line}", [case["largest_deviation"]])


SMALL = "methods.py --networks feduv-cnn --slots 16 --clients 64"
PARTS = {  # what is cut off is lost, so none should take more than a few minutes
    "clients": Part("clients.py --device cuda --executor slots --slots 8 --repeats 3 --steps 10", _clients),
    "steps-bf16": Part("steps.py --precision bf16 --repeats 3", _steps("steps-bf16")),
    "steps-tf32": Part("steps.py --precision tf32 --repeats 3", _steps("steps-tf32")),
    "free": Part("steps.py --nondeterministic --networks pfl-cnn,resnet18 --precision tf32 --repeats 3", _fixed_order),
    "methods": Part("methods.py --networks resnet18 --warmup 1 --repeats 3", _methods("methods")),
    "methods-small": Part(f"{SMALL} --warmup 2", _methods("methods-small")),
    "peers": Part(
        "peers.py --device cuda --precision tf32 --rounds 40 --warmup 10 --frameworks isofed,pfl --data", _peers, True
    ),
    "precision": Part("precision.py --data cifar100 --model resnet8 --root", _precision, True),
    "refit": Part("refit.py --device cuda --repeats 2", _refit),
    "limits": Part("limits.py --slots 1,4,16", _limits),
}


def run(name: str, part: Part, options: argparse.Namespace, left: float) -> bool:
    """Run a benchmark for so many seconds at most; whether it has not failed."""
    script, *words = part.words.split()
    words += [options.data] if part.data else []
    made = options.out / f"{name}.part"
    command = [sys.executable, str(Path(__file__).with_name(script)), *words, "--json", str(made)]
    print(f"{name}: {' '.join([script, *words])}", flush=True)
    began = time.monotonic()
    with open(options.out / f"{name}.txt", "w+", encoding="utf-8") as said:
        started = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        try:
            started.wait(left)
        except subprocess.TimeoutExpired:
            print(f"{name}: the time was up after {left:.0f} s; it begins anew the next time")
            return True
        finally:
            with suppress(ProcessLookupError):  # some start processes of their own, which would go on
                os.killpg(started.pid, signal.SIGKILL)
            code = started.wait()
        said.seek(0)
        last = (said.read().strip() or "it said nothing").splitlines()[-1]
    if code or not made.exists():
        print(f"{name}: failed after {time.monotonic() - began:.0f} s: {last}")
        return False
    made.replace(options.out / f"{name}.json")
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    return True


def found_in(folder: Path) -> Found:
    """What has been measured so far."""
    files = {name: folder / f"{name}.json" for name in PARTS}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.exists()}


def show(found: Found) -> None:
    """All that was measured, beside what is aimed at."""
    aims = [aim for name, part in PARTS.items() if name in found for aim in part.read(found)]
    width = max((len(aim.what) for aim in aims), default=0)
    for aim in aims:
        middle, low, high = (f"{v:.3g}" for v in (statistics.median(aim.values), min(aim.values), max(aim.values)))
        spread = f"{middle} ({low} to {high})" if len(aim.values) > 1 else middle
        print(f"{aim.what:{width}}  {spread:>24}  {aim.aimed:14}  {aim.verdict}".rstrip())
    verdicts = [aim.verdict for aim in aims]
    missing = [name for name in PARTS if name not in found]
    print(f"{verdicts.count('met')} met, {verdicts.count('missed')} missed; medians (ranges)")
    if missing:
        print(f"not measured: {', '.join(missing)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for what is found; made if it is not there")
    parser.add_argument("--only", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--data", help="the folder with CIFAR-10 and CIFAR-100, as published; peers also needs pfl")
    parser.add_argument("--seconds", type=float, default=1e6, help="stop after this time")
    parser.add_argument("--show", action="store_true", help="run nothing")
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(PARTS)
    if unknown := [name for name in chosen if name not in PARTS]:
        parser.error(f"there is no part '{unknown[0]}'; choose of {', '.join(PARTS)}")
    began = time.monotonic()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out} cannot be made: {error.strerror}")
    failed = False
    if not options.show and not torch.cuda.is_available():
        raise SystemExit("these benchmarks need a GPU; --show shows what was measured elsewhere")
    for name in [] if options.show else chosen:
        left = options.seconds - (time.monotonic() - began)
        if (options.out / f"{name}.json").exists():
            continue
        if PARTS[name].data and not options.data:
            print(f"{name}: left out, it needs --data")
        elif left > 0:
            failed |= not run(name, PARTS[name], options, left)
    show(found_in(options.out))
    sys.exit(failed)


if __name__ == "__main__":
    main()
