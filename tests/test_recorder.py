"""Diagnostics during a run: the right numbers from every executor, rewound with the run, without effect on it."""

from __future__ import annotations

import importlib.util
import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isofed import recorder
from isofed.engine.workers import Pool
from isofed.federation import Federation
from isofed.files import load_tensors
from isofed.models import create
from isofed.progress import Watcher
from isofed.records import RunFolder
from tests.engine.plain import Plain, distance, small
from tests.run_tools import Stop


def timeless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.endswith("seconds")} for line in lines]


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedbn", "spherefed", "fedavgm+feddecorr"])
def test_training_is_the_same_with_and_without(method: str) -> None:
    settings: dict[str, Any] = {"method": method, "model": "cnn", "rounds": 3, "participation": 0.75, "momentum": 0.9}
    plain, diagnosed = small(**settings), small(**settings, diagnose="every:2")
    wanted, found = plain.fit(), diagnosed.fit()
    assert distance(found.weights, wanted.weights) == 0
    assert torch.equal(diagnosed.state.weights, plain.state.weights)
    assert timeless(found.history) == timeless(wanted.history)
    assert [line["round"] for line in diagnosed.diagnostics] == [2]
    assert plain.diagnostics == []


def test_the_numbers_of_a_line(tmp_path: Path) -> None:
    """Against NumPy and a fresh network, on the models that the run kept of the same round."""
    run = small(rounds=2, diagnose="every:1", keep="every:1", keep_clients="every:1", out=tmp_path / "run")
    run.fit()
    folder = RunFolder.open(tmp_path / "run")
    lines = folder.diagnostics()
    assert lines == json.loads(json.dumps(run.diagnostics))
    kept = {(one.round, one.client): load_tensors(one.path)[0] for one in folder.kept()}
    assert sorted(kept, key=str) == sorted([(r, c) for r in (1, 2) for c in (None, 0, 1, 2, 3)], key=str)
    line, clients = lines[1], range(4)
    heads = [kept[2, c]["head.weight"].double().numpy() for c in clients]

    classifier = np.linalg.svd(kept[2, None]["head.weight"].double().numpy(), compute_uv=False)
    assert line["classifier_spectrum"] == pytest.approx(classifier, rel=1e-5)
    shares = classifier / classifier.sum()
    assert line["classifier_effective_rank"] == pytest.approx(math.exp(-(shares * np.log(shares)).sum()))

    pairs = list(combinations(heads, 2))
    lengths = [np.linalg.norm(h, axis=1) for h in heads]
    cosines = [(a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1) for a, b in pairs]
    assert line["alignment"]["cosine"] == pytest.approx(np.mean(cosines))
    assert line["alignment"]["norm_difference"] == pytest.approx(
        np.mean([abs(a - b) for a, b in combinations(lengths, 2)])
    )

    names = [n for n, _ in create("mlp", classes=4, shape=(1, 8, 8)).named_parameters()]
    moved = [
        np.concatenate([(kept[2, c][n].double() - kept[1, None][n].double()).flatten().numpy() for n in names])
        for c in clients
    ]
    mean = np.average(moved, axis=0, weights=[len(run.world.clients[c]) for c in clients])
    assert line["drift"]["clients"] == list(clients)
    assert line["drift"]["length"] == pytest.approx([np.linalg.norm(m) for m in moved], rel=1e-4)
    assert line["drift"]["distance"] == pytest.approx([np.linalg.norm(m - mean) for m in moved], rel=1e-4)
    angles = [np.degrees(np.arccos(m @ mean / np.linalg.norm(m) / np.linalg.norm(mean))) for m in moved]
    assert line["drift"]["angle"] == pytest.approx(angles, rel=1e-4)

    def features(weights: dict[str, torch.Tensor]) -> np.ndarray:
        network = create("mlp", classes=4, shape=(1, 8, 8))
        network.load_state_dict(weights)
        with torch.no_grad():
            found = network.double().eval()(Plain(run).part("test")[0]).features.numpy()
        return np.linalg.svd(np.cov(found.T, bias=True), compute_uv=False)

    whole = features(kept[2, None])
    assert (line["part"], line["samples"]) == ("test", 20)
    shown = whole > 1e-6 * whole[0]
    assert np.asarray(line["representation_spectrum"])[shown] == pytest.approx(whole[shown], rel=1e-3)
    assert line["significant"] == (np.log(np.clip(whole, 1e-300, None)) > -2).sum()
    assert [local["client"] for local in line["local"]] == [0, 3]
    own = features(kept[2, 3])
    assert np.asarray(line["local"][1]["representation_spectrum"])[shown] == pytest.approx(own[shown], rel=1e-3)


def test_a_gap_is_zero_between_equal_models() -> None:
    run = small(rounds=1, clients=1, partition="iid", diagnose="every:1")
    run.fit()
    (line,) = run.diagnostics
    assert [local["gap"] for local in line["local"]] == pytest.approx([0.0], abs=1e-6)  # its model is the mean
    assert "alignment" not in line and "drift" not in line


