"""The scripts in ``benchmarks/``: mistakes are found before any work, and records say what they were made with."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from isofed.engine.choose import available_cores
from isofed.models import winograd

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
Main = Callable[..., str]
no_gpu_here = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """Run a script with some words; what it prints, or what it says as it gives up."""
    monkeypatch.syspath_prepend(FOLDER)  # where a script finds its neighbours

    def main(script: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *words])
        threads = torch.get_num_threads()
        try:
            runpy.run_path(str(FOLDER / script))["main"]()
        except SystemExit as end:
            return f"{capsys.readouterr().err}{end}"
        finally:
            torch.set_num_threads(threads)
        return capsys.readouterr().out

    return main


@no_gpu_here
@pytest.mark.parametrize("script", ["augment.py", "clients.py", "diagnostics.py", "hessian.py", "refit.py"])
def test_a_gpu_that_is_not_there_is_said_in_one_sentence(script: str, run: Main) -> None:
    assert "needs a GPU that PyTorch can use, and there is none here" in run(script, "--device", "cuda")


@pytest.mark.parametrize(
    "script", ["augment", "clients", "convolutions", "data", "diagnostics", "hessian", "kernels", "limits", "methods",
               "operations", "overhead", "precision", "refit", "robust", "squares", "steps", "sums"]
)  # fmt: skip
def test_a_file_that_cannot_be_written_is_found_before_the_work(script: str, run: Main, tmp_path: Path) -> None:
    said = run(f"{script}.py", "--json", str(tmp_path / "nowhere" / "found.json"))
    assert "it must name a file in a folder that is there" in said


def test_a_record_has_versions_hardware_and_all_options(run: Main, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ["--samples", "300", "--classes", "4", "--model", "mlp", "--repeats", "1", "--json", str(file)]
    out = run("refit.py", "--device", "cpu", *words)
    assert "CCVR takes" in out
    record: dict[str, Any] = json.loads(file.read_text())
    about = record["environment"]
    assert (about["torch"], about["cores"]) == (torch.__version__, available_cores()) and about["device_name"]
    options = {"device": "cpu", "model": "mlp", "samples": 300, "classes": 4, "repeats": 1}
    assert record["options"] == options
    assert {name: len(times) for name, times in record["seconds"].items()} == {"ffc": 1, "ccvr": 1}


def test_versions_of_the_peers_are_recorded(run: Main, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    namespace = argparse.Namespace(json=file, rounds=3)
    runpy.run_path(str(FOLDER / "record.py"))["write"](namespace, "cpu", ("numpy", "no-such-package"), runs=[1])
    record = json.loads(file.read_text())
    assert record["environment"]["numpy"] and "no-such-package" not in record["environment"]
    assert record["options"] == {"rounds": 3} and record["runs"] == [1]


def test_the_bytes_of_a_step_are_those_of_its_layers(run: Main) -> None:
    """By hand, for one linear layer of 2 x 3 inputs and 5 outputs on batches of 7."""
    from torch import nn

    step_bytes = runpy.run_path(str(FOLDER / "limits.py"))["step_bytes"]
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 5))
    network.shape = (1, 2, 3)  # type: ignore[assignment]
    weights = 6 * 5 + 5
    moved = 7 * ((6 + 5) + (5 + 6 + 6)) + 3 * weights  # forward; back; weights twice and their gradients once
    update = 5 * weights  # weight, gradient and momentum in, weight and momentum out
    assert step_bytes(network, 7, "bf16") == 2 * moved + 4 * update
    assert step_bytes(network, 7, "fp32") == 4 * moved + 4 * update


def test_a_step_is_compared_with_one_of_plain_layers(run: Main, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    out = run("operations.py", "--network", "mlp", "--batch", "4", "--json", str(file))
    record = json.loads(file.read_text())
    assert "mlp, batch 4: a step takes" in out and record["products_flops"] > 0
    assert len(record["step_seconds"]) == len(record["plain_step_seconds"]) > 2


def test_exact_sums_are_timed_in_turns(run: Main, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    out = run("sums.py", "--numbers", "1000", "--repeats", "2", "--json", str(file))
    times = json.loads(file.read_text())["seconds"]
    assert {name: len(found) for name, found in times.items()} == {"exact, largest known": 2, "exact": 2, "float64": 2}
    assert "1,000 numbers, 50 updates" in out and min(min(found) for found in times.values()) > 0


@pytest.mark.skipif(not winograd.available(), reason="this processor has no AVX-512, or there is no C compiler")
def test_convolutions_on_a_processor_are_timed_in_turns(run: Main, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ["--channels", "16x16,16x32", "--sides", "4,8", "--batches", "4", "--repeats", "2", "--json", str(file)]
    out = run("squares.py", *words)
    found = json.loads(file.read_text())["milliseconds"]
    assert [f["layer"] for f in found] == [[4, 16, 16, 4], [4, 16, 16, 8], [4, 16, 32, 4], [4, 16, 32, 8]]
    assert all(len(f[way]) == 2 and min(f[way]) > 0 for f in found for way in ("theirs", "ours"))
    assert [line.endswith("*") for line in out.splitlines()[1:5]] == [False, True, False, True]


def test_precisions_are_compared_seed_by_seed(run: Main, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ["--data", "digits", "--model", "mlp", "--rounds", "1", "--seeds", "2", "--device", "cpu"]
    out = run("precision.py", *words, "--json", str(file))
    exact, other = json.loads(file.read_text())["accuracy"].values()
    assert f"seed by seed: {other[0] - exact[0]:+.2f}, {other[1] - exact[1]:+.2f}" in out and exact != [0, 0]


def test_one_round_cannot_be_timed(run: Main) -> None:
    assert "--rounds must be at least 2" in run("clients.py", "--device", "cpu", "--rounds", "1")


def test_other_frameworks_are_missed_before_the_first_run(run: Main, tmp_path: Path) -> None:
    assert "there is no folder cifar-10-batches-bin" in run("peers.py", "--data", str(tmp_path))
    (tmp_path / "cifar-10-batches-bin").mkdir()
    try:
        import pfl  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        said = run("peers.py", "--data", str(tmp_path), "--frameworks", "isofed,pfl")
        assert said == "pfl cannot be imported; install the peers, or choose --frameworks"


@pytest.mark.parametrize("word", ["round=3", "--fast"])
def test_a_campaign_of_faults_starts_with_no_word_misunderstood(word: str, run: Main, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    kept = tmp_path / "thesis.txt"
    kept.write_text("years of work")
    assert f"'{word.partition('=')[0]}' is none of the words" in run("faults.py", word, f"out={tmp_path}")
    assert kept.exists()


def test_a_campaign_of_faults_empties_no_other_folder(run: Main, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    kept = tmp_path / "thesis.txt"
    kept.write_text("years of work")
    assert "is not a campaign's folder" in run("faults.py", f"out={tmp_path}")
    assert "python benchmarks/faults.py" in run("faults.py", "--help", f"out={tmp_path}")
    assert kept.read_text() == "years of work"


def test_both_ways_to_a_hessian_give_the_same_products(run: Main, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ["--networks", "resnet8", "--samples", "4", "--repeats", "1", "--json", str(file)]
    assert "1 repeats in turns; 4 pictures" in run("hessian.py", *words)
    made = json.loads(file.read_text())["found"]["resnet8"]
    assert made["apart"] < 1e-12 and all(len(times) == 1 for times in made["milliseconds"].values())
