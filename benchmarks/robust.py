"""What malicious clients do to a federation, and what robust combinations do about it.

Two of ten clients send their updates turned round, or random numbers, in each case several times as long as an honest
update. The others train as always. Accuracies are of the final model on the test part, over several seeds. A run whose
weights leave the range of float32 is counted as diverged.

    python benchmarks/robust.py
    python benchmarks/robust.py --seeds 1 --rounds 5 --json robust.json
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from pathlib import Path

import record
from isofed.engine.choose import available_cores
from isofed.engine.workers import Pool
from isofed.errors import RunError
from isofed.federation import Federation

ATTACK = Path(__file__).resolve().parents[1] / "examples" / "attack.py"
METHODS = ("fedavg", "median", "trimmed:0.2", "krum:2", "krum:2,keep=4", "clip_update:1", "median+fedavgm:0.5")


def attacks(arguments: argparse.Namespace) -> dict[str, str]:
    """What is added to a method, by the name of its column."""
    own = f"+{ATTACK}:Attack:clients={arguments.malicious}"
    turned, random = f"scale={arguments.turned:g}", f"scale={arguments.random:g}"
    return {
        "nobody": "",
        f"turned round, x{arguments.turned:g}": f"{own},{turned},kind=sign",
        f"random, x{arguments.random:g}": f"{own},{random},kind=random",
    }


def measured(arguments: argparse.Namespace) -> dict[str, dict[str, list[float | None]]]:
    """The accuracy of each method under each attack, for each seed; none where a run diverged."""
    found: dict[str, dict[str, list[float | None]]] = {}
    cores = available_cores()
    with Pool(cores) if cores > 1 else nullcontext() as pool:
        for method in arguments.methods:
            for name, added in attacks(arguments).items():
                for seed in range(arguments.seeds):
                    run = Federation(
                        method=method + added,
                        data="digits",
                        model="mlp",
                        clients=arguments.clients,
                        partition=arguments.partition,
                        rounds=arguments.rounds,
                        local_epochs=2,
                        lr=0.05,
                        evaluate_every=arguments.rounds,
                        train_loss=False,
                        seed=seed,
                        pool=pool,
                        executor="workers" if pool else "serial",
                    )
                    found.setdefault(method, {}).setdefault(name, []).append(accuracy(run))
            print(row(method, found[method]), flush=True)
    return found


def accuracy(run: Federation) -> float | None:
    try:
        return run.fit().accuracy
    except RunError as error:
        if "NaN or numbers out of range" not in str(error):
            raise
        return None


def row(method: str, accuracies: dict[str, list[float | None]]) -> str:
    """A line of the table."""
    cells = []
    for values in accuracies.values():
        ended = [100 * v for v in values if v is not None]
        spread = statistics.stdev(ended) if len(ended) > 1 else 0.0
        lost = f"{len(values) - len(ended)} of {len(values)} diverged" if len(ended) < len(values) else ""
        kept = f"{statistics.mean(ended):.1f} ± {spread:.1f}" if ended else ""
        cells.append(", ".join(filter(None, (kept, lost))))
    return f"{method:20}" + "".join(f"{cell:>28}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=METHODS, metavar="METHOD")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--malicious", type=int, default=2)
    parser.add_argument("--turned", type=float, default=5.0, help="length of a turned update, in honest ones")
    parser.add_argument("--random", type=float, default=50.0, help="length of a random update, in honest ones")
    parser.add_argument("--partition", default="dirichlet:1")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    arguments = parser.parse_args()
    print(
        f"digits, {arguments.clients} clients ({arguments.partition}), {arguments.rounds} rounds; "
        f"{arguments.malicious} malicious; accuracy % of {arguments.seeds} seeds"
    )
    print(f"{'method':20}" + "".join(f"{name:>28}" for name in attacks(arguments)))
    record.write(arguments, "cpu", accuracy=measured(arguments))


if __name__ == "__main__":
    main()
