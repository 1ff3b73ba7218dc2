"""What a federation of very many clients costs, beside one that has only the clients of a round.

Both train the same number of clients in each round with SCAFFOLD, which keeps a vector as long as the network for each
client: all clients of a small federation, or as many out of a large one. Every client has ten samples and takes the
same steps, and both hold the same million pictures, so only the number of clients differs. Each run is a process of
its own with a run folder, the two take turns, and the ratio is that of neighbours. At the end every client's state is
read back, and their mean is compared with the server's own, which is the same sum made round by round. The last lines
say where the time for states goes: what of a round the training is held up by them, and what the writer beside it does.

    python benchmarks/clients.py                       the table
    python benchmarks/clients.py --repeats 5 --json clients.json
    python benchmarks/clients.py --device cuda --executor slots --slots 8
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import record
from isofed import state_file, store
from isofed.draws import generator
from isofed.federation import Federation
from isofed.models.base import Network
from isofed.progress import Watcher
from isofed.records import environment

SAMPLES, OWN, PER_ROUND = 1_000_000, 10, 100
PAUSE = 3  # seconds before each run: the system has gigabytes to tidy up after the one before
# The store's functions by what they do for the training, and for the writer beside it.
TRAINING = {"add": "taken in", "read": "read", "expect": "asked for", "sweep": "tidied up", "flush": "checkpoints"}
WRITING, INTO_FILE = "write_some", "put"  # all that the writer does, and what of it is the file's
WIDTH = 280
COMMON: dict[str, Any] = {
    "method": "scaffold",
    "model": f"{Path(__file__).resolve()}:network",
    "batch_size": OWN,
    "lr": 0.01,
    "train_loss": False,
}


def network(shape: tuple[int, int, int], classes: int) -> Network:
    """Two hidden layers: 99,690 parameters on 8x8 grey pictures with ten classes."""
    inputs = shape[0] * shape[1] * shape[2]
    stages = {
        "stage1": nn.Sequential(nn.Flatten(), nn.Linear(inputs, WIDTH), nn.ReLU()),
        "stage2": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
    }
    return Network(stages, nn.Flatten(), nn.Linear(WIDTH, classes), width=WIDTH)


class Clock(Watcher):
    """When the first client was done, and when each round was, with its evaluation, record and checkpoint."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.rounds: list[float] = []
        self.busy: list[float] = []

    def client(self, done: int, of: int) -> None:
        self.first = self.first or time.time()

    def round(self, line: dict[str, Any]) -> None:
        self.rounds.append(time.time())
        self.busy.append(time.process_time())


