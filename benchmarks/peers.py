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
import functools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from isofed.config import settings
from isofed.engine.step import Pictures
from isofed.engine.world import World
from isofed.federation import Federation
from isofed.progress import Watcher
from isofed.records import environment

USERS, COHORT, BATCH, LR, EVERY = 1000, 50, 10, 0.1, 10
AT_ONCE = 500  # pictures judged together; about the fastest for all of them


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of one framework."""

    framework: str
    data: str
    seed: int
    rounds: int
    warmup: int
    device: str
    precision: str
    processes: int
    threads: int
    rank: int = 0

    @property
    def shape(self) -> str:
        return f"{self.framework}:{self.processes}x{self.threads}"

    def judged(self, number: int) -> bool:
        """Whether the model is evaluated after this round."""
        return number % EVERY == 0 or number == self.rounds


class Clock:
    """When each round ended, what the evaluations found, and the processor time of the timed rounds."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.marks: list[float] = []
        self.accuracy: dict[int, float] = {}
        self.cpu = 0.0

    def round(self, accuracy: float | None = None) -> None:
        if self.case.device == "cuda":
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())
        if accuracy is not None:
            self.accuracy[len(self.marks)] = accuracy
        if len(self.marks) in (self.case.warmup, self.case.rounds):
            self.cpu = cpu_seconds() - self.cpu


def cpu_seconds() -> float:
    """Processor time of this process and of all that it has started."""
    used: dict[int, int] = {}
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # one that has just ended
            fields = entry.read_text().rpartition(")")[2].split()
            process = int(entry.parent.name)
            used[process] = sum(int(n) for n in fields[11:15])  # its own, and those of children that have ended
            below.setdefault(int(fields[1]), []).append(process)

    def tree(process: int) -> int:
        return used.get(process, 0) + sum(tree(child) for child in below.get(process, []))

    return tree(os.getpid()) / os.sysconf("SC_CLK_TCK")


# What all share


@functools.cache
def the_world(data: str, seed: int, device: str) -> World:
    """The split and the initial weights of a seed, as isofed makes them."""
    chosen: dict[str, Any] = {"data": "cifar10", "root": data, "partition": "iid", "clients": USERS, "seed": seed}
    chosen |= {"participation": COHORT / USERS, "local_epochs": 1, "batch_size": BATCH, "lr": LR, "momentum": 0.0}
    chosen |= {"model": "pfl-cnn", "evaluate_every": EVERY, "train_loss": False, "device": device}
    return World.create(settings(chosen))


@functools.cache
def pictures(case: Case, part: str) -> tuple[Tensor, Tensor]:
    """A part of the data as the peers want it: normalised float32 in the order of pfl's benchmark, and labels."""
    world = the_world(case.data, case.seed, case.device)
    stored = Pictures(world.parts[part], world.dataset, torch.device(case.device))
    return stored.normalised(stored.images).permute(0, 2, 3, 1), stored.labels


class PlainNetwork(nn.Module):
    """The network of pfl-research's benchmark, in PyTorch's own layers."""

    def __init__(self, initial: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
            *(nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
        )
        with torch.no_grad():
            for mine, given in zip(self.parameters(), initial.parameters(), strict=True):
                mine.copy_(given)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images.permute(0, 3, 1, 2))
        return logits

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        self.train()
        return cross_entropy(self(images), labels)

    @torch.no_grad()
    def correct(self, images: Tensor, labels: Tensor) -> int:
        self.eval()
        return int((self(images).argmax(1) == labels).sum())


def plain_network(case: Case) -> PlainNetwork:
    return PlainNetwork(the_world(case.data, case.seed, case.device).network()).to(case.device)


def autocast(case: Case) -> AbstractContextManager[object]:
    return torch.autocast(case.device, torch.bfloat16) if case.precision == "bf16" else nullcontext()


def train_plainly(case: Case, network: PlainNetwork, user: int) -> None:
    """One local epoch, as one would write it by hand."""
    images, labels = pictures(case, "train")
    order = torch.from_numpy(the_world(case.data, case.seed, case.device).clients[user]).to(case.device)
    optimiser = torch.optim.SGD(network.parameters(), LR)
    for rows in order[torch.randperm(len(order)).to(order.device)].split(BATCH):
        optimiser.zero_grad()
        with autocast(case):
            loss = network.loss(images[rows], labels[rows])
        loss.backward()
        optimiser.step()


