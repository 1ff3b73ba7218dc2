"""Whether bf16 on many slots learns as well as fp32, client after client: accuracy over seeds, side by side.

Each seed has the same split and initial weights both ways, so the differences are paired. Real data are asked for,
because made-up ones are too easy to tell a difference.

    python benchmarks/precision.py --data cifar100 --root datasets
    python benchmarks/precision.py --data digits --model cnn --rounds 5 --device cpu
"""

from __future__ import annotations

import argparse
from statistics import mean, stdev

import torch

import record
from isofed.data import load
from isofed.federation import Federation

WAYS = {"fp32 serial": ("fp32", "serial"), "bf16": ("bf16", "auto")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=record.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", default="cifar100")
    parser.add_argument("--root", help="the folder of the data sets")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--partition", default="dirichlet:0.1")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    o = parser.parse_args()
    dataset = load(o.data, root=o.root)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for seed in range(o.seeds):
        for name, (precision, executor) in WAYS.items():
            run = Federation(
                dataset=dataset,
                data=o.data,
                partition=o.partition,
                clients=10,
                method=o.method,
                model=o.model,
                rounds=o.rounds,
                local_epochs=o.epochs,
                batch_size=64,
                lr=0.1,
                momentum=0.9,
                augment="crop:4+flip" if dataset.shape[0] == 3 else "none",
                evaluate_every=o.rounds,
                train_loss=False,
                seed=seed,
                device=o.device,
                precision=precision,
                executor=executor,
            )
            found[name].append(100 * run.fit().accuracy)
            print(f"seed {seed}  {name:12}{found[name][-1]:6.2f} %", flush=True)
    exact, other = found.values()
    for name, values in found.items():
        print(f"{name:20}{mean(values):6.2f} ± {stdev(values) if len(values) > 1 else 0:.2f} %")
    print("bf16 - fp32, seed by seed: " + ", ".join(f"{b - a:+.2f}" for a, b in zip(exact, other, strict=True)))
    record.write(o, o.device, accuracy=found)


if __name__ == "__main__":
    main()
