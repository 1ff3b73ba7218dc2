"""Everything a person or a machine can get wrong: one sentence, the right exit code, and nothing lost or left lying."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from isofed.files import load_tensors
from tests.cli_tools import SMALL, Done, complaint, config, everything, isofed, metrics, model, plain, result, succeeds

METHODS = '''
from dataclasses import dataclass

from isofed import Method


@dataclass(frozen=True)
class Broken(Method):
    """Some clients' losses become NaN, in some rounds."""

    client: int = 1
    first: int = 2
    everyone: bool = False

    def end(self, visit):
        if (self.everyone or visit.client == self.client) and visit.round >= self.first:
            visit.update = visit.update * float("nan")


@dataclass(frozen=True)
class LossIsNan(Method):
    """The loss of a client with a single sample is NaN."""

    def loss(self, step):
        return step.logits.sum() * float("nan") if int(step.label_counts.sum()) == 1 else None


@dataclass(frozen=True)
class Raises(Method):
    """A mistake in a method, with signs in its message that mean something to a terminal library."""

    def begin(self, visit):
        if visit.client == 0:
            raise ValueError("no [/bold] idea [red]")


@dataclass(frozen=True)
class ServerDiverges(Method):
    """A server step that breaks its own state before it breaks the weights."""

    def server_state(self, run):
        return {"sum": run.zeros()}

    def aggregate(self, round):
        round.server["sum"].add_(1)
        if round.number == 3:
            round.update = round.update * float("inf")


@dataclass(frozen=True)
class ServerRaises(Method):
    def aggregate(self, round):
        raise ZeroDivisionError("nothing to divide by")


@dataclass(frozen=True)
class Refuses(Method):
    def check(self, settings):
        raise ValueError("it wants a larger batch")


@dataclass(frozen=True)
class WithoutDecorator(Method):
    def begin(self, visit):
        pass


class Forgotten(Method):
    strength: float = 1.0


