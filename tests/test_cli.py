"""The commands as a person uses them: what they print, what they write, and that the files hold what they should."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from isofed.config import settings
from isofed.engine.world import World
from isofed.files import Tensors, load_tensors
from tests.cli_tools import (
    SMALL,
    config,
    environment,
    escapes,
    everything,
    isofed,
    metrics,
    model,
    plain,
    result,
    same_record,
    start,
    succeeds,
)

COMMANDS = (
    *("run", "compare", "tune", "methods", "models", "data", "diagnose", "report", "watch", "bench", "settings"),
)
MINE = '''
from dataclasses import dataclass

from isofed import Method


@dataclass(frozen=True)
class Mine(Method):
    """A method of one's own."""

    scale: float = 0.5

    def aggregate(self, round):
        round.update = self.scale * round.update
'''


# --- run


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


def test_odd_names_of_folders_are_shown_as_they_are(tmp_path: Path) -> None:
    for name in ("two words", "[red]x[/red]", "[/]", "ü'\"", "100%"):
        out = succeeds("run", *SMALL, "rounds=1", f"out={name}", cwd=tmp_path)
        assert out.splitlines()[-1] == f"recorded in {name}"
        assert (tmp_path / name / "result.json").exists()
        succeeds("run", "--resume", name, cwd=tmp_path)


def test_a_method_file_in_an_odd_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my [/bold] code, 2"
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text(MINE)
    out = succeeds("run", *SMALL, "rounds=1", f"method={folder / 'mine.py'}:Mine:scale=0.25", f"out={tmp_path / 'run'}")
    assert "mine.py:Mine:scale=0.25" in out
    succeeds("run", tmp_path / "run" / "config.yaml", f"out={tmp_path / 'again'}")
    same_record(tmp_path / "again", tmp_path / "run")


def unfinished(run: Path) -> bytes:
    """Take the end of a run away, as a kill just before it would; gives the model it had."""
    before = model(run)
    for name in ("result.json", "model.safetensors"):
        (run / name).unlink()
    return before


def test_a_method_file_gives_the_same_bytes_from_any_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "elsewhere" / "there"
    here.mkdir()
    there.mkdir(parents=True)
    (here / "mine.py").write_text(MINE)
    succeeds("run", *SMALL, "method=mine.py:Mine", "rounds=3", "out=run", cwd=here)
    method, before = result(here / "run")["method"], unfinished(here / "run")
    succeeds("run", "--resume", here / "run", cwd=there)
    assert model(here / "run") == before
    assert result(here / "run")["method"] == method
    succeeds("run", here / "run" / "config.yaml", "out=again", cwd=there)
    same_record(there / "again", here / "run")


def test_relative_paths_still_hold_when_a_run_goes_on_from_elsewhere(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    rng = np.random.default_rng(0)
    np.savez(here / "data.npz", images=rng.integers(0, 255, (60, 4, 4), dtype=np.uint8), labels=np.arange(60) % 3)
    (here / "split.json").write_text(json.dumps([list(range(20)), list(range(20, 48))]))
    words = ("model=mlp", "rounds=2", "partition=from_file:split.json")
    for name, data in (("path", ["data=data.npz"]), ("root", ["data=npz", "root=data.npz"])):
        succeeds("run", *words, *data, f"out={name}", cwd=here)
        before = unfinished(here / name)
        succeeds("run", "--resume", here / name, cwd=there)
        assert model(here / name) == before
        succeeds("run", here / name / "config.yaml", f"out={name}", cwd=there)
        same_record(there / name, here / name)


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
    succeeds("run", *SMALL, "rounds=2", "validation=0.2", "final_test=false", f"out={tmp_path / 'blind'}")
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


# --- quiet, plain, piped


def test_output_that_is_not_a_terminal_is_plain_and_short(tmp_path: Path) -> None:
    out = succeeds("run", *SMALL, "rounds=100", f"out={tmp_path / 'run'}")
    assert not escapes(out) and "\r" not in out
    assert len(out.splitlines()) <= 15
    assert max(map(len, out.splitlines())) <= 120


def test_quiet_shows_the_result_and_nothing_else(tmp_path: Path) -> None:
    out = succeeds("run", *SMALL, "rounds=5", "-q", f"out={tmp_path / 'run'}")
    first, second = out.splitlines()
    assert first.startswith("test accuracy") and second == f"recorded in {tmp_path / 'run'}"
    out = succeeds("compare", "fedavg", *SMALL, "rounds=1", "executor=serial", "--quiet", f"out={tmp_path / 'runs'}")
    assert "[1/1]" not in out and "fedavg" in out


@pytest.mark.parametrize(
    "words",
    [("--help",), *((c, "--help") for c in COMMANDS), ("methods",), ("methods", "scaffold"), ("settings",), ("data",)],
    ids=" ".join,
)
def test_nothing_prints_escapes_into_a_file(words: tuple[str, ...]) -> None:
    out = succeeds(*words)
    assert out.strip() and not escapes(out)


def test_head_ends_a_command_without_a_traceback() -> None:
    """A shell's ``| head -1``, and a reader that is gone before the first word."""
    command = f"'{sys.executable}' -m isofed.cli settings | head -1"
    done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.stdout.startswith("setting")
    for words in (["methods"], ["--help"]):
        read, write = os.pipe()
        os.close(read)
        gone = subprocess.run(
            [sys.executable, "-m", "isofed.cli", *words],
            env=environment(),
            stdout=write,
            stderr=subprocess.PIPE,
            timeout=60,
        )
        os.close(write)
        assert gone.stderr == b""


# --- the other commands


def test_help_of_every_command_has_examples() -> None:
    out = succeeds("--help")
    assert all(f" {command} " in out for command in COMMANDS)
    for command in COMMANDS:
        shown = succeeds(command, "--help")
        assert "Example" in shown and f"isofed {command}" in shown.split("Example", 1)[1], command


def test_version() -> None:
    import isofed as package

    assert plain("--version").out == f"isofed {package.__version__}\n"


def test_a_run_says_what_its_last_question_brought(tmp_path: Path) -> None:
    words = ("data=synthetic:samples=100,test=50", "clients=3", "rounds=1", "model=mlp")
    said = "after the last round: accuracy from #% to #%"
    ffc = re.sub(r"[\d.]+ %", "#%", succeeds("run", "method=ffc", *words, cwd=tmp_path))
    assert f"\nffc {said}; condition number " in ffc
    own = re.sub(r"[\d.]+ %", "#%", succeeds("run", "method=fedbabu", *words, cwd=tmp_path))
    assert f"\npersonal {said} of the clients' own models, in the mean\n" in own


def test_methods_lists_and_explains() -> None:
    from isofed.methods import find, names

    out = succeeds("methods")
    for name in names():
        assert any(line.split(" ")[0] == name for line in out.splitlines())
    assert "mu=0.01" in out
    for name in names():
        shown = succeeds("methods", name)
        assert shown.startswith(name) and "acts at:" in shown
        if name not in ("fedavg", "central"):
            assert find(name)[1].paper and f"paper:   {find(name)[1].paper}" in " ".join(shown.split("\n"))
    both = succeeds("methods", "fedprox:mu=0.3+fedbn")
    assert "option:  mu = 0.3" in both and "fedbn" in both
    scaffold = succeeds("methods", "scaffold")
    acts = next(line for line in scaffold.splitlines() if line.startswith("acts at:"))
    assert all(place in acts for place in ("send", "end", "gradient", "aggregate"))


def test_methods_explains_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    out = succeeds("methods", "mine.py:Mine", cwd=tmp_path)
    assert "A method of one's own." in out and "option:  scale = 0.5" in out and "acts at: aggregate" in out


def test_data_lists_what_there_is() -> None:
    out = succeeds("data")
    for name in ("digits", "synthetic", "npz", "folder", "iid", "dirichlet", "pathological", "domain", "from_file"):
        assert any(line.startswith(name) for line in out.splitlines())


def table_of(out: str) -> dict[str, list[str]]:
    """The rows of a printed split by client."""
    rows = [line.split() for line in out.splitlines()]
    return {row[0]: row for row in rows if row and (row[0].isdigit() or row[0] == "all")}


def test_data_shows_the_split_that_a_run_would_use(tmp_path: Path) -> None:
    words = ("partition=dirichlet:0.3", "clients=4", "seed=3")
    out = succeeds("data", "synthetic:samples=400,test=50,classes=5", *words, f"picture={tmp_path / 'split.png'}")
    values: dict[str, Any] = dict(word.split("=", 1) for word in words)
    world = World.create(settings(values | {"data": "synthetic:samples=400,test=50,classes=5"}))
    labels = world.parts["train"].labels.numpy()
    for client, places in enumerate(world.clients):
        counts = np.bincount(labels[places], minlength=5)
        row = table_of(out)[str(client)]
        assert row[1] == str(len(places)) and row[2] == str((counts > 0).sum())
        shown = [0 if cell == "." else int(cell) for cell in row if cell == "." or cell.isdigit()][-5:]
        assert shown == counts.tolist()
    assert table_of(out)["all"][1] == "400"
    with Image.open(tmp_path / "split.png") as picture:
        picture.load()
        assert picture.format == "PNG" and min(picture.size) > 300
        assert len(np.unique(np.asarray(picture.convert("L")))) > 10  # something is drawn


def test_data_shows_domains_and_own_files(tmp_path: Path) -> None:
    out = succeeds("data", "digits-domains", "partition=domain")
    assert "domains" in out and "domain" in out
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "my.npz", images=rng.integers(0, 255, (50, 5, 5, 3), dtype=np.uint8), labels=np.arange(50) % 2)
    out = succeeds("data", "my.npz", "partition=iid", "clients=2", cwd=tmp_path)
    assert "my: 40 train, 10 test; 2 classes; pictures 5x5x3" in out
    assert table_of(out)["0"][1] == table_of(out)["1"][1] == "20"


def test_settings_lists_everything_with_a_meaning() -> None:
    from isofed.config import Settings

    out = succeeds("settings")
    rows = {line.split()[0] for line in out.splitlines() if line.strip() and not line.startswith(" ")}
    assert set(Settings.model_fields) | {"out"} <= rows
    assert all(field.description for field in Settings.model_fields.values())
