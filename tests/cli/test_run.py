"""``isofed run`` as a person uses it: what it prints, what it writes, and that the files hold what they should."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from isofed.config import settings
from isofed.engine.world import World
from isofed.files import Tensors, load_tensors
from tests.cli_tools import (
    SMALL,
    complaint,
    config,
    everything,
    isofed,
    metrics,
    model,
    result,
    start,
    succeeds,
)


def test_a_run_prints_what_it_records(tmp_path: Path) -> None:
    run = tmp_path / "run"
    out = succeeds("run", *SMALL, "rounds=5", "method=fedprox:mu=0.1", "target=0.12", f"out={run}")
    lines, record = metrics(run), result(run)
    assert out.splitlines()[0] == "fedprox:mu=0.1 on synthetic: 2 clients (iid), mlp, 5 rounds, seed 0"
    for line in lines:
        shown = f"round {line['round']}/5   accuracy {100 * line['accuracy']:>5.1f} %   loss {line['loss']:.3f}"
        assert shown in out
    assert f"test accuracy {100 * record['accuracy']:.1f} % after 5 rounds" in out
    assert f"best {100 * record['best_accuracy']:.1f} %" in out
    assert f"recorded in {run}" in out

    assert record["accuracy"] == lines[-1]["accuracy"] and record["loss"] == lines[-1]["loss"]
    assert record["best_accuracy"] == max(line["accuracy"] for line in lines)
    assert record["bytes_up"] == sum(line["bytes_up"] for line in lines)
    assert record["seconds"] == pytest.approx(sum(line["seconds"] for line in lines))
    reached = [line["round"] for line in lines if line["accuracy"] >= 0.12]
    assert record["rounds_to_target"] == (reached[0] if reached else None)
    assert [line["lr"] for line in lines] == [0.05] * 5
    assert all(line["samples"] == 200 and line["clients"] == 2 and line["events"] == [] for line in lines)

    # The recorded accuracy is that of the recorded model.
    world = World.create(settings(config(run)))
    network = world.network()
    network.load_state_dict(load_tensors(run / "model.safetensors")[0])
    network.eval()
    test = world.parts["test"]
    mean, std = torch.tensor(world.dataset.mean), torch.tensor(world.dataset.std)
    inputs = ((test.images / 255 - mean) / std).permute(0, 3, 1, 2)
    right = (network(inputs).logits.argmax(1) == test.labels).double().mean()
    assert float(right) == pytest.approx(record["accuracy"], abs=1e-9)


def test_without_out_every_run_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        out = succeeds("run", *SMALL, "rounds=1", cwd=tmp_path)
        assert "recorded in runs/" in out
    made = sorted(tmp_path.glob("runs/*"))
    assert len(made) == 2 and all("fedavg" in path.name and "synthetic" in path.name for path in made)
    assert model(made[0]) == model(made[1])  # and the same command is the same run


def test_two_runs_started_at_once_get_two_folders(tmp_path: Path) -> None:
    both = [start("run", *SMALL, "rounds=3", cwd=tmp_path) for _ in range(2)]
    ends = [command.wait() for command in both]
    assert [(end.code, end.err) for end in ends] == [(0, ""), (0, "")]
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 2


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    succeeds("run", *SMALL, "rounds=1", f"out={tmp_path / 'run'}")
    before = everything(tmp_path)
    done = isofed("run", *SMALL, "rounds=1", f"out={tmp_path / 'run'}")
    assert done.code == 2 and "already holds a run" in done.err and "--resume" in done.err
    assert everything(tmp_path) == before


def test_a_run_that_goes_on_stays_in_its_folder(tmp_path: Path) -> None:
    succeeds("run", *SMALL, "rounds=1", "out=a", cwd=tmp_path)
    before = everything(tmp_path / "a")
    said = complaint(isofed("run", "--resume", "a", "rounds=2", "out=b", cwd=tmp_path), 2)
    assert said == "a run that goes on stays in its folder: leave out= away, or go on with a copy of a"
    assert everything(tmp_path / "a") == before and not (tmp_path / "b").exists()
    assert "after 2 rounds" in succeeds("run", "--resume", "a", "rounds=2", f"out={tmp_path / 'a'}", cwd=tmp_path)


def test_odd_names_of_folders_are_shown_as_they_are(tmp_path: Path) -> None:
    for name in ("two words", "[red]x[/red]", "[/]", "ü'\"", "100%"):
        out = succeeds("run", *SMALL, "rounds=1", f"out={name}", cwd=tmp_path)
        assert out.splitlines()[-1] == f"recorded in {name}"
        assert (tmp_path / name / "result.json").exists()
        succeeds("run", "--resume", name, cwd=tmp_path)


def test_evaluate_every_and_stopping_at_a_target(tmp_path: Path) -> None:
    words = ("data=synthetic:samples=300,test=100,noise=0.1", "model=mlp", "partition=iid", "clients=2", "rounds=20")
    succeeds("run", *words, "evaluate_every=3", "target=0.9", "stop_at_target=true", f"out={tmp_path / 'run'}")
    lines = metrics(tmp_path / "run")
    judged = [line for line in lines if line.get("accuracy") is not None]
    assert [line["round"] for line in judged] == list(range(3, len(lines) + 1, 3))
    assert judged[-1]["accuracy"] >= 0.9 and all(line["accuracy"] < 0.9 for line in judged[:-1])
    assert (
        len(lines) < 20
        and result(tmp_path / "run")["rounds_to_target"] == len(lines) == result(tmp_path / "run")["rounds"]
    )
    assert f"reached in round {len(lines)}" in succeeds("run", "--resume", tmp_path / "run")


def test_a_validation_part_judges_the_rounds_and_the_test_part_the_end(tmp_path: Path) -> None:
    succeeds("run", *SMALL, "rounds=2", "validation=0.2", f"out={tmp_path / 'run'}")
    record, lines = result(tmp_path / "run"), metrics(tmp_path / "run")
    assert record["validation_accuracy"] == lines[-1]["accuracy"]
    assert all(line["samples"] == 160 for line in lines)
    assert record["accuracy"] * 50 == pytest.approx(round(record["accuracy"] * 50), abs=1e-9)  # of 50 test samples
    out = succeeds("run", *SMALL, "rounds=2", "validation=0.2", "final_test=false", f"out={tmp_path / 'blind'}")
    assert re.search(r"^validation accuracy [\d.]+ % after 2 rounds, best [\d.]+ %;", out, re.MULTILINE)
    assert "test accuracy" not in out  # nobody has looked at it
    blind = (*SMALL, "rounds=2", "validation=0.2", "final_test=false", f"out={tmp_path / 'two'}")
    assert "2 rounds; on the validation part, mean ± standard" in " ".join(
        succeeds("compare", "fedavg", *blind).split()
    )
    assert result(tmp_path / "blind")["accuracy"] == result(tmp_path / "blind")["validation_accuracy"]


# --- what is kept


def test_kept_models_are_what_they_say(tmp_path: Path) -> None:
    """Client models of a FedAvg round, averaged by samples, are the next global weights."""
    run = tmp_path / "run"
    words = ("data=synthetic:samples=200,test=50", "model=mlp", "partition=quantity:0.5", "clients=3", "rounds=4")
    succeeds("run", *words, "local_epochs=1", "keep=every:2", "keep_clients=every:1", f"out={run}")
    kept = sorted(p.name for p in (run / "kept").iterdir())
    shared = [f"round-{r:06d}.safetensors" for r in (2, 4)]
    assert kept == sorted(shared + [f"round-{r:06d}-client-{c:06d}.safetensors" for r in range(1, 5) for c in range(3)])

    world = World.create(settings(config(run)))
    sizes = np.array([len(c) for c in world.clients], dtype=np.float64)
    assert len(set(sizes)) > 1, "equal sizes would hide a wrong weighting"

    def mean_of_clients(round: int) -> Tensors:
        names = [run / "kept" / f"round-{round:06d}-client-{c:06d}.safetensors" for c in range(3)]
        models = [load_tensors(name)[0] for name in names]
        share = torch.from_numpy(sizes / sizes.sum())
        return {k: torch.tensordot(share, torch.stack([m[k].double() for m in models]), 1) for k in models[0]}

    final, info = load_tensors(run / "model.safetensors")
    assert "fedavg" in info["method"] and info["round"] == 4
    second, info = load_tensors(run / "kept" / "round-000002.safetensors")
    assert info["round"] == 2
    fourth, _ = load_tensors(run / "kept" / "round-000004.safetensors")
    assert set(final) == set(world.network().state_dict())
    for name, value in final.items():
        assert torch.equal(value, fourth[name])
        assert float((mean_of_clients(4)[name] - value).abs().max()) < 1e-6
        assert float((mean_of_clients(2)[name] - second[name]).abs().max()) < 1e-6
    assert float((final["head.weight"] - second["head.weight"]).abs().max()) > 1e-3


def test_clients_of_the_last_round_only(tmp_path: Path) -> None:
    words = (*SMALL, "rounds=3", "keep_clients=last", "executor=serial")
    succeeds("run", *words, f"out={tmp_path / 'run'}")
    kept = sorted((tmp_path / "run" / "kept").iterdir())
    assert [p.name for p in kept] == [f"round-000003-client-{c:06d}.safetensors" for c in range(2)]
    one, info = load_tensors(kept[0])
    other, _ = load_tensors(kept[1])
    final, _ = load_tensors(tmp_path / "run" / "model.safetensors")
    assert info["client"] == 0
    for name, value in final.items():
        assert float(((one[name] + other[name]) / 2 - value).abs().max()) < 1e-6
    succeeds("run", *SMALL, "rounds=3", f"out={tmp_path / 'plain'}")
    assert model(tmp_path / "plain") == model(tmp_path / "run")  # keeping changes nothing
    assert not (tmp_path / "plain" / "kept").exists()


def test_models_of_the_clients_own_are_in_the_final_model(tmp_path: Path) -> None:
    words = ("data=synthetic:samples=200,test=60,domains=2", "partition=domain", "norm=batch", "rounds=2")
    succeeds("run", *words, "method=fedbn", "local_epochs=1", f"out={tmp_path / 'run'}")
    final, _ = load_tensors(tmp_path / "run" / "model.safetensors")
    own = {k.split("/")[1] for k in final if k.startswith("client/")}
    assert own == {"0", "1"}
    assert set(metrics(tmp_path / "run")[-1]["client_accuracy"]) == {"0", "1"}
