"""Run folders with numbers that are known, written as a run writes them but without training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isofed.config import settings
from isofed.data import load
from isofed.records import RunFolder, environment
from isofed.result import Result

DATA = "synthetic:samples=200,test=50"
FINALS = {"fedavg": [0.5, 0.52, 0.54], "fedprox": [0.7, 0.73, 0.73], "scaffold": [0.6, 0.61, 0.68]}


def line(round: int, accuracy: float, seconds: float = 0.5, megabytes: float = 1.0) -> dict[str, Any]:
    """A round as the metrics have it."""
    half = int(megabytes * 5e5)
    shown = {"accuracy": accuracy, "loss": 2 * (1 - accuracy), "class_accuracy": [accuracy], "train_loss": 1 - accuracy}
    paid = {"samples": 200, "bytes_up": half, "bytes_down": half, "seconds": seconds}
    return {"round": round, "lr": 0.1, **paid, **shown, "events": []}


def make_run(
    path: Path,
    accuracies: Sequence[float],
    method: str = "fedavg",
    seed: int = 0,
    finished: bool = True,
    seconds: float = 0.5,
    megabytes: float = 1.0,
    **given: Any,
) -> RunFolder:
    """A run with these accuracies, round by round."""
    s = settings({"data": DATA, "partition": "iid", "clients": 4, "method": method, "seed": seed, **given})
    made_with = environment("cpu", load(s.data).fingerprint) | {"files": s.files()}
    folder = RunFolder.create(path, s.to_dict(), made_with)
    history = [line(n, a, seconds, megabytes) for n, a in enumerate(accuracies, 1)]
    for round in history:
        folder.append(round)
    if finished:
        folder.finish({}, {}, Result.of(s, history, [], {}, []).to_dict())
    return folder


def add_privacy(folder: Path, epsilon: float, delta: float = 1e-5) -> None:
    """What a run with noise on its updates records about it."""
    result = json.loads((folder / "result.json").read_text())
    told = {"unit": "a whole client", "protects against": "whoever sees the models"}
    (folder / "result.json").write_text(json.dumps(result | {"privacy": {"epsilon": epsilon, "delta": delta, **told}}))


def add_question(folder: Path, accuracy: float, loss: float) -> None:
    """A question after the last round, as FFC asks one: the final model is another than that of the last round."""
    result = json.loads((folder / "result.json").read_text())
    asked = {"exchanges": [{"accuracy": accuracy, "loss": loss}], "accuracy": accuracy, "loss": loss}
    (folder / "result.json").write_text(json.dumps(result | asked))


def make_comparison(root: Path, finals: Mapping[str, Sequence[float]], **given: Any) -> Path:
    """A folder of runs, one for each method and seed, with these final accuracies."""
    for method, accuracies in finals.items():
        sent = 0.0 if method == "central" else 1.0
        for seed, accuracy in enumerate(accuracies):
            folder = root / method.replace(":", "-") / f"seed-{seed}"
            make_run(folder, [0.1, accuracy / 2, accuracy], method, seed, rounds=3, megabytes=sent, **given)
    return root


def diagnose(folder: Path, rounds: Sequence[int], values: int = 10, error: float | None = None) -> None:
    """Diagnostics of these rounds, as a run records them, and a diagnosis, as ``isofed diagnose`` does.

    ``error`` is that of the Hessians' diagonals; none means that noise outweighs them.
    """
    lines = [
        {
            "round": n,
            "classifier_spectrum": [2.0 / k for k in range(1, values + 1)],
            "classifier_effective_rank": values - n / 100,
            "representation_spectrum": [n * 10.0**-k for k in range(1, values + 1)],
            "significant": values // 2,
            "local": [
                {
                    "client": c,
                    "gap": -c / 10,
                    "representation_spectrum": [n * 4.0**-c * 10.0**-k for k in range(1, values)],
                }
                for c in (0, 1)
            ],
            "alignment": {"cosine": 0.9 - n / 1000, "norm_difference": 0.1},
            "drift": {"distance": [1.0, 2.0], "angle": [30.0, 60.0]},
        }
        for n in rounds
    ]
    (folder / "diagnostics.jsonl").write_text("".join(json.dumps(made) + "\n" for made in lines))
    diagnosis = {
        "cost": {
            "points_per": {"megabyte": 12.5, "second": 40.0, "gflop": 7.5},
            "rounds": list(rounds),
            "parameters": 8970,
            "held": 17_940_000,
            "macs_per_sample": 2.5e9,
            "flops_per_sample": 1e7,
        },
        "curvature": {
            "eigenvalues": [12.0, 5.0],
            "trace": 80.0,
            "trace_error": 2.5,
            "clients": {"H_N": 3.0, "H_D": 0.3, "H_N_traces": 17.0, "H_D_traces": 0.9, "error": error},
        },
        "calibration": {"error": 0.05, "confidence": [0.2, None, 0.9], "accuracy": [0.1, None, 0.8]},
        "landscape": {"steps": [-1, 0, 1], "loss": [[3.0, 2.0, 3.0], [2.0, 0.5, 2.0], [9.0, 2.0, 4.0]]},
        "tsne": {"points": [[0.0, 1.0], [1.0, 0.0], [2.0, 2.0]], "class": [0, 1, 1], "client": [3, 4, 4]},
    }
    (folder / "diagnosis.json").write_text(json.dumps(diagnosis))
