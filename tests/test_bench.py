"""``isofed bench``: every way is measured, numbers agree with each other, and mistakes are found before any work."""

from __future__ import annotations

import json
import runpy
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from isofed import bench, cli
from isofed.engine.choose import available_cores
from isofed.engine.replica import Job, Outcome
from isofed.engine.slots import Slots
from isofed.engine.world import World
from isofed.errors import RunError
from tests.cli_tools import complaint, isofed

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def run(monkeypatch: pytest.MonkeyPatch, *words: str, width: int = 160) -> str:
    """The command in this process, with measurements that are too short to be good."""
    monkeypatch.setattr(bench, "SECONDS", 0.05)
    monkeypatch.setattr(cli, "console", Console(width=width, color_system=None))
    done = CliRunner().invoke(cli.app, ["bench", *words])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    return done.stdout


def check_rows(rows: list[dict[str, Any]], repeats: int, batch: int) -> None:
    """Rates are positive, pictures are full batches, and ratios are to the faster bare loop."""
    bare = [row for row in rows if row["way"] == "bare"]
    base = max(bare, key=lambda row: sorted(row["steps_per_second"])[repeats // 2])["steps_per_second"]
    for row in rows:
        rates = row["steps_per_second"]
        assert len(rates) == repeats and min(rates) > 0
        assert row["images_per_second"] == pytest.approx([batch * rate for rate in rates])
        assert row["ratios"] == pytest.approx([a / b for a, b in zip(rates, base, strict=True)])
        assert (row["setup_seconds"] is None) == (row["way"] == "bare")
        assert row["setup_seconds"] is None or row["setup_seconds"] > 0


def test_the_table_and_the_file_have_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, before = tmp_path / "bench.json", torch.get_num_threads()
    out = run(monkeypatch, "device=cpu", "model=mlp", "batch_size=4", "workers=2", "repeats=3", f"json={file}")
    assert torch.get_num_threads() == before
    cores, record = available_cores(), json.loads(file.read_text())
    ways = [(row["way"], row["count"], row["unit"]) for row in record["rows"]]
    loops = [("bare", n, "thread") for n in dict.fromkeys([cores, 1])]
    assert ways == [*loops, ("serial", 1, "thread"), ("workers", 2, "worker")]
    check_rows(record["rows"], repeats=3, batch=4)

    about = record["environment"]
    assert {"isofed", "python", "torch", "platform", "device", "device_name"} <= about.keys()
    assert (about["device"], about["cores"], record["repeats"]) == ("cpu", cores, 3)
    assert record["settings"]["batch_size"] == 4 and record["settings"]["workers"] == 2

    first, *_ = out.splitlines()
    assert first.startswith(about["device_name"]) and "fp32, batch 4, pictures of 32 x 32 x 3" in first
    assert "\n[1/1] mlp  " in out and f"all numbers are in {file}" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for label in ("bare, 1 thread", "serial, 1 thread", "2 workers"):
        assert sum(line.removeprefix("mlp ").startswith(label) for line in lines) == 1, label
    assert "median (range) of 3 repeats in turns" in " ".join(lines).lower()


def test_several_networks_one_executor_half_precision_and_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("models=mlp,cnn,mlp", "executor=serial", "precision=bf16", "batch_size=4", "repeats=1", "method=scaffold")
    out = run(monkeypatch, "device=cpu", *words, width=79)
    assert "[1/2] mlp" in out and "[2/2] cnn" in out and "workers" not in out
    assert sum("serial, 1 thread" in line for line in out.splitlines()) == 2
    assert "…" not in out and max(map(len, out.splitlines())) < 80


def test_pooled_data_are_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("device=cpu", "model=mlp", "executor=serial", "batch_size=4", "repeats=1", "method=central")
    assert "serial, 1 thread" in run(monkeypatch, *words)


def test_every_batch_is_full_and_every_step_is_counted() -> None:
    s = bench.chosen(clients=3, samples=8, steps=5, model="mlp", batch_size=4, executor="serial")
    world = World.create(s)
    assert [len(c) for c in world.clients] == [8, 8, 8]
    with closing(bench.Federated(world, clients=2)) as federated:
        done = list(federated.executor.train([Job(9, 2, 0.01, 1 / 3)], federated._weights, {}, lambda c: None))
        assert [(one.steps, one.samples) for one in done if isinstance(one, Outcome)] == [(5, 20)]
        assert federated.count == 1 and federated.seconds > 0 and federated() > 0


def test_clients_that_fail_are_not_measured() -> None:
    world = World.create(bench.chosen(clients=2, samples=8, model="mlp", batch_size=4, lr=1e30, executor="serial"))
    with pytest.raises(RunError, match="'mlp' cannot be measured: client 0 gave NaN"):
        bench.Federated(world)


MISTAKES = [
    (["model=resnet21"], "there is no model 'resnet21': did you mean 'resnet"),
    (["models=cnn,resnet21"], "there is no model 'resnet21'"),
    (["models=cnn", "model=mlp"], "model and models exclude each other"),
    (["repeats=0"], "repeats must be at least 1, not 0"),
    (["repeats=many"], "repeats must be a whole number, not 'many'"),
    (["json=missing/bench.json"], "there is no folder missing"),
    (["json=."], "it must name a .json file"),
    (["json="], "it must name a .json file"),
    (["json=config.yaml"], "it must name a .json file"),
    (["rounds=3"], "rounds means nothing to bench"),
    (["modles=cnn"], "there is no setting 'modles': did you mean 'models'?"),
    (["batch_size=0"], "batch_size=0 is not possible"),
    (["batch_size=1", "model=resnet20"], "batch_size=1 cannot train batch norm"),
    (["slots=4"], "slots are replicas on a GPU"),
    (["executor=ray"], "bench measures this machine alone"),
    (["device=tpu"], "there is no device 'tpu'"),
    (["cnn"], "'cnn' is neither a setting"),
]


@pytest.mark.parametrize(
    ("words", "said"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_is_one_sentence_before_any_work(words: list[str], said: str) -> None:
    device = [] if "device=tpu" in words else ["device=cpu"]
    done = isofed("bench", *device, *words)
    assert said in complaint(done, 2)
    assert done.out == ""


def test_a_file_of_something_else_is_not_written_over(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    for held in ('{"accuracy": 0.5}', "[1]", "no JSON"):
        file.write_text(held)
        said = complaint(isofed("bench", "device=cpu", f"json={file}"), 2)
        assert said == f"json={file} is not possible: that file holds something else, which would be lost"
        assert file.read_text() == held
    file.write_text(json.dumps({"environment": {}, "settings": {}, "repeats": 1, "rows": []}))
    assert bench._writable(file) == file


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_asking_for_one_is_a_mistake() -> None:
    assert "needs a GPU that PyTorch can use" in complaint(isofed("bench", "device=cuda"), 2)
    assert bench._best_device() == "cpu"


@pytest.mark.parametrize("script", ["steps.py", "methods.py"])
def test_the_benchmarks_explain_themselves_and_ask_for_a_gpu(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(__file__).resolve().parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(folder)  # where a script finds its neighbours
    main = runpy.run_path(str(folder / script))["main"]
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        main()
    assert "--networks" in capsys.readouterr().out
    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", [script])
        with pytest.raises(SystemExit, match="^this benchmark needs a GPU$"):
            main()


@pytest.mark.gpu
@no_gpu
@pytest.mark.parametrize("slots", [None, 2], ids=str)
def test_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: int | None) -> None:
    words = [f"slots={slots}"] if slots else []
    file = tmp_path / "bench.json"
    out = run(monkeypatch, "model=pfl-cnn", "precision=bf16", "batch_size=8", "repeats=2", f"json={file}", *words)
    record = json.loads(file.read_text())
    assert [row["way"] for row in record["rows"]] == ["bare", "serial", "slots"]
    check_rows(record["rows"], repeats=2, batch=8)
    assert record["environment"]["device"] == "cuda" and "bare, 1 stream" in out and "slot" in out
    assert slots is None or record["rows"][-1]["count"] == slots


@pytest.mark.gpu
@no_gpu
def test_slots_are_made_before_the_clock_and_given_back() -> None:
    s = bench.chosen(clients=4, samples=16, steps=4, model="pfl-cnn", batch_size=8, device="cuda", slots=2)
    run = bench.Federated(World.create(s))
    assert isinstance(run.executor, Slots) and run.count == 2 and run() > 0
    run.close()
    assert run.count == 0