def judge_plainly(case: Case, network: PlainNetwork) -> float:
    images, labels = pictures(case, "test")
    pairs = zip(images.split(AT_ONCE), labels.split(AT_ONCE), strict=True)
    with autocast(case):
        return sum(network.correct(x, y) for x, y in pairs) / len(labels)


# One function per framework; each runs in a process of its own


def run_isofed(case: Case, clock: Clock) -> None:
    class Listening(Watcher):
        def round(self, line: dict[str, Any]) -> None:
            clock.round(line.get("accuracy"))

    chosen = the_world(case.data, case.seed, case.device).settings.to_dict()
    chosen |= {"rounds": case.rounds, "precision": case.precision}
    if case.device == "cpu":
        chosen |= {"executor": "workers", "workers": case.processes} if case.processes > 1 else {"executor": "serial"}
    Federation(**chosen).fit(Listening())


def run_loop(case: Case, clock: Clock) -> None:
    """A bare loop over the clients; with several processes, each has its share of them and exchanges nothing."""
    network, rng = plain_network(case), np.random.default_rng(case.seed)
    weights = [p.detach().clone() for p in network.parameters()]
    for number in range(1, case.rounds + 1):
        users = rng.choice(USERS, COHORT, replace=False)[case.rank :: case.processes]
        total = [torch.zeros_like(w) for w in weights]
        for user in users:
            _set(network, weights)
            train_plainly(case, network, int(user))
            torch._foreach_add_(total, [p.detach() for p in network.parameters()])
        weights = [t / len(users) for t in total]
        _set(network, weights)
        clock.round(judge_plainly(case, network) if case.judged(number) and case.rank == 0 else None)


def _set(network: nn.Module, weights: list[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(list(network.parameters()), weights)


def run_pfl(case: Case, clock: Clock) -> None:
    if case.device == "cuda" and case.processes > 1:
        # NCCL refuses two processes on one GPU; gloo takes the sum through the host.
        torch.distributed.init_process_group = functools.partial(
            lambda start, backend, **more: start(backend="gloo", **more), torch.distributed.init_process_group
        )
    from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
    from pfl.aggregate.weighting import WeightByUser  # type: ignore[import-not-found]
    from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found]
    from pfl.algorithm.federated_averaging import FederatedAveraging  # type: ignore[import-not-found]
    from pfl.callback.base import TrainingProcessCallback  # type: ignore[import-not-found]
    from pfl.callback.central_evaluation import CentralEvaluationCallback  # type: ignore[import-not-found]
    from pfl.data import FederatedDataset  # type: ignore[import-not-found]
    from pfl.data.dataset import Dataset  # type: ignore[import-not-found]
    from pfl.data.sampling import get_user_sampler  # type: ignore[import-not-found]
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams  # type: ignore[import-not-found]
    from pfl.metrics import Metrics, Weighted  # type: ignore[import-not-found]
    from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]

    class WithMetrics(PlainNetwork):
        @torch.no_grad()
        def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
            self.eval()
            logits = self(images)
            loss = float(cross_entropy(logits, labels, reduction="sum"))
            right = float((logits.argmax(1) == labels).sum())
            return {"loss": Weighted(loss, len(labels)), "accuracy": Weighted(right, len(labels))}

    class Listening(TrainingProcessCallback):
        """Asks for an evaluation after 10, 20, ... rounds, where pfl's own counting would after 11, 21, ..."""

        def __init__(self) -> None:
            parameters = NNEvalHyperParams(local_batch_size=AT_ONCE)
            self.judge = CentralEvaluationCallback(Dataset(list(pictures(case, "test"))), parameters)

        def on_train_begin(self, *, model: Any) -> Any:
            return self.judge.on_train_begin(model=model)

        def after_central_iteration(self, found: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
            number, accuracy = central_iteration + 1, None
            if case.judged(number):
                _, metrics = self.judge.after_central_iteration(found, model, central_iteration=number)
                accuracy = {str(k): v for k, v in metrics}["Central val | accuracy"].overall_value
            clock.round(accuracy)
            return False, Metrics()

    np.random.seed(case.seed)
    torch.manual_seed(1000 * case.seed + case.rank)
    world, (images, labels) = the_world(case.data, case.seed, case.device), pictures(case, "train")
    users = {n: (images[torch.from_numpy(c)], labels[torch.from_numpy(c)]) for n, c in enumerate(world.clients)}
    data = FederatedDataset.from_slices(users, get_user_sampler("random", range(USERS)))
    network = WithMetrics(world.network()).to(case.device)
    model = PyTorchModel(
        model=network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
        amp_dtype=torch.bfloat16 if case.precision == "bf16" else None,
    )
    FederatedAveraging().run(
        # Without an evaluation at the users before and after training, which the others do not make either.
        NNAlgorithmParams(case.rounds, evaluation_frequency=10**9, train_cohort_size=COHORT, val_cohort_size=None),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByUser()]),
        model,
        NNTrainHyperParams(local_learning_rate=LR, local_num_epochs=1, local_batch_size=BATCH),
        NNEvalHyperParams(local_batch_size=AT_ONCE),
        [Listening()],
    )


