"""The columns of the tables, against computations of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isofed import Federation
from isofed.diagnose import Diagnosis, Options, diagnosed
from isofed.diagnostics import hessian_diagonal
from isofed.papers import figures
from isofed.papers.measure import Run, measured

SMALL: dict[str, Any] = {
    "data": "synthetic:samples=120,test=40,classes=4,size=4,domains=2",
    "partition": "domain",
    "model": "mlp",
    "rounds": 2,
    "local_epochs": 1,
    "batch_size": 10,
    "executor": "serial",
}


def fitted(method: str, **more: Any) -> Run:
    federation = Federation(method=method, **{**SMALL, **more})
    return Run(federation.world, federation.fit(), {})


def test_accuracy_before_and_after_the_last_question() -> None:
    run = fitted("fedavg+ffc")
    found = measured(run, [])
    assert found["before"] == pytest.approx(100 * run.result.history[-1]["accuracy"], abs=1e-3)
    assert found["accuracy"] == pytest.approx(100 * run.result.exchanges[-1]["accuracy"], abs=1e-3)
    assert found["train_loss"] == pytest.approx(run.result.history[-1]["train_loss"], rel=1e-5)


def test_the_first_round_does_not_count_in_times() -> None:
    run = fitted("fedavg")
    run.result.history[0]["seconds"], run.result.history[1]["seconds"] = 100.0, 2.0
    assert measured(run, [])["seconds"] == 2.0


@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_domains_are_those_of_the_last_round(method: str) -> None:
    run = fitted(method, model="cnn")
    found = measured(run, ["domain:domain 0", "domain:domain 1", "domain_mean"])
    line = run.result.history[-1]
    own: dict[str, float] = line["domain_accuracy"] if "domain_accuracy" in line else line["client_accuracy"]
    first, second = (100 * value for value in own.values())
    assert found["domain:domain 0"] == pytest.approx(first, rel=1e-5)
    assert found["domain_mean"] == pytest.approx((first + second) / 2, rel=1e-5)


def test_the_classifier_costs_what_the_formulas_say() -> None:
    names = ["classifier_megabytes", "classifier_gflop"]
    width, classes, samples, clients, rounds = 64, 4, 120, 2, 2
    plain = measured(fitted("fedavg"), names)
    weights = width * classes
    # Both ways in every round, four bytes each; three multiplications for a weight, a sample and an epoch.
    assert plain["classifier_megabytes"] == pytest.approx(2 * rounds * 4 * weights / 1e6)
    assert plain["classifier_gflop"] == pytest.approx(3 * weights * samples * rounds / 1e9)
    sphere = measured(fitted("spherefed", lr=1.0), names)
    # Never trained nor sent; once V and U, l (l + C) numbers, and two operations for each and each sample.
    assert sphere["classifier_megabytes"] == pytest.approx(4 * width * (width + classes) / 1e6, rel=0.02)
    assert sphere["classifier_gflop"] == pytest.approx(2 * width * samples * (width + classes) / 1e9)
    assert clients == 2
    # And counts, means and covariances once, all but the counts of as many numbers as the paper counts.
    ccvr = measured(fitted("ccvr"), names)
    assert ccvr["classifier_gflop"] == pytest.approx(
        (3 * weights * samples * rounds + 2 * width * samples * (width + 1)) / 1e9
    )


def test_stored_numbers_leave_out_batch_norm() -> None:
    one = fitted("fedavg", model="resnet8")
    two = fitted("fedprox", model="resnet8")
    network = one.world.network()
    norms = sum(p.numel() for name, p in network.named_parameters() if p.dim() == 1 and not name.startswith("head"))
    whole = sum(p.numel() for p in network.parameters())
    assert measured(one, ["stored"])["stored"] == pytest.approx((whole - norms) / 1e6, rel=1e-5)
    assert measured(two, ["stored"])["stored"] == pytest.approx(2 * (whole - norms) / 1e6, rel=1e-5)
    assert measured(one, ["macs"])["macs"] == pytest.approx(one.cost.network_macs / 1e6, rel=1e-5)
    assert measured(one, ["gigamacs"])["gigamacs"] == pytest.approx(one.cost.network_macs / 1e9, rel=1e-5)


def test_the_cost_of_a_method_that_draws_its_widths_is_a_mean() -> None:
    pictures = {"data": "synthetic:samples=40,test=8,classes=4,size=8", "partition": "iid", "clients": 2}
    run = fitted("gradaug:n=1,lower=0.5", model="resnet8", **pictures)
    drawn = [run.cost_drawn(seed).macs for seed in range(12)]
    assert len(set(drawn)) > 1
    assert measured(run, ["macs"])["macs"] == pytest.approx(np.mean(drawn) / 1e6, rel=1e-5)


def test_the_curvature_counts_each_client_with_itself(tmp_path: Path) -> None:
    """From a real diagnosis, because what that has counted already must not be counted again."""
    few = {"data": "synthetic:samples=60,test=20,classes=3,size=4", "partition": "dirichlet:0.5", "clients": 3}
    federation = Federation(method="fedavg", out=tmp_path, keep_clients="last", **{**SMALL, **few})
    run = Run(federation.world, federation.fit(), {})
    found = Diagnosis(tmp_path, Options(("curvature",), samples=20, probes=8))
    diagnosis = diagnosed(found)
    data = (found.train.inputs, found.train.labels)
    traces = []
    for model in found.local:
        found.train.bind(model.weights)
        traces.append(hessian_diagonal(found.train.network, data, probes=8).traces.numpy())
    norms = [np.linalg.norm(t) for t in traces]
    pairs = [(i, j) for i in range(3) for j in range(3)]
    measures = measured(Run(run.world, run.result, diagnosis), ["lambda_max", "H_T", "H_N", "H_D"])
    assert measures["H_N"] == pytest.approx(np.mean([(norms[i] - norms[j]) ** 2 for i, j in pairs]), rel=1e-4)
    cosines = [traces[i] @ traces[j] / norms[i] / norms[j] for i, j in pairs]
    assert measures["H_D"] == pytest.approx(np.mean(cosines), rel=1e-4)
    assert measures["lambda_max"] == pytest.approx(float(diagnosis["curvature"]["eigenvalues"][0]), rel=1e-5)
    assert measures["H_T"] == pytest.approx(diagnosis["curvature"]["trace"], rel=1e-5)
    # What each client adds to it is told, and kept with the result.
    each = figures.numbers([], diagnosis, [])["figure"]["curvature"]["clients"]
    assert each["clients"] == [0, 1, 2] and each["lengths"] == pytest.approx(norms, rel=1e-4)
    assert each["traces"] == pytest.approx([t.sum() for t in traces], rel=1e-4)


def test_the_numbers_of_a_figure_are_those_of_its_last_line() -> None:
    spectrum = [float(n) for n in range(300, 0, -1)]
    local = [{"client": c, "representation_spectrum": spectrum, "gap": g} for c, g in ((0, -1.0), (9, -3.0))]
    line = {"round": 8, "classifier_spectrum": spectrum, "significant": 7, "alignment": {"cosine": 0.5}, "local": local}
    found = figures.measured([{"round": 4}, line], {})
    assert found["singular_sum"] == 300 * 301 / 2 and found["singular_least"] == 1.0
    assert found["significant"] == 7 and found["gap"] == -2.0 and found["cosine"] == 0.5
    kept = figures.numbers([line], {}, [])["figure"]["lines"][0]
    assert kept["classifier_spectrum"] == spectrum[:100] and len(kept["local"][1]["representation_spectrum"]) == 100
    assert figures.numbers([], {}, []) == {}


def test_the_spread_between_clients_is_a_share_of_the_variance() -> None:
    apart = {"points": [[0.0, 0.0], [0.0, 0.0], [4.0, 0.0], [4.0, 0.0]], "class": [1] * 4, "client": [0, 0, 1, 1]}
    mixed = apart | {"client": [0, 1, 0, 1]}
    assert figures.measured([], {"tsne": apart})["tsne_spread"] == 1.0
    assert figures.measured([], {"tsne": apart})["tsne_points"] == 4
    assert figures.measured([], {"tsne": mixed})["tsne_spread"] == 0.0
