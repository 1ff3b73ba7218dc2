"""What a finished run says about a table's columns: accuracy, time, cost, curvature."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import nn

from isofed.diagnostics.cost import Cost, cost
from isofed.engine.world import World
from isofed.layout import Layout, Policy
from isofed.result import Result

PERCENT = {"accuracy", "before", "personal"}  # besides those of domains; higher is better
RATIOS = {"seconds"}  # shown relative to the reference method
DRAWS = 12  # steps that are counted of a method whose steps are not alike


@dataclass(frozen=True)
class Run:
    """A finished run to be measured."""

    world: World
    result: Result
    diagnosis: Mapping[str, Any]

    @cached_property
    def cost(self) -> Cost:
        return self.cost_drawn(self.world.settings.seed)

    def cost_drawn(self, seed: int) -> Cost:
        """What a step costs, where a method draws what it does, with this seed."""
        s, names = self.world.settings, ("model", "norm", "data", "root", "momentum", "nesterov")
        own = {name: getattr(s, name) for name in names}
        return cost(s.method, dataset=self.world.dataset, seed=seed, **own)

    @property
    def judged(self) -> list[dict[str, Any]]:
        return [line for line in self.result.history if line.get("accuracy") is not None]


def accuracy(run: Run) -> float:
    return 100 * run.result.accuracy


def before(run: Run) -> float:
    """Before anything that follows the last round."""
    return 100 * float(run.judged[-1]["accuracy"])


def seconds(run: Run) -> float:
    """Of a round: the median without the first, which captures graphs and fills caches."""
    taken = [float(line["seconds"]) for line in run.result.history]
    return statistics.median(taken[1:] or taken)


def domains(run: Run) -> dict[str, float]:
    """Accuracy on each domain; where clients have models of their own, that of the domain's client."""
    line, names = run.judged[-1], run.world.dataset.domains
    found = line.get("domain_accuracy") or {names[int(c)]: a for c, a in line.get("client_accuracy", {}).items()}
    return {name: 100 * value for name, value in found.items()}


def domain_mean(run: Run) -> float:
    return statistics.fmean(domains(run).values())


def macs(run: Run) -> float:
    """Millions of multiply-accumulates that a client forwards for a sample, on average where steps differ."""
    found = [run.cost_drawn(seed).macs for seed in range(2)]
    if found[0] != found[1]:
        found += [run.cost_drawn(seed).macs for seed in range(2, DRAWS)]
    return statistics.fmean(found) / 1e6


def gigamacs(run: Run) -> float:
    return macs(run) / 1e3


def stored(run: Run) -> float:
    """Millions of numbers that a step reads, without the scales and shifts of batch norm."""
    network = run.world.network()
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d | nn.BatchNorm1d)]
    affine = sum(p.numel() for m in norms for p in m.parameters())
    return (run.cost.held - round(run.cost.models) * affine) / 1e6


def classifier_megabytes(run: Run) -> float:
    """Sent and received by a client for the classifier: in all rounds, and once more after the last.

    The papers count four bytes for each number; here sums have eight, so that what is solved with them is exact.
    """
    network = run.world.network()
    layout = Layout.of(network, run.world.settings.method.share(network))
    head = [e for e in layout.entries if e.name.startswith("head.")]
    shared = sum(e.size for e in head if e.policy is Policy.SHARED)
    weight = network.head.weight.numel() if isinstance(network.head, nn.Linear) else 0
    # The papers count the matrix; a bias is left out.
    each = min(shared, weight)
    return (8 * each * run.result.rounds + 4 * run.cost.up_finally) / 1e6


def classifier_gflop(run: Run) -> float:
    """Of training the classifier (3 l C for each sample and epoch) and of what clients compute after the last round."""
    network, settings = run.world.network(), run.world.settings
    width, classes = network.width, len(run.world.dataset.classes)
    trained = any(p.requires_grad for p in network.head.parameters())
    visits = sum(int(line["samples"]) for line in run.result.history)
    total = 3.0 * width * classes * visits if trained else 0.0
    asked = {name for name, _ in settings.method.exchanges}
    if "ffc" in asked:
        total += 2.0 * width * run.world.samples * (width + classes)
    if "ccvr" in asked:
        total += 2.0 * width * run.world.samples * (width + 1)
    return total / 1e9


def train_loss(run: Run) -> float | None:
    """On the pooled training part, after the last round."""
    value = run.judged[-1].get("train_loss")
    return None if value is None else float(value)


def megabytes(run: Run) -> float:
    """Sent and received by a client, on average."""
    return (run.result.bytes_up + run.result.bytes_down) / 1e6 / len(run.world.clients)


def curvature(run: Run, name: str) -> float | None:
    """A figure of FedAlign's Table 1, from the diagnosis.

    Like the released code, the diagnosis takes the means over clients also over each client's pair with itself, which
    adds zeros to H_N and ones to H_D.
    """
    section: Mapping[str, Any] = run.diagnosis.get("curvature") or {}
    clients: Mapping[str, Any] = section.get("clients") or {}
    if name == "lambda_max" and section:
        return float(section["eigenvalues"][0])
    if name == "H_T" and section:
        return float(section["trace"])
    if not clients:
        return None
    return float(clients[f"{name}_traces"])


MEASURES: dict[str, Callable[[Run], float | None]] = {
    "accuracy": accuracy,
    "before": before,
    "seconds": seconds,
    "domain_mean": domain_mean,
    "train_loss": train_loss,
    "megabytes": megabytes,
    "macs": macs,
    "gigamacs": gigamacs,
    "stored": stored,
    "classifier_megabytes": classifier_megabytes,
    "classifier_gflop": classifier_gflop,
    **{name: partial(curvature, name=name) for name in ("lambda_max", "H_T", "H_N", "H_D")},
}


def measured(run: Run, names: Iterable[str]) -> dict[str, float | None]:
    """Those measures that a run itself can tell; ``domain:amazon`` is the accuracy on a domain.

    Accuracy and time are always among them.
    """
    found: dict[str, float | None] = {}
    always = ["accuracy", "before", "seconds", *(["train_loss"] if "train_loss" in run.judged[-1] else [])]
    for name in dict.fromkeys([*always, *names]):
        if name.startswith("domain:"):
            found[name] = domains(run)[name.partition(":")[2]]
        elif name in MEASURES:
            found[name] = MEASURES[name](run)
    return {name: None if value is None else float(f"{value:.6g}") for name, value in found.items()}


def is_percent(name: str) -> bool:
    """Whether a measure is an accuracy."""
    return name in PERCENT or name.startswith("domain")