@functools.cache
def resident(case: Case) -> PlainNetwork:
    """The network of this process, made once."""
    torch.set_num_threads(case.threads)
    arithmetic(case.precision)
    return plain_network(case)


def run_flower(case: Case, clock: Clock) -> None:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        # What is kept between visits must be that of the actor's own module, not of a copy.
        import peers  # type: ignore[import-not-found]

        network = peers.resident(case)
        received: Any = message.content["arrays"]
        network.load_state_dict(received.to_torch_state_dict())
        user = int(context.node_config["partition-id"])
        peers.train_plainly(case, network, user)
        counts: dict[str, Any] = {"num-examples": len(peers.the_world(case.data, case.seed, case.device).clients[user])}
        content: dict[str, Any] = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord(counts)}
        return Message(content=RecordDict(content), reply_to=message)

    def judge(number: int, arrays: ArrayRecord) -> MetricRecord:
        accuracy = None
        if case.judged(number):
            network = resident(case)
            network.load_state_dict(arrays.to_torch_state_dict())
            torch.set_num_threads(case.processes * case.threads)  # nobody else works at this moment
            accuracy = judge_plainly(case, network)
        if number:
            clock.round(accuracy)
        return MetricRecord()

    @server.main()
    def main(grid: Any, context: Context) -> None:
        random.seed(case.seed)
        strategy = FedAvg(fraction_train=COHORT / USERS, fraction_evaluate=0.0, min_available_nodes=USERS)
        initial = ArrayRecord(plain_network(case).state_dict())
        strategy.start(grid, initial, num_rounds=case.rounds, evaluate_fn=judge)

    gpu = 1 / case.processes if case.device == "cuda" else 0.0
    resources: dict[str, Any] = {"num_cpus": case.threads, "num_gpus": gpu}
    start: dict[str, Any] = {
        "num_cpus": case.processes * case.threads,
        "num_gpus": int(gpu > 0),
        "include_dashboard": False,
    }
    run_simulation(server, client, USERS, backend_config={"client_resources": resources, "init_args": start})


RUN: dict[str, Callable[[Case, Clock], None]] = {
    "isofed": run_isofed,
    "pfl": run_pfl,
    "flower": run_flower,
    "loop": run_loop,
}


def arithmetic(precision: str) -> None:
    fast = precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = fast


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
    parser.add_argument("--json", type=Path, help="write all numbers here")
    given = parser.parse_args()
    if not 0 < given.warmup < given.rounds:
        raise SystemExit("--warmup must be at least 1 and less than --rounds")
    seeds = [int(s) for s in given.seeds.split(",")]
    shapes = [shape_of(text, given.device) for text in given.frameworks.split(",")]
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
    if given.json:
        options = {k: v for k, v in vars(given).items() if k not in ("json", "data")}
        record = {"environment": environment(given.device, ""), "options": options, "runs": found}
        given.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
