"""What the papers saw, on digits: small runs of which the outcome does not hang on a seed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import isofed
from isofed.diagnostics import (
    Alignment,
    Spectrum,
    classifier_alignment,
    classifier_spectrum,
    client_drift,
    fixed_sample,
    observe,
    representation_spectrum,
    significant,
)
from isofed.files import load_tensors

pytestmark = pytest.mark.slow
SEEDS = range(3)


class Seen(NamedTuple):
    whole: Spectrum  # of the global model's features
    local: list[Spectrum]
    alignment: Alignment
    heads: list[Tensor]  # of the global model, before the first round and after the last
    distance: float  # of the updates to their mean, on average


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("phenomena")


@cache
def seen(folder: Path, method: str, split: str, seed: int, model: str = "mlp", rounds: int = 10) -> Seen:
    out = folder / f"{method}-{split}-{seed}-{model}".replace(":", "_")
    usual: dict[str, Any] = {"data": "digits", "clients": 10, "lr": 0.03, "executor": "serial", "keep_clients": "last"}
    chosen: dict[str, Any] = {"method": method, "partition": split, "seed": seed, "model": model, "rounds": rounds}
    run = isofed.Federation(keep=f"every:{rounds - 1}", out=out, **usual, **chosen)
    network = run.world.network()
    first = network.state_dict()["head.weight"].clone()
    result = run.fit()
    inputs, _ = fixed_sample(run.world.dataset, "test", count=None)

    def judged(tensors: dict[str, Tensor]) -> Spectrum:
        network.load_state_dict(tensors)
        return representation_spectrum(observe(network, inputs).features)

    received, _ = load_tensors(out / "kept" / f"round-{rounds - 1:06}.safetensors")
    clients = [load_tensors(file)[0] for file in sorted(out.glob(f"kept/round-{rounds:06}-client-*"))]
    updates = [torch.cat([(c[name] - received[name]).flatten() for name in received]) for c in clients]
    return Seen(
        judged(result.weights),
        [judged(c) for c in clients],
        classifier_alignment([c["head.weight"] for c in clients]),
        [first, result.weights["head.weight"]],
        float(client_drift(updates).distances.mean()),
    )


def mean(folder: Path, method: str, split: str, of: str) -> float:
    def number(s: Seen) -> float:
        if of == "significant":
            return float(np.mean([significant(s.whole.values), *(significant(x.values) for x in s.local)]))
        if of == "rank":
            return float(np.mean([x.effective_rank for x in s.local])) / s.whole.effective_rank
        return s.distance if of == "distance" else float(getattr(s.alignment, of))

    return float(np.mean([number(seen(folder, method, split, seed)) for seed in SEEDS]))


def test_stronger_heterogeneity_gives_fewer_significant_singular_values(folder: Path) -> None:
    few, more = (mean(folder, "fedavg", split, "significant") for split in ("dirichlet:0.05", "iid"))
    assert few < more - 1


def test_local_models_collapse_further_than_the_global_one_only_where_labels_are_skewed(folder: Path) -> None:
    assert mean(folder, "fedavg", "dirichlet:0.05", "rank") < 0.93
    assert mean(folder, "fedavg", "iid", "rank") == pytest.approx(1, abs=0.03)


def test_classifiers_align_less_and_updates_lie_apart_as_labels_are_skewed(folder: Path) -> None:
    for of, sign in (("cosine", 1), ("norm_difference", -1), ("distance", -1)):
        skewed, mild, even = (sign * mean(folder, "fedavg", s, of) for s in ("dirichlet:0.05", "dirichlet:0.5", "iid"))
        assert skewed < mild < even


def test_feddecorr_raises_the_tail_of_a_network_with_batch_norm(folder: Path) -> None:
    """Two rounds are enough. On the mlp, without batch norm, it does not: there it silences units altogether."""
    plain, decorrelated = (seen(folder, m, "dirichlet:0.05", 0, "cnn", 2) for m in ("fedavg", "feddecorr"))
    for one, two in zip([plain.whole, *plain.local], [decorrelated.whole, *decorrelated.local], strict=True):
        assert two.effective_rank > 1.5 * one.effective_rank
        assert float(two.values[9:32].log().mean()) > float(one.values[9:32].log().mean()) + 0.2


def test_a_frozen_head_keeps_its_spectrum_and_a_trained_one_does_not(folder: Path) -> None:
    frozen, trained = (seen(folder, method, "dirichlet:0.05", 0) for method in ("freeze", "fedavg"))
    before, after = (classifier_spectrum(weight).values for weight in frozen.heads)
    assert torch.equal(before, after) and frozen.alignment.cosine == pytest.approx(1)
    before, after = (classifier_spectrum(weight).values for weight in trained.heads)
    assert float((after - before).abs().max()) > 0.1
