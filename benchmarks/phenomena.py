"""Does what the papers saw show? Runs with more and more skewed labels, what became of their models, and a verdict.

FedAvg on splits from even to very skewed, then FedDecorr and a frozen head on a skewed one. All local models of the
last round and the global model are looked at through the test part (``isofed.diagnostics``). The claims:

- stronger heterogeneity leaves fewer significant singular values, in the global model and in local ones (FedDecorr);
- FedDecorr raises the tail of the spectrum;
- a frozen head keeps its spectrum, a trained one does not (FedUV, UniVarFL);
- FedAvg's classifiers align less as labels become more skewed (SphereFed).

A verdict is about these runs: ``shown`` where each step goes as claimed, ``at the ends`` where only the first and the
last split do, ``not shown`` otherwise.

    python benchmarks/phenomena.py                              digits, some minutes on a CPU
    python benchmarks/phenomena.py --data datasets --device cuda --precision bf16 --minutes 3 --json phenomena.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from isofed.diagnose import Diagnosis, Options
from isofed.diagnostics import classifier_spectrum
from isofed.errors import UserError
from isofed.federation import Federation
from isofed.records import environment

SPLITS = ("iid", "dirichlet:0.5", "dirichlet:0.1", "dirichlet:0.05", "dirichlet:0.01")  # from even to skewed
SKEWED = "dirichlet:0.05"  # where remedies are looked at
ON_DIGITS: dict[str, Any] = {"data": "digits", "model": "cnn", "batch_size": 32, "local_epochs": 5}
ON_CIFAR: dict[str, Any] = {
    "data": "cifar100",
    "model": "resnet18",
    "batch_size": 64,
    "local_epochs": 4,
    "weight_decay": 1e-4,
    "augment": "crop:4+flip",
}
Found = dict[str, dict[str, dict[str, Any]]]  # by method, then by split


def plan(decorrelated: str) -> list[tuple[str, str]]:
    """Methods and splits, the most telling first: what the time does not suffice for is left out at the end."""
    first = [("fedavg", SKEWED), ("fedavg", "iid"), (decorrelated, SKEWED), ("freeze", SKEWED)]
    return first + [("fedavg", split) for split in reversed(SPLITS) if split not in (SKEWED, "iid")]


def tail(values: Sequence[float]) -> float:
    """Mean natural logarithm of the values between an eighth and a half of all, beyond what classes alone need."""
    part = torch.tensor(values[len(values) // 8 : len(values) // 2], dtype=torch.float64)
    return float(part.clamp(min=1e-12).log().mean())


def measure(chosen: dict[str, Any], samples: int) -> dict[str, Any]:
    """One run and what its models look like."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run = Federation(**chosen, out=out, keep_clients="last", diagnose="every:1", train_loss=False)
        head = run.world.network().state_dict()["head.weight"].clone()
        result = run.fit()
        trained = time.perf_counter() - began
        clients = len(run.world.clients)
        looked = Diagnosis(out, Options(samples=samples, clients=clients, device=chosen["device"]))
        models = looked.measure("spectra")["models"]
        alignment = looked.measure("alignment")[-1]
    whole, local = ([m for m in models if (m["client"] is None) == own] for own in (True, False))
    before, after = (classifier_spectrum(weight).values for weight in (head, result.weights["head.weight"].cpu()))
    by_round = [{name: line[name] for name in ("round", "significant", "alignment")} for line in run.diagnostics]
    return {
        "accuracy": result.accuracy,
        "significant": [m["significant"] for m in (whole[-1], *local)],  # the global model first, then the clients
        "effective_rank": [m["representation_effective_rank"] for m in (whole[-1], *local)],
        "tail": [tail(m["representation_spectrum"]) for m in (whole[-1], *local)],
        "spectrum": whole[-1]["representation_spectrum"],
        "local_spectrum": local[0]["representation_spectrum"],
        "gap": statistics.mean(m["gap"] for m in local),
        "cosine": alignment["cosine"],
        "norm_difference": alignment["norm_difference"],
        "head_change": float((after - before).abs().max() / before.max()),
        "head_sum": [float(before.sum()), float(after.sum())],
        "by_round": by_round,
        "seconds": trained,
        "seconds_looking": time.perf_counter() - began - trained,
    }


def pooled(one: dict[str, Any], name: str) -> tuple[float, float]:
    """Of the global model, and the mean of the local ones."""
    return one[name][0], statistics.mean(one[name][1:])


def row(method: str, split: str, one: dict[str, Any]) -> str:
    pairs = {name: pooled(one, name) for name in ("significant", "effective_rank", "tail")}
    cells = "".join("{:8.2f} /{:6.2f}".format(*pair) for pair in pairs.values())
    last = f"{one['gap']:+7.2f}{one['cosine']:8.3f}{one['norm_difference']:9.3f}{one['seconds']:9.0f}"
    return f"{method:12}{split:16}{100 * one['accuracy']:7.1f}{cells}{last}"


def trend(values: Sequence[float], sign: int = 1) -> str:
    """Whether values fall (``sign`` 1) or rise from the first to the last."""
    signed = [sign * value for value in values]
    if len(signed) < 2:
        return "not measured"
    if not signed[-1] < signed[0]:
        return "not shown"
    return "shown" if all(b <= a for a, b in itertools.pairwise(signed)) else "at the ends"