not_a_class = 3
'''


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the commands below name."""
    folder = tmp_path_factory.mktemp("input")
    (folder / "methods.py").write_text(METHODS)
    (folder / "broken.py").write_text("this is no Python\n")
    (folder / "file").write_text("a file\n")
    (folder / "empty").mkdir()
    (folder / "list.yaml").write_text("- fedavg\n")
    (folder / "bad.yaml").write_text("lr: [0.1\n")
    (folder / "unknown.yaml").write_text("learning_rate: 0.1\n")
    (folder / "good.yaml").write_text("lr: 0.2\nmethod: [fedprox: {mu: 0.1}]\nclients: 2\n")
    (folder / "twice.json").write_text("[[0, 1, 2], [2, 3]]")
    (folder / "beyond.json").write_text("[[0, 1, 2], [5000]]")
    (folder / "text.json").write_text("no JSON")

    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (40, 4, 4), dtype=np.uint8)
    np.savez(folder / "good.npz", images=images, labels=np.arange(40) % 4)
    gap = np.arange(40) % 4
    gap[gap == 2] = 3
    np.savez(folder / "gap.npz", images=images, labels=gap)
    missing: dict[str, Any] = {
        "x_train": images[:30],
        "y_train": np.arange(30) % 2,
        "x_test": images[30:],
        "y_test": np.arange(10) % 3,
    }
    np.savez(folder / "gap-in-training.npz", **missing)
    whole = (folder / "good.npz").read_bytes()
    (folder / "truncated.npz").write_bytes(whole[: len(whole) // 2])
    np.savez(folder / "short.npz", images=images, labels=np.arange(39))
    bad = rng.standard_normal((40, 4, 4)).astype(np.float32)
    bad[3, 0, 0] = np.nan
    np.savez(folder / "nan.npz", images=bad, labels=np.arange(40) % 4)

    for label in ("cat", "dog"):
        (folder / "pictures" / label).mkdir(parents=True)
        for n in range(10):
            pixels = rng.integers(0, 255, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / label / f"{n}.png")
    shutil.copytree(folder / "pictures", folder / "one-broken")
    (folder / "one-broken" / "dog" / "3.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")
    return folder


MISTAKES = [
    # settings
    ("lrr=0.1", r"no setting 'lrr'.*did you mean 'lr'"),
    ("learning_rate=0.1", r"no setting 'learning_rate'"),
    ("lr=abc", r"lr=abc.*number"),
    ("lr=0", r"lr=0 .*greater than 0"),
    ("lr=-1", r"lr=-1 .*greater than 0"),
    ("lr=nan", r"lr=nan"),
    ("lr=inf", r"lr=inf"),
    ("weight_decay=inf", r"weight_decay=inf"),
    ("rounds=2.5", r"rounds=2.5.*integer"),
    ("rounds=0", r"rounds=0.*greater than or equal to 1"),
    ("clients=0", r"clients=0"),
    ("clients=-3", r"clients=-3"),
    ("seed=-1", r"seed=-1"),
    ("nesterov=maybe", r"nesterov=maybe.*boolean"),
    ("momentum=1", r"momentum=1.*less than 1"),
    ("participation=0", r"participation=0"),
    ("participation=1.5", r"participation=1.5"),
    ("validation=1", r"validation=1"),
    ("target=0", r"target=0"),
    ("weighting=equal", r"weighting=equal.*'samples' or 'uniform'"),
    ("executor=threads", r"executor=threads.*'serial'"),
    ("executor=slots", r"slots are replicas on a GPU; use device=cuda"),
    ("slots=4", r"slots are replicas on a GPU; use device=cuda"),
    ("precision=fp8", r"precision=fp8"),
    ("device=tpu", r"device=tpu|no device 'tpu'"),
    ("lr_schedule=warmup", r"lr_schedule must be constant, cosine or step"),
    ("lr_schedule=step:every=0,factor=0.1", r"lr_schedule must be"),
    ("augment=flipp", r"no augmentation 'flipp'.*did you mean 'flip'"),
    ("keep=sometimes", r"keep must be none, or every:N"),
    ("keep_clients=every:0", r"keep_clients must be none, last, or every:N"),
    ("diagnose=every:0", r"diagnose must be none, or every:N, not 'every:0'"),
    ("diagnose=last", r"diagnose must be none, or every:N, not 'last'"),
    ("track=wandb", r"track=wandb.*'none' or 'tensorboard'"),
    ("model=cnnn", r"no model 'cnnn'.*did you mean 'cnn'"),
    ("norm=bach", r"'bach'"),
    ("local_epochs=1 local_steps=3", r"local_epochs and local_steps exclude each other"),
    ("nesterov=true momentum=0", r"nesterov=true needs a momentum"),
    ("stop_at_target=true", r"needs a target"),
    ("nonsense", r"'nonsense' is neither a setting"),
    # methods
    ("method=fedprx", r"no method 'fedprx': did you mean 'fedprox'\?"),
    ("method=fedprox:nu=1", r"option of method 'fedprox' called 'nu'"),
    ("method=fedprox:mu=much", r"mu of method 'fedprox' must be a number"),
    ("method=fedprox:1,2", r"one too many"),
    ("method=fedavg:1", r"'fedavg' takes 0 options"),
    ("method=fedavg:mu=1", r"'fedavg' has no options"),
    ("method=fedavgm+fedadam", r"'fedavgm' and 'fedadam' both decide the server step"),
    ("method=fedprox+fedprox", r"'fedprox' appears twice"),
    ("method=central+fedprox", r"cannot be combined"),
    ("method=fedprox+", r"empty part"),
    ("method=", r"empty part|has no name"),
    ("method=missing.py:Mine", r"which does not exist"),
    ("method=methods.py:Nothing", r"'Nothing'"),
    ("method=methods.py:not_a_class", r"is not a method"),
    ("method=methods.py:Forgotten", r"lacks @dataclass"),
    ("method=broken.py:Mine", r"broken\.py could not be run: SyntaxError"),
    ("method=methods.py:Refuses", r"it wants a larger batch"),
    ("method=scaffold persistent_momentum=true", r"persistent_momentum"),
    # data
    ("data=digitz", r"'digitz'.*did you mean 'digits'"),
    ("data=synthetic:samples=ten", r"samples of data set 'synthetic' must be a whole number"),
    ("data=synthetic:sample=10", r"did you mean 'samples'"),
    ("data=synthetic:samples=3", r"at least 10"),
    ("data=./missing.npz", r"no file or folder '.*missing\.npz'"),
    ("data=npz", r"root"),
    ("data=npz root=missing.npz", r"missing\.npz"),
    ("data=folder root=missing", r"missing"),
    ("data=truncated.npz", r"'truncated\.npz' cannot be read"),
    ("data=gap.npz", r"no training sample of class '2'"),
    ("data=gap-in-training.npz", r"no training sample of class '2'"),
    ("data=short.npz", r"one label a picture"),
    ("data=nan.npz", r"NaN"),
    ("data=file", r"file' is a file isofed does not read"),
    ("data=empty", r"no pictures"),
    ("data=one-broken", r"one-broken/dog/3\.png' cannot be read"),
    # splits
    ("partition=dirichlet", r"needs alpha"),
    ("partition=dirichlet:0", r"alpha of split 'dirichlet' must be above zero"),
    ("partition=dirichlet:-0.5", r"alpha of split 'dirichlet' must be above zero"),
    ("partition=dirichlet:a", r"alpha of partition 'dirichlet' must be a number"),
    ("partition=quantity:0", r"alpha of split 'quantity' must be above zero"),
    ("partition=dirichelt:0.1", r"no partition 'dirichelt': did you mean 'dirichlet'"),
    ("partition=domain", r"needs data with domains"),
    ("partition=pathological:99", r"asks for 99 classes"),
    ("partition=pathological:2 clients=3", r"leaves some of the 10 classes to nobody"),
    ("partition=iid clients=201", r"201 clients cannot share 200 samples"),
    ("partition=dirichlet:0.1 clients=1000", r"clients"),
    ("partition=from_file:missing.json", r"no file '.*missing\.json'"),
    ("partition=from_file:text.json", r"cannot be read as JSON"),
    ("partition=from_file:twice.json clients=2", r"sample 2 .* belongs to one client"),
    ("partition=from_file:beyond.json clients=2", r"sample 5000"),
    # files of settings
    ("missing.yaml", r"missing\.yaml cannot be read"),
    ("list.yaml", r"'key: value'"),
    ("bad.yaml", r"not valid YAML"),
    ("unknown.yaml", r"no setting 'learning_rate'"),
    ("empty", r"config\.yaml cannot be read"),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_one_sentence_before_any_work(words: str, expected: str, here: Path, tmp_path: Path) -> None:
    before = everything(here)
    usual = (*SMALL, "executor=serial", "rounds=1", f"out={tmp_path / 'never' / 'made'}")
    defaults = {word.partition("=")[0]: word for word in usual}
    if "local_steps" in words:
        defaults.pop("local_epochs")
    given = [word for key, word in defaults.items() if not any(w.startswith(key + "=") for w in words.split(" "))]
    done = isofed("run", *given, *words.split(" "), cwd=here)
    said = complaint(done, 2)
    assert re.search(expected, said), said
    assert done.out == ""
    assert everything(here) == before and not os.listdir(tmp_path)


COMMANDS = [
    ("compare", r"at least one method"),
    ("compare fedavg fedprx", r"did you mean 'fedprox'"),
    ("compare fedavg fedavg", r"'fedavg' is given twice"),
    ("compare fedprox fedprox:mu=0.01", r"given twice"),
    ("compare fedavg seeds=0", r"seeds must be at least 1"),
    ("compare fedavg seeds=two", r"seeds must be a whole number"),
    ("compare fedavg seeds=,", r"seeds"),
    ("compare fedavg seeds=1,1", r"seed"),
    ("compare fedavg seeds=-1,2", r"seed=-1"),
    ("compare fedavg lr=abc", r"lr=abc"),
    ("compare fedavg lrr=0.1", r"no setting 'lrr'"),
    ("compare fedavg data=digitz", r"'digitz'"),
    ("compare fedavg partition=dirichlet:0", r"above zero"),
    ("compare fedavg unknown.yaml", r"no setting 'learning_rate'"),
    ("compare fedavg out=file/below", r"file/below"),
    ("compare fedavg out=file", r"file"),
    ("tune", r"tune takes one method"),
    ("tune fedavg fedprox lr=0.1,0.2", r"tune takes one method"),
    ("tune fedavg", r"nothing to tune"),
    ("tune fedavg lr=0.1", r"nothing to tune"),
    ("tune fedprox fedprox.mu=", r"fedprox\.mu|nothing to tune"),
    ("tune fedavg lr=,", r"lr|nothing to tune"),
    ("tune fedavg lr=0.1,abc", r"lr=abc"),
    ("tune fedavg lrr=0.1,0.2", r"no setting 'lrr'"),
    ("tune fedprox fedprox.nu=1,2", r"called 'nu'"),
    ("tune fedprox fedavgm.momentum=0.1,0.2", r"'fedavgm'"),
    ("tune fedavg lr=0.1,0.2 validation=0", r"needs a validation part"),
    ("tune fedavg lr=0.1,0.2 missing.yml", r"missing\.yml"),
    ("tune fedavg lr=0.1,0.2 seeds=0", r"seeds must be at least 1"),
    ("methods scafold", r"did you mean 'scaffold'"),
    ("data digitz", r"'digitz'"),
    ("data good.npz clients=1000", r"1000 clients|clients"),
    ("data good.npz partition=iid clients=2 picture=split.txt", r"\.png, \.svg or \.pdf"),
    ("data good.npz partition=iid clients=2 picture=missing/split.png", r"no folder 'missing'"),
    ("data good.npz one-broken partition=iid", r"one-broken|one data set"),
    ("run out=file/below", r"cannot make the run folder file/below"),
    ("run out=file", r"cannot make the run folder file"),
    ("run out=/proc/nowhere/run", r"cannot make the run folder"),
    ("run --resume empty", r"not a run folder"),
]


@pytest.mark.parametrize(("words", "expected"), COMMANDS, ids=[words for words, _ in COMMANDS])
def test_every_command_refuses_in_one_sentence(words: str, expected: str, here: Path, tmp_path: Path) -> None:
    before = everything(here)
    name, *rest = words.split(" ")
    settings = [*SMALL, "executor=serial", "rounds=1"] if name in ("run", "compare", "tune") else []
    if name in ("compare", "tune") and not any(w.startswith("out=") for w in rest):
        settings.append(f"out={tmp_path / 'never' / 'made'}")
    if "--resume" in rest:
        settings = []
    given = [w for w in settings if not any(r.startswith(w.partition("=")[0] + "=") for r in rest)]
    said = complaint(isofed(name, *given, *rest, cwd=here), 2)
    assert re.search(expected, said), said
    assert everything(here) == before and not os.listdir(tmp_path)


def test_debug_shows_where_it_happened(here: Path) -> None:
    for words, name in (("lr=abc", "UserError"), ("data=truncated.npz", "UserError"), ("lr=1e30", "RunError")):
        out = f"out={here / f'debug-{words}'}"
        code, _, err = isofed("run", *SMALL, "rounds=1", "--debug", words, out, cwd=here)
        assert code in (1, 2)
        assert err.startswith("Traceback") and f"isofed.errors.{name}: " in err
    shutil.rmtree(here / "debug-lr=1e30")


def test_a_real_process_says_the_same(here: Path) -> None:
    assert "did you mean 'fedprox'?" in complaint(plain("run", "method=fedprx", cwd=here), 2)
    code, _, err = plain("run", "method=fedprx", "--debug", cwd=here)
    assert code != 0 and err.startswith("Traceback") and "did you mean 'fedprox'?" in err
    assert not (here / "runs").exists()


def test_an_unknown_option_or_command_is_refused(here: Path) -> None:
    for words in (["run", "--fast"], ["rum"], ["settings", "lr"]):
        code, out, err = isofed(*words, cwd=here)
        assert code == 2 and out == "" and "Traceback" not in err
        assert words[-1] in err


def test_a_good_file_of_settings_is_read_and_words_win(here: Path, tmp_path: Path) -> None:
    succeeds("run", *SMALL[:3], here / "good.yaml", "rounds=1", "lr=0.3", f"out={tmp_path / 'run'}")
    assert config(tmp_path / "run")["lr"] == 0.3
    assert config(tmp_path / "run")["clients"] == 2
    assert config(tmp_path / "run")["method"] == [{"fedprox": {"mu": 0.1}}]


# --- things that go on


def test_an_empty_client_is_recorded_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "split.json").write_text(json.dumps([list(range(100)), [], list(range(100, 200))]))
    words = (*SMALL[:2], f"partition=from_file:{tmp_path / 'split.json'}", "local_epochs=1", "rounds=30")
    out = succeeds("run", *words, f"out={tmp_path / 'run'}")
    for line in metrics(tmp_path / "run"):
        assert line["events"] == [{"client": 1, "event": "has no data"}]
        assert line["clients"] == 2 and line["samples"] == 200
    assert "client 1 has no data" in out
    assert len(out.splitlines()) <= 20, "the same event every round must not fill the screen"
    assert result(tmp_path / "run")["events"] == 30


def test_a_client_whose_loss_becomes_nan_is_left_out_and_recorded(here: Path, tmp_path: Path) -> None:
    words = (*SMALL, "rounds=4", "method=methods.py:Broken", "keep_clients=every:1")
    out = succeeds("run", *words, f"out={tmp_path / 'run'}", cwd=here)
    lines = metrics(tmp_path / "run")
    assert [len(line["events"]) for line in lines] == [0, 1, 1, 1]
    assert [line["clients"] for line in lines] == [2, 1, 1, 1]
    assert lines[1]["events"][0]["client"] == 1 and "NaN" in lines[1]["events"][0]["event"]
    assert "round 2" in out and "client 1" in out and "3 events" in out
    # With one client left, its model is the next global one.
    left, _ = load_tensors(tmp_path / "run" / "kept" / "round-000004-client-000000.safetensors")
    final, _ = load_tensors(tmp_path / "run" / "model.safetensors")
    for name, value in final.items():
        assert (value - left[name]).abs().max() < 1e-6


@pytest.mark.parametrize("executor", ["serial", "workers"])
def test_a_mistake_in_a_method_costs_its_client_and_is_told(executor: str, here: Path, tmp_path: Path) -> None:
    words = (*SMALL, "rounds=2", "method=methods.py:Raises", f"executor={executor}", "workers=1")
    out = succeeds("run", *words, f"out={tmp_path / 'run'}", cwd=here)
    event = metrics(tmp_path / "run")[0]["events"][0]
    assert event == {"client": 0, "event": "failed with ValueError: no [/bold] idea [red]"}
    assert "client 0 failed with ValueError: no [/bold] idea [red]" in out


def test_a_loss_that_is_nan_is_noticed(here: Path, tmp_path: Path) -> None:
    split = [list(range(200))[::2], [199]]
    (tmp_path / "split.json").write_text(json.dumps(split))
    words = (*SMALL[:2], "local_epochs=1", "rounds=2", "method=methods.py:LossIsNan")
    succeeds("run", *words, f"partition=from_file:{tmp_path / 'split.json'}", f"out={tmp_path / 'run'}", cwd=here)
    assert [e["client"] for line in metrics(tmp_path / "run") for e in line["events"]] == [1, 1]


# --- things that fail


def test_when_everything_becomes_nan_the_last_good_state_is_kept(here: Path, tmp_path: Path) -> None:
    words = (*SMALL, "rounds=5", "method=methods.py:Broken:first=3,everyone=true")
    done = isofed("run", *words, f"out={tmp_path / 'run'}", cwd=here)
    said = complaint(done, 1)
    assert "round 3" in said and "NaN" in said and str(tmp_path / "run") in said
    assert [line["round"] for line in metrics(tmp_path / "run")] == [1, 2]
    tensors, _ = load_tensors(tmp_path / "run" / "checkpoints" / "round-000002.safetensors")
    assert all(bool(t.isfinite().all()) for t in tensors.values())
    assert not (tmp_path / "run" / "result.json").exists()
    assert complaint(isofed("run", "--resume", tmp_path / "run", cwd=here), 1) == said  # it stays so


def test_a_learning_rate_out_of_all_proportion(tmp_path: Path) -> None:
    said = complaint(isofed("run", *SMALL, "rounds=5", "lr=1e30", f"out={tmp_path / 'run'}"), 1)
    assert "round 1 has no client left" in said and "NaN" in said
    assert "is kept in" not in said, "nothing was finished, so nothing is kept"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_server_step_that_diverges_does_not_spoil_what_is_kept(here: Path, tmp_path: Path) -> None:
    words = (*SMALL, "method=methods.py:ServerDiverges")
    said = complaint(isofed("run", *words, "rounds=5", f"out={tmp_path / 'run'}", cwd=here), 1)
    assert "round 3" in said and "NaN" in said
    kept, _ = load_tensors(tmp_path / "run" / "checkpoints" / "round-000002.safetensors")
    assert (kept["server/sum"] == 2).all()
    assert all(bool(t.isfinite().all()) for t in kept.values())


def test_a_mistake_in_a_server_step_is_one_sentence_too(here: Path, tmp_path: Path) -> None:
    words = (*SMALL, "rounds=2", "method=methods.py:ServerRaises", f"out={tmp_path / 'run'}")
    code, _, err = isofed("run", *words, cwd=here)
    assert code == 1 and len(err.splitlines()) == 1 and "Traceback" not in err
    assert "ZeroDivisionError" in err and "nothing to divide by" in err
    code, _, err = isofed("run", "--resume", tmp_path / "run", "--debug", cwd=here)
    assert code == 1 and "Traceback" in err and "in aggregate" in err


# --- full and read-only disks

TINY = (
    "data=synthetic:samples=40,test=20,classes=2,size=2",
    "model=mlp",
    "partition=iid",
    "clients=2",
    "local_epochs=1",
    "rounds=150",
    "executor=serial",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("tiny") / "run"
    succeeds("run", *TINY, f"out={run}")
    return run


def sound(run: Path, whole: Path) -> None:
    """What a failed run has written must be whole."""
    rounds = [line["round"] for line in metrics(run)]
    assert rounds == list(range(1, len(rounds) + 1)) and len(rounds) < 150
    for path in (run / "checkpoints").glob("*.safetensors"):
        load_tensors(path)
    assert not [p for p in run.rglob("*") if p.name.endswith(".tmp")]
    succeeds("run", "--resume", run)
    assert model(run) == model(whole)
    assert [line["round"] for line in metrics(run)] == list(range(1, 151))


@pytest.mark.parametrize(("limit", "what"), [(1000, "round-000001"), (18_700, "round-0"), (20_000, "metrics.jsonl")])
def test_a_limit_on_files_fails_in_one_sentence_and_loses_nothing(
    limit: int, what: str, tiny: Path, tmp_path: Path
) -> None:
    """A model takes 18,720 bytes and the metrics in the end more: each limit hits another file first."""
    done = isofed("run", *TINY, f"out={tmp_path / 'run'}", limit=limit)
    said = complaint(done, 1)
    assert "cannot write" in said and what in said
    sound(tmp_path / "run", tiny)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 100 kB, where this process may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(disk)]
    try:
        mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("this process may not mount a file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_fails_in_one_sentence_and_loses_nothing(small_disk: Path, tiny: Path) -> None:
    run = small_disk / "run"
    said = complaint(isofed("run", *TINY, f"out={run}"), 1)
    assert "disk or the quota is full" in said
    assert len(metrics(run)) > 10
    subprocess.run(["mount", "-o", "remount,size=10m", str(small_disk)], check=True)
    sound(run, tiny)


def test_a_full_disk_when_a_comparison_is_written(small_disk: Path) -> None:
    words = ("compare", "fedavg", "fedprox", *TINY, "rounds=2", f"out={small_disk / 'runs'}")
    (small_disk / "filler").write_bytes(b"0" * 60_000)
    said = complaint(isofed(*words), 1)
    assert "full" in said
    (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=10m", str(small_disk)], check=True)
    assert "fedprox" in succeeds(*words)


def test_a_read_only_folder_is_refused(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=10m", str(small_disk)], check=True)
    succeeds("run", *TINY, "rounds=2", f"out={small_disk / 'run'}")
    (small_disk / "run" / "result.json").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    before = everything(small_disk)
    for words in (
        ("run", *TINY, f"out={small_disk / 'new'}"),
        ("run", "--resume", str(small_disk / "run")),
        ("compare", "fedavg", *TINY, f"out={small_disk / 'new'}"),
    ):
        said = complaint(isofed(*words), 2)
        assert "cannot" in said and str(small_disk) in said
    picture = f"picture={small_disk / 'split.png'}"
    assert "split.png" in complaint(isofed("data", "digits", "clients=2", "partition=iid", picture), 2)
    assert everything(small_disk) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not apply to root")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    done: Done = isofed("run", *TINY, f"out={tmp_path / 'closed' / 'run'}")
    assert "cannot make the run folder" in complaint(done, 2)