def watch_store() -> defaultdict[str, float]:
    """From now on add up the seconds that the store's functions take, for the training and for the writer."""
    spent = defaultdict[str, float](float)

    def timed(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def outer(*given: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*given)
            finally:
                beside = threading.current_thread() is not threading.main_thread()
                if beside == (name in (WRITING, INTO_FILE)):
                    spent[name] += time.perf_counter() - began

        setattr(owner, name, outer)

    for name in (*TRAINING, WRITING):
        timed(store._Store, name)
    timed(state_file, INTO_FILE)
    return spent


def one_run(case: dict[str, Any]) -> dict[str, Any]:
    """One federation in this process; ``began`` is when it was started."""
    clock, clients, spent = Clock(), case["clients"], watch_store()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        partition = "iid"
        if clients * OWN < SAMPLES:
            mine = generator(0, "samples").permutation(SAMPLES)[: clients * OWN].reshape(clients, OWN)
            (Path(folder) / "split.json").write_text(json.dumps(mine.tolist()))
            partition = f"from_file:{folder}/split.json"
        run = Federation(**COMMON | case["settings"], partition=partition, clients=clients, out=Path(folder) / "run")
        run.fit(clock)
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
        assert clock.first is not None
        found = {
            "start": clock.first - case["began"],
            "round": float(np.diff(clock.rounds).mean()),  # all but the first
            "busy": float(np.diff(clock.busy).mean()),
            "peak": peak / 1024,
            "file": run.folder.states.stat().st_size / 1e6 if run.folder else 0.0,
            "spent": {name: seconds / run.round for name, seconds in spent.items()},
        }
        if run.device.type == "cuda":
            found["gpu"] = torch.cuda.max_memory_allocated() / 2**20
        return found | kept(run)


def kept(run: Federation) -> dict[str, Any]:
    """Read every visited client's state back; c is the mean of the clients' own c_k over the population."""
    asked = {job.client for number in range(1, run.round + 1) for job in run._sample(number)[0]}
    shares, mean = run.world.fractions(), torch.zeros_like(run.state.server["scaffold.c"], dtype=torch.float64)
    for client, state in run.state.clients.items():
        mean += float(shares[client]) * state["scaffold.ck"].double()
    error = float((mean - run.state.server["scaffold.c"]).abs().max() / mean.abs().max())
    return {"visited": len(asked), "kept": len(asked & set(run.state.clients)), "error": error}


def measure(settings: dict[str, Any], populations: list[int], repeats: int) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {clients: [] for clients in populations}
    for repeat in range(repeats):
        for clients in populations if repeat % 2 else populations[::-1]:
            time.sleep(PAUSE)
            share = {"participation": PER_ROUND / clients}
            case = {"clients": clients, "settings": settings | share, "began": time.time()}
            done = subprocess.run([sys.executable, __file__, "--case", json.dumps(case)], stdout=subprocess.PIPE)
            if done.returncode:
                sys.exit(done.returncode)
            found[clients].append(json.loads(done.stdout.splitlines()[-1]))
    return found


def spent_on_states(runs: list[dict[str, Any]]) -> str:
    """Where the time for states went, in milliseconds of a round: medians."""
    names = (*TRAINING, WRITING, INTO_FILE)
    found = {k: statistics.median(1e3 * r["spent"].get(k, 0.0) for r in runs) for k in names}
    training = ", ".join(f"{name} {found[k]:.1f}" for k, name in TRAINING.items())
    return (
        f"the training gives states {sum(found[k] for k in TRAINING):.1f} ms a round ({training}),\n"
        f"the writer beside it works {found[WRITING]:.1f} ms ({found[INTO_FILE]:.1f} for the file)"
    )


def _cell(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=record.device, default="cuda" if torch.cuda.is_available() else "cpu")
    most = SAMPLES // OWN
    parser.add_argument("--executor", default="serial", help="peak MiB is that of the main process")
    parser.add_argument("--slots", default="auto", help="with --executor slots; as many in both, for their memory")
    parser.add_argument("--clients", type=int, default=most, help=f"of the large federation, {most:,} at most")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--steps", type=int, default=20, help="of each client in a round")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=record.file, help="write all numbers here")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(one_run(json.loads(arguments.case))))
        return
    rounds = arguments.rounds
    if rounds < 2:
        parser.error("--rounds must be at least 2: the first one is not timed")
    settings = {
        "data": f"synthetic:samples={SAMPLES},test=1000",
        "device": arguments.device,
        "executor": arguments.executor,
        "slots": arguments.slots,
        "rounds": rounds,
        "evaluate_every": rounds,
        "local_steps": arguments.steps,
    }
    populations = [PER_ROUND, arguments.clients]
    found = measure(settings, populations, arguments.repeats)
    about = environment(arguments.device, "")
    print(f"{about['device_name']}, torch {about['torch']}")
    columns = {
        "start": ("s to start", 1),
        "round": ("s a round", 3),
        "busy": ("CPU s a round", 3),
        "peak": ("peak MiB", 0),
        "gpu": ("peak GPU MiB", 0),
    }
    shown = {k: v for k, v in columns.items() if k in found[PER_ROUND][0]}
    print(f"{'clients':>8}" + "".join(f"{title:>25}" for title, _ in shown.values()) + f"{'kept of visited':>18}")
    for clients, runs in found.items():
        cells = [_cell([run[key] for run in runs], digits) for key, (_, digits) in shown.items()]
        states = f"{runs[0]['kept']:,} of {runs[0]['visited']:,}"
        print(f"{clients:8,}" + "".join(f"{cell:>25}" for cell in cells) + f"{states:>18}")
    pairs = list(zip(*found.values(), strict=True))
    cells = [_cell([large[key] / small[key] for small, large in pairs], 3) for key in shown]
    print(f"{'ratio':>8}" + "".join(f"{cell:>25}" for cell in cells))
    error = max(run["error"] for runs in found.values() for run in runs)
    print(f"median (range) of {arguments.repeats} repeats in turns; {rounds} rounds of {PER_ROUND} clients,")
    print(f"each with {OWN} samples and {arguments.steps} steps; c and the mean of all c_k differ by {error:.0e} of it")
    for clients, runs in found.items():
        print(f"{clients:,} clients: {spent_on_states(runs)}")
    record.write(arguments, arguments.device, settings=COMMON | settings, runs=found)


if __name__ == "__main__":
    main()