def verdicts(found: Found, decorrelated: str) -> list[dict[str, str]]:
    """Each claim, what was seen, and whether it showed."""
    plain = {split: one for split in SPLITS if (one := found.get("fedavg", {}).get(split))}

    def along(claim: str, values: list[float], form: str, sign: int = 1) -> dict[str, str]:
        pairs = zip((split.removeprefix("dirichlet:") for split in plain), values, strict=True)
        seen = ", ".join(f"{split} {value:{form}}" for split, value in pairs)
        return {"claim": claim, "seen": seen, "verdict": trend(values, sign)}

    lines = []
    for name, form in (("significant", ".1f"), ("effective_rank", ".1f")):
        for place, which in enumerate(("global model", "local models")):
            told = "fewer significant singular values" if name == "significant" else "a lower effective rank"
            values = [pooled(one, name)[place] for one in plain.values()]
            lines.append(along(f"skew gives {told}, {which}", values, form))
    lines.append(along("skew turns FedAvg's classifiers apart (cosine)", [o["cosine"] for o in plain.values()], ".3f"))
    lengths = [one["norm_difference"] for one in plain.values()]
    lines.append(along("and makes their lengths differ", lengths, ".3f", -1))
    base, raised, frozen = (found.get(m, {}).get(SKEWED) for m in ("fedavg", decorrelated, "freeze"))
    for place, which in enumerate(("global model", "local models")):
        values = [pooled(one, "tail")[place] for one in (base, raised) if one]
        claim = f"FedDecorr raises the tail, {which}"
        seen = "mean log from " + " to ".join(f"{value:.2f}" for value in values)
        lines.append({"claim": claim, "seen": seen, "verdict": trend(values, -1)})
    seen, verdict = "", "not measured"
    if base and frozen:
        kept, moved = frozen["head_change"], base["head_change"]
        seen = f"largest change of a value, relative: frozen {kept:.2g}, trained {moved:.2g}"
        verdict = "shown" if kept == 0 < moved else "not shown"
    lines.append({"claim": "a frozen head keeps its spectrum", "seen": seen, "verdict": verdict})
    return lines


def before(path: Path | None, case: dict[str, Any]) -> Found:
    """The runs that a file of numbers has, if they are of this case; where its data lie does not matter."""
    if path is None or not path.exists():
        return {}
    record = json.loads(path.read_text())
    one, other = ({k: v for k, v in c.items() if k != "root"} for c in (record["settings"], case))
    if one != other:
        raise SystemExit(f"phenomena.py: {path} has runs with other settings; name another file")
    found: Found = record["found"]
    return found


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="ROOT", help="the folder of CIFAR-100; without it, digits")
    parser.add_argument("--model", help="resnet18 on CIFAR-100 and cnn on digits, if not given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="of a client in a round; 4 on CIFAR-100, 5 on digits")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--feddecorr", default="feddecorr", help="with its options, such as feddecorr:beta=0.05")
    parser.add_argument("--samples", type=int, default=10_000, help="of the test part, at most")
    parser.add_argument("--minutes", type=float, help="no run starts that would probably end later than this")
    parser.add_argument("--json", type=Path, help="write all numbers here, after each run; runs that it has stay")
    return parser


def main() -> None:
    given = options().parse_args()
    began = time.perf_counter()
    case = ON_CIFAR | {"root": given.data} if given.data else ON_DIGITS
    names = ("device", "precision", "rounds", "lr", "clients", "seed")
    case = case | {name: getattr(given, name) for name in names} | {"evaluate_every": given.rounds}
    case |= {k: v for k, v in {"model": given.model, "local_epochs": given.epochs}.items() if v is not None}
    about = environment(given.device, "")
    how = f"{given.rounds} rounds of {case['local_epochs']} epochs, {given.clients} clients, seed {given.seed}"
    print(
        f"{case['model']} on {case['data']}: {how}; {about['device_name']}, torch {about['torch']}, {given.precision}"
    )
    print("pairs are the global model / the mean of all local ones before the last averaging")
    heads = f"{'significant':>16}{'effective rank':>16}{'tail':>16}{'R':>7}{'cosine':>8}{'lengths':>9}{'seconds':>9}"
    print(f"{'method':12}{'split':16}{'acc. %':>7}{heads}")
    found = before(given.json, case)
    record: dict[str, Any] = {"environment": about, "settings": case, "found": found}
    longest, left_out = 0.0, []
    for method, split in plan(given.feddecorr):
        if split in found.get(method, {}):
            print(row(method, split, found[method][split]))
            continue
        start = time.perf_counter()
        if given.minutes and start - began + longest > 60 * given.minutes:
            left_out.append(f"{method} on {split}")
            continue
        try:
            one = measure(case | {"method": method, "partition": split}, given.samples)
        except UserError as error:
            raise SystemExit(f"phenomena.py: {error}") from None
        found.setdefault(method, {})[split] = one
        longest = max(longest, time.perf_counter() - start)
        print(row(method, split, one), flush=True)
        record["verdicts"] = verdicts(found, given.feddecorr)
        if given.json:
            given.json.write_text(json.dumps(record, indent=1) + "\n")
    print()
    for line in verdicts(found, given.feddecorr):
        print(f"{line['verdict']:14}{line['claim']}: {line['seen']}")
    if left_out:
        print(f"left out for want of time: {', '.join(left_out)}")
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
