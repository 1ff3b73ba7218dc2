"""Every method, and the papers' compositions, on digits with strongly skewed clients."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from isofed import Federation
from isofed.engine.workers import Pool
from isofed.methods import names

SKEWED: dict[str, Any] = {
    "data": "digits",
    "partition": "dirichlet:0.1",
    "clients": 10,
    "rounds": 10,
    "local_epochs": 2,
    "lr": 0.1,
    "momentum": 0.0,
    "train_loss": False,
    "evaluate_every": 10,
}
BASES = ("fedprox", "fedavgm:momentum=0.5", "moon", "fednova", "scaffold", "feddyn", "fedadam:lr=0.03")
COMPOSITIONS = [
    *(f"{base}+{remedy}" for base in BASES for remedy in ("feddecorr", "spherefed", "feduv", "ccvr")),
    *("fedsam+feddecorr", "mixup+spherefed", "mixup+fedlc", "moon+spherefed:calibrate=none+ccvr", "fedalign+fedprox"),
    *("freeze+feduv:mu=0", "univarfl+fednova+fedexp", "fedrs+decov+ffc", "structured_decov+fedsam+oracle_head"),
]
ALONE = [n for n in names() if n not in ("fedavg", "central", "gaussian")]  # whose noise drowns ten clients


@dataclass(frozen=True)
class Fairer:
    """Why a method is far behind FedAvg after these ten rounds, and the comparison that shows it."""

    why: str
    base: str = "fedavg"
    method: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def fairer(method: str) -> Fairer | None:
    if "moon" in method:
        return Fairer("MOON's projection head is slow to learn, with or without its loss", base="moon:mu=0")
    if "fedlc" in method:
        return Fairer(
            "with two classes a client, leaving out the absent ones says little", settings={"partition": "iid"}
        )
    if method in ("freeze", "fedbabu"):
        return Fairer("a small random head takes a larger step", settings={"lr": 0.3})
    if method in ("median", "trimmed", "krum"):
        return Fairer("what only one client knows looks like an attack", settings={"partition": "iid"})
    if method == "clip_update":
        return Fairer("steps of length 1 are short", method="clip_update:norm=10")
    if method == "univarfl":
        return Fairer("features without batch norm lie close: energy drowns the labels", method="univarfl:mu=0.05")
    return None


def chosen(method: str, **more: Any) -> dict[str, Any]:
    model = "mlp"
    if "stochdepth" in method:
        model = "resnet8"
    elif method in ("moon", "moon+feddecorr") or any(part in method for part in ("fedbn", "gradaug")):
        model = "cnn"
    return SKEWED | {"method": method, "model": model} | more


@functools.cache
def accuracy(method: str, model: str, **more: Any) -> float:
    return Federation(**chosen(method, model=model, executor="serial", **more)).fit().accuracy


@pytest.mark.parametrize("method", [*ALONE, *COMPOSITIONS])
def test_ten_rounds_on_both_executors(method: str, two_workers: Pool) -> None:
    settings = chosen(method)
    ten = Federation(**settings, executor="serial").fit()
    assert ten.rounds == 10
    assert all(math.isfinite(line["local_loss"]) and not line["events"] for line in ten.history)
    workers = Federation(**settings, executor="workers", pool=two_workers).fit()
    assert all(torch.equal(ten.weights[k], workers.weights[k]) for k in ten.weights)
    assert (ten.accuracy, ten.exchanges) == (workers.accuracy, workers.exchanges)

    reached, base, more = ten.accuracy, "fedavg", {}
    if other := fairer(method):
        base, more = other.base, other.settings
        if other.method or more:
            reached = accuracy(other.method or method, settings["model"], **more)
    assert reached > accuracy(base, settings["model"], **more) - 0.10, other.why if other else ""


def test_there_are_more_than_twenty_compositions() -> None:
    assert len(set(COMPOSITIONS)) > 20
    assert all("+" in method for method in COMPOSITIONS)
