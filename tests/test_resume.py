"""A run that is taken up: it ends as if it had never stopped, or says why it must not go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import isofed
from isofed.data import load
from isofed.diagnose import Diagnosis, Options, diagnosed
from isofed.engine.workers import Pool
from isofed.errors import RunError, UserError
from isofed.federation import Federation
from isofed.files import load_tensors
from isofed.progress import Watcher
from tests.data.test_mnist import written as mnist
from tests.engine.own_methods import HERE
from tests.engine.plain import distance, small
from tests.run_tools import Stop, content


def test_a_run_whose_checkpoints_are_gone_says_that_it_begins_again(tmp_path: Path) -> None:
    small(out=tmp_path / "run", rounds=3).fit()
    for file in (tmp_path / "run" / "checkpoints").iterdir():
        file.unlink()
    again = Federation.resume(tmp_path / "run", rounds=4)
    result = again.fit()
    assert again.notes == ["the checkpoints of the 3 rounds that are recorded are gone: it begins again"]
    assert [line["round"] for line in result.history] == [1, 2, 3, 4]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "method",
    ["fedavg", "fedavgm", "fedadam:bias_correction=true", "scaffold", "scaffold:option=1", "feddyn", "fedbn+fednova"],
)
def test_a_run_that_is_taken_up_ends_as_if_it_had_never_stopped(method: str, inside: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "method": method, "model": "cnn", "rounds": 4, "participation": 0.75, "momentum": 0.9, "augment": "flip",
        "lr_schedule": "cosine",
    }  # fmt: skip
    whole = small(**settings)
    wanted = whole.fit()
    run = small(**settings, out=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run.fit(Stop(2, inside))
    again = Federation.resume(tmp_path / "run")
    result = again.fit()
    assert content(again) == content(whole)
    assert distance(result.weights, wanted.weights) == 0
    assert [line["round"] for line in result.history] == [1, 2, 3, 4]
    timed = ("seconds", "evaluate_seconds")
    for found, line in zip(result.history, wanted.history, strict=True):
        assert {k: v for k, v in found.items() if k not in timed} == {k: v for k, v in line.items() if k not in timed}


@pytest.mark.parametrize("method", ["scaffold", "feddyn", "fedadam:bias_correction=true"])
def test_rounds_after_the_last_checkpoint_are_repeated(method: str, tmp_path: Path) -> None:
    # Killed without a word: the newest state is some rounds old, while records of later rounds are there already.
    settings: dict[str, Any] = {"method": method, "rounds": 5, "participation": 0.5}
    whole = small(**settings)
    wanted = whole.fit()
    run = small(**settings, out=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        run.fit(Stop(1))
    folder = tmp_path / "run"
    older = {p: p.read_bytes() for p in (folder / "checkpoints").iterdir()}
    Federation.resume(folder).fit()
    for path in [*(folder / "checkpoints").iterdir(), folder / "result.json", folder / "model.safetensors"]:
        path.unlink()
    for path, data in older.items():
        path.write_bytes(data)
    again = Federation.resume(tmp_path / "run")
    result = again.fit()
    assert content(again) == content(whole)
    assert [line["round"] for line in result.history] == [1, 2, 3, 4, 5]
    assert result.accuracy == wanted.accuracy


def test_a_run_may_change_executor_when_it_is_taken_up(tmp_path: Path, two_workers: Pool) -> None:
    settings: dict[str, Any] = {"method": "scaffold", "rounds": 3, "momentum": 0.9}
    whole = small(**settings)
    whole.fit()
    with pytest.raises(KeyboardInterrupt):
        small(**settings, out=tmp_path / "run").fit(Stop(1))
    again = Federation.resume(tmp_path / "run", executor="workers", pool=two_workers)
    again.fit()
    assert content(again) == content(whole)
    with pytest.raises(UserError, match="'lr' cannot change when a run is resumed"):
        Federation.resume(tmp_path / "run", lr=0.5)


def test_kept_momentum_survives_a_stop(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 3, "momentum": 0.9, "persistent_momentum": True}
    whole = small(**settings)
    whole.fit()
    with pytest.raises(KeyboardInterrupt):
        small(**settings, out=tmp_path / "run").fit(Stop(1))
    again = Federation.resume(tmp_path / "run")
    again.fit()
    assert content(again) == content(whole)


def test_a_finished_run_is_read_back(tmp_path: Path) -> None:
    run = small(out=tmp_path / "run", method=f"{HERE}:Count+fedbn", model="cnn")
    result = run.fit()
    again = Federation.resume(tmp_path / "run").fit()
    assert (again.accuracy, again.rounds, again.method) == (result.accuracy, result.rounds, result.method)
    assert again.folder == result.folder == tmp_path / "run"
    model, info = load_tensors(tmp_path / "run" / "model.safetensors")
    assert info["round"] == 2
    for name, value in result.weights.items():
        assert torch.equal(model[name], value)
    # What stayed with the clients is stored under their names.
    home = [n for n in model if n.startswith("client/2/")]
    assert sorted(n.removeprefix("client/2/") for n in home) == sorted(
        f"stages.stage{i}.1.{n}" for i in (1, 2, 3) for n in ("weight", "bias", "running_mean", "running_var")
    )


def test_other_data_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        small(out=tmp_path / "run").fit(Stop(1))
    other = load("synthetic:samples=100,test=20,classes=4,seed=1")
    with pytest.raises(UserError, match="the data of the run .* have changed"):
        Federation.resume(tmp_path / "run", dataset=other)


def test_a_run_goes_on_and_is_diagnosed_where_the_same_data_lie_elsewhere(tmp_path: Path) -> None:
    here, there, other = (mnist(tmp_path / name) for name in ("here", "there", "other"))
    where = {"data": "mnist", "root": str(here), "partition": "iid", "clients": 2, "batch_size": 4}
    whole = small(**where).fit()
    with pytest.raises(KeyboardInterrupt):
        small(**where, out=tmp_path / "run").fit(Stop(1))
    here.rename(tmp_path / "gone")
    with pytest.raises(UserError, match="'.*here' does not exist: root must be the folder"):
        Federation.resume(tmp_path / "run")
    again = Federation.resume(tmp_path / "run", root=str(there)).fit()
    assert distance(again.weights, whole.weights) == 0
    options = Options.of({"only": "calibration", "root": str(there)})
    assert diagnosed(Diagnosis(tmp_path / "run", options))["calibration"]["samples"] == 4
    file = other / "t10k-labels-idx1-ubyte"
    file.write_bytes(file.read_bytes()[:-1] + b"\x05")
    for refused in (
        lambda: Federation.resume(tmp_path / "run", root=str(other)),
        lambda: Diagnosis(tmp_path / "run", Options.of({"root": str(other)})),
    ):
        with pytest.raises(UserError, match="the data of the run .* have changed"):
            refused()


@pytest.mark.parametrize("options", ["", ":size=8"])
def test_a_run_goes_on_where_its_own_folder_was_moved_to(options: str, tmp_path: Path) -> None:
    for label, name in ((0, "a"), (1, "b")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for n in range(12):
            made = np.full((8, 8, 3), 20 * n + label, np.uint8)
            Image.fromarray(made).save(tmp_path / "pictures" / name / f"{n}.png")
    words = {"data": f"{tmp_path / 'pictures'}{options}", "partition": "iid", "clients": 2, "batch_size": 4}
    with pytest.raises(KeyboardInterrupt):
        small(**words, out=tmp_path / "run").fit(Stop(1))
    (tmp_path / "pictures").rename(tmp_path / "moved")
    assert Federation.resume(tmp_path / "run", root=str(tmp_path / "moved")).fit().rounds == 2
    options_ = Options.of({"only": "calibration", "root": str(tmp_path / "moved")})
    assert "calibration" in diagnosed(Diagnosis(tmp_path / "run", options_))


def test_a_run_at_sites_is_not_taken_up_or_measured_here(tmp_path: Path) -> None:
    small(out=tmp_path / "run").fit()
    config = tmp_path / "run" / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"data": "sites"}))
    (tmp_path / "run" / "sites.json").write_text("{}")
    for refused in (lambda: Federation.resume(tmp_path / "run"), lambda: Diagnosis(tmp_path / "run", Options())):
        with pytest.raises(UserError, match="is a run at real sites, whose data are not here; `isofed flower start`"):
            refused()
    with pytest.raises(UserError, match="data=sites are those of real sites, which are not here"):
        Federation(**yaml.safe_load(config.read_text()))


# What a record must not let happen


def test_a_run_of_a_changed_method_file_does_not_go_on(tmp_path: Path) -> None:
    text = (
        "from dataclasses import dataclass\nfrom isofed import Method\n\n\n@dataclass(frozen=True)\n"
        "class Mine(Method):\n    def gradient(self, step):\n        step.grad.mul_(1.0)\n"
    )
    (tmp_path / "mine.py").write_text(text)
    settings: dict[str, Any] = {
        "data": "synthetic:samples=60,test=20,classes=3",
        "model": "mlp",
        "clients": 2,
        "partition": "iid",
    }
    method = f"{tmp_path / 'mine.py'}:Mine"
    isofed.Federation(**settings, method=method, rounds=1, out=tmp_path / "run")
    (tmp_path / "mine.py").write_text(text.replace("1.0", "2.0"))
    with pytest.raises(isofed.UserError, match=r"mine\.py has changed since the run"):
        isofed.Federation.resume(tmp_path / "run")


def test_a_run_of_a_changed_split_does_not_go_on(tmp_path: Path) -> None:
    split = tmp_path / "split.json"
    split.write_text("[[0, 1, 2, 3], [4, 5, 6, 7]]")
    data, out = "synthetic:samples=60,test=20,classes=3", tmp_path / "run"
    isofed.Federation(data=data, partition=f"from_file:{split}", model="mlp", batch_size=4, rounds=1, out=out)
    split.write_text("[[0, 1, 2, 4], [3, 5, 6, 7]]")
    with pytest.raises(isofed.UserError, match=r"split\.json has changed since the run"):
        isofed.Federation.resume(out)
    split.unlink()
    with pytest.raises(isofed.UserError, match=r"there is no file '.*split\.json'"):
        isofed.Federation.resume(out)
    split.write_text("[[0, 1, 2, 3], [4, 5, 6, 7]]")
    assert isofed.Federation.resume(out).fit().rounds == 1


def test_a_data_set_given_in_python_is_recorded_as_such(tmp_path: Path) -> None:
    mine = load("synthetic:samples=60,test=20,classes=3")
    usual: dict[str, Any] = {"model": "mlp", "clients": 2, "partition": "iid", "rounds": 1}
    first = isofed.Federation(**usual, dataset=mine, out=tmp_path / "run").fit()
    with pytest.raises(isofed.UserError, match="given in Python"):
        isofed.Federation.resume(tmp_path / "run")
    again = isofed.Federation.resume(tmp_path / "run", dataset=mine).fit()
    assert again.accuracy == first.accuracy
    assert {k: v.tolist() for k, v in again.weights.items()} == {k: v.tolist() for k, v in first.weights.items()}


def test_a_class_called_like_a_built_in_method_is_not_taken_for_it(tmp_path: Path) -> None:
    from isofed.methods import Method
    from isofed.methods import parse as parse_method

    fake = type("FedProx", (Method,), {"uniform": True})()
    assert str(parse_method(fake)) != "fedprox"
    usual: dict[str, Any] = {
        "data": "synthetic:samples=60,test=20,classes=3",
        "model": "mlp",
        "clients": 2,
        "partition": "iid",
    }
    isofed.Federation(**usual, rounds=1, method=fake, out=tmp_path / "run")
    with pytest.raises(isofed.UserError, match="there is no method"):
        isofed.Federation.resume(tmp_path / "run")


def test_the_model_of_a_run_loads_in_one_line(tmp_path: Path) -> None:
    from isofed.models import load

    settings: dict[str, Any] = {
        "data": "synthetic:samples=60,test=20,classes=3",
        "clients": 2,
        "partition": "iid",
        "norm": "group:2",
    }
    made = isofed.Federation(**settings, rounds=1, out=tmp_path / "run").fit()
    network = load(tmp_path / "run")
    data = isofed.data.load(settings["data"])
    assert (network.data_mean, network.data_std) == (data.mean, data.std)
    loaded = network.state_dict()
    assert loaded.keys() == made.weights.keys()
    assert all(torch.equal(loaded[k], v) for k, v in made.weights.items())


@pytest.mark.parametrize("schedule", ["constant", "step:every=2,factor=0.5"])
@pytest.mark.parametrize("method", ["scaffold", "fedadam:bias_correction=true", "fedbn+fednova", "fedavg+ffc"])
def test_a_finished_run_goes_on_with_more_rounds(method: str, schedule: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"method": method, "model": "cnn", "participation": 0.75, "lr_schedule": schedule}
    whole = small(**settings, rounds=5)
    wanted = whole.fit()
    small(**settings, rounds=2, out=tmp_path / "run").fit()
    again = Federation.resume(tmp_path / "run", rounds=5)
    result = again.fit()
    assert content(again) == content(whole)
    assert result.rounds == 5 and distance(result.weights, wanted.weights) == 0
    read = Federation.resume(tmp_path / "run")  # as a run of five rounds
    assert read.settings.rounds == 5 and read.fit().accuracy == wanted.accuracy


def test_more_rounds_that_are_stopped_go_on_like_any(tmp_path: Path) -> None:
    whole = small(rounds=5)
    whole.fit()
    small(rounds=2, out=tmp_path / "run").fit()
    (tmp_path / "run" / "diagnosis.json").write_text("{}")  # of the model of round 2
    with pytest.raises(KeyboardInterrupt):
        Federation.resume(tmp_path / "run", rounds=5).fit(Stop(3))
    assert not (tmp_path / "run" / "result.json").exists() and not (tmp_path / "run" / "diagnosis.json").exists()
    again = Federation.resume(tmp_path / "run")
    again.fit()
    assert again.round == 5 and content(again) == content(whole)


def test_another_number_of_rounds_is_refused_where_it_would_change_those_that_are_done(tmp_path: Path) -> None:
    small(rounds=3, out=tmp_path / "run").fit()
    with pytest.raises(UserError, match="has 3 rounds already, so rounds=2 is too few"):
        Federation.resume(tmp_path / "run", rounds=2)
    small(rounds=3, lr_schedule="cosine", out=tmp_path / "cosine").fit()
    with pytest.raises(UserError, match="'rounds' cannot change with lr_schedule=cosine"):
        Federation.resume(tmp_path / "cosine", rounds=4)
    small(rounds=2, lr_schedule="step:at=0.5,factor=0.1", out=tmp_path / "share").fit()
    with pytest.raises(UserError, match="'rounds' cannot change with lr_schedule=step:at=0.5,factor=0.1, where"):
        Federation.resume(tmp_path / "share", rounds=4)
    small(rounds=2, lr_schedule="step:at=1/3,factor=0.1", out=tmp_path / "rounds").fit()
    assert Federation.resume(tmp_path / "rounds", rounds=4).fit().rounds == 4
    for folder in ("run", "cosine"):
        assert Federation.resume(tmp_path / folder, rounds=3).fit().rounds == 3  # which is nothing new


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_first_round_that_could_not_be_written_is_not_lost_nor_recorded_twice(
    method: str, name: str, tmp_path: Path
) -> None:
    class InTheWay(Watcher):
        """Puts something where the first round is to be written: a disk that is full, and has room again later."""

        def client(self, done: int, of: int) -> None:
            place.mkdir(exist_ok=True) if name == "metrics.jsonl" else place.touch()

    place = tmp_path / "run" / name
    settings: dict[str, Any] = {"method": method, "rounds": 3, "diagnose": "every:1"}
    run, calm = small(**settings, out=tmp_path / "run"), small(**settings)
    with pytest.raises(RunError, match=f"cannot (read|write) .*{name}"):
        run.fit(InTheWay())
    place.rmdir() if place.is_dir() else place.unlink()
    result = run.fit()
    calm.fit()
    assert content(run) == content(calm)
    assert run.folder is not None
    for lines in (result.history, run.folder.metrics(), run.diagnostics, run.folder.diagnostics()):
        assert [line["round"] for line in lines] == [1, 2, 3]


def test_what_was_found_out_about_an_earlier_model_goes_when_rounds_follow_it(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        small(rounds=3, out=tmp_path / "run").fit(Stop(1))
    diagnosis = tmp_path / "run" / "diagnosis.json"
    diagnosis.write_text("{}")  # of the model of round 1
    Federation.resume(tmp_path / "run").fit()
    assert not diagnosis.exists()
    diagnosis.write_text("{}")  # of the final model, which no round follows
    Federation.resume(tmp_path / "run").fit()
    assert diagnosis.exists()


def test_rounds_without_a_record_are_told_of(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        small(rounds=4, out=tmp_path / "run").fit(Stop(3))
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[2] + "\n")  # rounds 1 and 2 are gone
    result = Federation.resume(tmp_path / "run").fit()
    (note,) = result.notes
    assert note.startswith("metrics.jsonl has lost 2 of the rounds 1 to 2")
    assert [line["round"] for line in result.history] == [3, 4]


def test_a_held_out_part_does_not_make_other_data_of_the_same(tmp_path: Path) -> None:
    runs = [small(out=tmp_path / str(share), validation=share) for share in (0.0, 0.25)]
    assert len({run.folder.environment["data"] for run in runs if run.folder}) == 1
    with pytest.raises(KeyboardInterrupt):
        runs[1].fit(Stop(1))
    # Runs of older versions noted what was left to train on.
    environment = tmp_path / "0.25" / "environment.json"
    recorded = json.loads(environment.read_text())
    left = runs[1].world.dataset.fingerprint
    assert left != recorded["data"]
    environment.write_text(json.dumps(recorded | {"data": left}))
    assert Federation.resume(tmp_path / "0.25").fit().rounds == 2
    environment.write_text(json.dumps(recorded | {"data": "0" * 32}))
    with pytest.raises(UserError, match="have changed"):
        Federation.resume(tmp_path / "0.25")


def test_the_model_of_a_client_loads_where_each_has_its_own(tmp_path: Path) -> None:
    from isofed.models import load

    run = small(method="fedbn", model="cnn", out=tmp_path / "run")
    result = run.fit()
    tensors, _ = load_tensors(tmp_path / "run" / "model.safetensors")
    loaded = load(tmp_path / "run", client=2).state_dict()
    for name, value in loaded.items():
        own = tensors.get(f"client/2/{name}")
        assert torch.equal(value, result.weights[name] if own is None else own)
    assert any(not torch.equal(load(tmp_path / "run", client=1).state_dict()[k], v) for k, v in loaded.items())
    with pytest.raises(UserError, match=r"one for each of them: load\(..., client=0\) gives that of client 0"):
        load(tmp_path / "run")
    with pytest.raises(UserError, match="client 99 has no part of its own .*; clients 0 to "):
        load(tmp_path / "run", client=99)
    small(out=tmp_path / "plain").fit()
    with pytest.raises(UserError, match="client 0 has no part of its own .*; none has: leave client out"):
        load(tmp_path / "plain", client=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 5}, "says seed=5, and the rounds that are done were made with 0"),
        ({"partition": "iid"}, "says partition=iid"),
        ({"lr": 0.01}, "says lr=0.01"),
        ({"lr_schedule": "cosine", "rounds": 8}, "says lr_schedule=cosine"),
        ({"method": "fedprox"}, "says method=fedprox:mu=0.01, and .* with scaffold:"),
    ],
)
def test_settings_that_were_changed_by_hand_make_another_run(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        small(method="scaffold", rounds=4, out=tmp_path / "run").fit(Stop(2))
    config = tmp_path / "run" / "config.yaml"
    before = config.read_text()
    config.write_text(yaml.safe_dump(yaml.safe_load(before) | change))
    with pytest.raises(UserError, match=said):
        Federation.resume(tmp_path / "run").fit()
    config.write_text(yaml.safe_dump(yaml.safe_load(before) | {"rounds": 3, "executor": "auto"}))
    assert Federation.resume(tmp_path / "run").fit().rounds == 3


def test_a_refused_change_leaves_a_finished_run_as_it_was(tmp_path: Path) -> None:
    small(rounds=2, out=tmp_path / "run").fit()
    (tmp_path / "run" / "diagnosis.json").write_text("{}")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"lr": 0.5}))
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    with pytest.raises(UserError, match=r"says lr=0.5, and the rounds that are done"):
        Federation.resume(tmp_path / "run", rounds=5).fit()
    after = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    assert after == before and {"result.json", "diagnosis.json"} <= after.keys()


def test_more_rounds_written_by_hand_are_refused_where_they_change_those_that_are_done(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        small(rounds=4, lr_schedule="cosine", out=tmp_path / "run").fit(Stop(2))
    config = tmp_path / "run" / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"rounds": 9}))
    with pytest.raises(UserError, match="says rounds=9, and the rounds that are done were made with 4"):
        Federation.resume(tmp_path / "run").fit()


def test_a_root_that_is_no_path_is_refused(tmp_path: Path) -> None:
    small(out=tmp_path / "run").fit()
    with pytest.raises(UserError, match="root=5 is not possible: it must be the path of a folder"):
        Federation.resume(tmp_path / "run", root=5)