def test_every_executor_gives_the_same_lines(two_workers: Pool) -> None:
    settings: dict[str, Any] = {"model": "cnn", "method": "scaffold+fedbn", "rounds": 2, "diagnose": "every:2"}
    serial, workers = small(**settings), small(**settings, executor="workers", pool=two_workers)
    serial.fit()
    workers.fit()
    assert timeless(workers.diagnostics) == timeless(serial.diagnostics)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (the extra 'ray')")
def test_ray_gives_the_same_lines() -> None:
    settings: dict[str, Any] = {"model": "cnn", "rounds": 2, "diagnose": "every:2"}
    serial, ray = small(**settings), small(**settings, executor="ray", actors=2)
    serial.fit()
    ray.fit()
    assert timeless(ray.diagnostics) == timeless(serial.diagnostics)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_slots_hand_over_the_same_models() -> None:
    settings: dict[str, Any] = {"model": "cnn", "rounds": 2, "diagnose": "every:1", "device": "cuda"}
    serial, slots = small(**settings), small(**settings, executor="slots")
    plain = small(**settings | {"diagnose": "none", "executor": "slots"})
    serial.fit()
    slots.fit()
    plain.fit()
    assert timeless(slots.diagnostics) == timeless(serial.diagnostics)
    assert torch.equal(slots.state.weights, plain.state.weights)


def test_of_many_clients_an_even_selection_is_looked_at() -> None:
    run = small(clients=30, partition="iid", data="synthetic:samples=300,test=20", rounds=1, diagnose="every:1")
    jobs, _ = run._sample(1)
    wanted = [job.client for job in jobs if job.keep]
    assert len(wanted) == recorder.CLIENTS and wanted[0] == 0 and wanted[-1] == 29
    run.fit()
    assert run.diagnostics[0]["drift"]["clients"] == wanted


def test_large_models_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(rounds=1, clients=6, partition="iid", diagnose="every:1")
    monkeypatch.setattr(recorder, "BYTES", 3 * 4 * run.layout.total)
    run = small(rounds=1, clients=6, partition="iid", diagnose="every:1")
    run.fit()
    assert run.diagnostics[0]["drift"]["clients"] == [0, 2, 5]


def test_only_diagnosed_rounds_ask_for_models_and_none_is_stored(tmp_path: Path) -> None:
    run = small(rounds=4, diagnose="every:3", out=tmp_path / "run")
    kept = [any(job.keep for job in run._sample(number)[0]) for number in (1, 2, 3, 4)]
    assert kept == [False, False, True, False]
    run.fit()
    assert not (tmp_path / "run" / "kept").exists()


def test_a_frozen_head_keeps_its_spectrum_and_clients_agree_on_it() -> None:
    run = small(method="spherefed", rounds=3, diagnose="every:1")
    run.fit()
    first, _, last = run.diagnostics
    assert first["classifier_spectrum"] == last["classifier_spectrum"]
    assert last["alignment"]["cosine"] == pytest.approx(1.0)
    assert last["alignment"]["norm_difference"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_is_taken_up_has_the_lines_of_one_that_was_not(killed: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 5, "diagnose": "every:1", "participation": 0.75}
    whole = small(**settings)
    whole.fit()
    with pytest.raises(KeyboardInterrupt):
        small(**settings, out=tmp_path / "run").fit(Stop(3))
    lines = tmp_path / "run" / "diagnostics.jsonl"
    if killed:  # later than its checkpoint, in the middle of a line
        extra = json.dumps({"round": 4, "significant": -1}) + "\n"
        lines.write_text(lines.read_text() + extra + '{"round": 5, "signif')
    again = Federation.resume(tmp_path / "run")
    again.fit()
    assert timeless(again.diagnostics) == timeless(whole.diagnostics)
    assert timeless(RunFolder.open(tmp_path / "run").diagnostics()) == timeless(whole.diagnostics)


def test_a_half_written_line_is_left_out_and_cut_off(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {"a": 1}, {"b": 2})
    folder.diagnose({"round": 1})
    path = tmp_path / "run" / "diagnostics.jsonl"
    path.write_text(path.read_text() + '{"round": 2')
    again = RunFolder.open(tmp_path / "run")
    assert again.diagnostics() == [{"round": 1}]
    again.diagnose({"round": 3, "x": float("nan")})
    assert again.diagnostics() == [{"round": 1}, {"round": 3, "x": None}]


def test_features_that_are_not_finite_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = small(rounds=1, diagnose="every:1")
    assert run._recorder is not None
    probe = run._recorder._probe
    probe.inputs = probe.inputs * math.inf
    run.fit()
    (line,) = run.diagnostics
    assert "representation_spectrum" not in line and len(line["classifier_spectrum"]) == 4


def test_the_validation_part_is_looked_at_where_rounds_are_judged_on_it() -> None:
    run = small(rounds=1, validation=0.2, diagnose="every:1")
    run.fit()
    assert (run.diagnostics[0]["part"], run.diagnostics[0]["samples"]) == ("validation", 20)


def test_watchers_hear_of_it() -> None:
    heard: list[int] = []

    class Listener(Watcher):
        def diagnosis(self, line: dict[str, Any]) -> None:
            heard.append(line["round"])

    small(rounds=4, diagnose="every:2").fit(Listener())
    assert heard == [2, 4]
