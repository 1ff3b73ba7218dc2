"""Runs that are killed, interrupted or damaged, and go on to the same bytes as a run that nothing happened to."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isofed.stopping import terminated
from tests.cli_tools import (
    Command,
    Done,
    all_gone,
    complaint,
    config,
    environment,
    everything,
    isofed,
    metrics,
    model,
    result,
    same_record,
    start,
    succeeds,
    workers_of,
)

ROUNDS = 200
# Rounds of milliseconds, with clients that sit out and so remember older rounds.
QUICK = (
    "data=synthetic:samples=60,test=20,classes=3,size=3",
    "model=mlp",
    "partition=iid",
    "clients=4",
    "participation=0.75",
    "local_epochs=1",
    f"rounds={ROUNDS}",
)
KINDS = {
    "stateless": ("method=fedavg", "executor=serial"),
    "client state": ("method=scaffold", "executor=serial"),
    "client state on file": ("method=scaffold", "executor=serial", "clients=20", "participation=0.1"),
    "persistent momentum": ("method=fedavgm", "persistent_momentum=true", "lr=0.002", "executor=serial"),
    "workers": ("method=scaffold", "executor=workers", "workers=1"),
}

METHODS = '''
import os, signal, time
from dataclasses import dataclass
from pathlib import Path

import torch

from isofed import Method


@dataclass(frozen=True)
class StoppedWhileAggregating(Method):
    """Ctrl-C in the middle of a server step that changes its state in place, once."""

    flag: str = ""

    def server_state(self, run):
        return {"steps": torch.zeros(1)}

    def aggregate(self, round):
        round.server["steps"].add_(1)
        round.update = round.update * (1 + round.server["steps"].double() / 10)
        if round.number == 3 and not Path(self.flag).exists():
            Path(self.flag).touch()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)


@dataclass(frozen=True)
class Slow(Method):
    """Visits that take their time."""

    flag: str = ""

    def begin(self, visit):
        Path(self.flag).touch()
        time.sleep(30)
'''


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One uninterrupted run of each kind; the executor makes no difference to the bytes."""
    folder = tmp_path_factory.mktemp("whole")
    for name, words in KINDS.items():
        if name == "workers":
            continue
        succeeds("run", *QUICK, *words, f"out={folder / name}")
        assert [line["round"] for line in metrics(folder / name)] == list(range(1, ROUNDS + 1))
    return {name: folder / name for name in KINDS} | {"workers": folder / "client state"}


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def begin(run: Path, words: tuple[str, ...]) -> Command:
    """Start the run, or go on with it once it is one."""
    if (run / "config.yaml").exists():
        return start("run", "--resume", run)
    return start("run", *QUICK, *words, f"out={run}")


# --- killed


def a_moment(number: int, rng: random.Random, run: Path, command: Command) -> None:
    """Wait for the moment to kill: three while starting up, five in rounds, then in a checkpoint and at the end."""
    if number < 3:
        time.sleep(rng.uniform(0, 0.08))
    elif number < 8:
        before = size(run / "metrics.jsonl")
        command.when(lambda: size(run / "metrics.jsonl") != before)
        time.sleep(rng.uniform(0, 0.05))
    elif number == 8:
        command.when(lambda: any((run / "checkpoints").glob(".isofed-*.tmp")))
    else:
        command.when(lambda: (run / "model.safetensors").exists())


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_ten_moments_a_run_ends_with_the_same_bytes(
    kind: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    run, rng = tmp_path / "run", random.Random(kind)
    hits, places = 0, set()
    for number in range(10):
        command = begin(run, KINDS[kind])
        a_moment(number, rng, run, command)
        done = command.kill()
        assert done.code in (-signal.SIGKILL, 0), done
        assert "Traceback" not in done.err
        if kind == "workers":
            all_gone(command.pid)
        if done.code == 0:  # it was faster than the kill
            break
        hits += 1
        places.add(size(run / "metrics.jsonl"))
    assert hits >= 7 and len(places) >= 3, "the kills did not hit a run at different places"
    done = begin(run, KINDS[kind]).wait()
    assert (done.code, done.err) == (0, ""), done
    same_record(run, whole[kind])
    assert config(run)["executor"] == ("workers" if kind == "workers" else "serial")


def test_a_real_command_killed_with_its_start_up(whole: dict[str, Path], tmp_path: Path) -> None:
    """The same from ``python -m isofed.cli``, the process that a user has."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "isofed.cli", "run", *QUICK, "method=fedavg", f"out={run}"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while process.poll() is None and size(run / "metrics.jsonl") < 2000:
            time.sleep(0.005)
        process.kill()
        assert process.stderr is not None and process.stderr.read() == b""
        assert process.wait() == -signal.SIGKILL
    assert not (run / "result.json").exists()
    command = [sys.executable, "-m", "isofed.cli", "run", "--resume", str(run)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "going on after round" in done.stdout
    same_record(run, whole["stateless"])


def test_the_executor_may_change_when_a_run_goes_on(whole: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = start("run", *QUICK, "method=scaffold", "executor=serial", f"out={run}")
    command.when(lambda: size(run / "metrics.jsonl") > 10000)
    assert command.kill().code == -signal.SIGKILL
    succeeds("run", "--resume", run, "executor=workers", "workers=1")
    same_record(run, whole["client state"])


def test_a_killed_worker_is_replaced(whole: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = start("run", *QUICK, *KINDS["workers"], f"out={run}")
    command.when(lambda: size(run / "metrics.jsonl") > 2000)
    (worker,) = workers_of(command.pid)
    os.kill(worker, signal.SIGKILL)
    done = command.wait()
    assert (done.code, done.err) == (0, ""), done
    same_record(run, whole["workers"])
    all_gone(command.pid)


def test_only_one_process_writes_a_run(whole: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start("run", *QUICK, "rounds=100000", "executor=serial", f"out={run}")
    first.when(lambda: size(run / "metrics.jsonl") > 0)
    assert "in use by another process" in complaint(isofed("run", "--resume", run), 2)
    assert "in use by another process" in complaint(isofed("run", *QUICK, f"out={run}"), 2)
    first.kill()
    assert "already holds a run" in complaint(isofed("run", *QUICK, f"out={run}"), 2)


# --- going on


def test_a_finished_run_is_shown_again_and_not_touched(whole: dict[str, Path]) -> None:
    run = whole["stateless"]
    before = everything(run)
    out = succeeds("run", "--resume", run)
    assert f"test accuracy {100 * result(run)['accuracy']:.1f} % after {ROUNDS} rounds" in out
    assert str(run) in out and "round 15/" not in out
    assert everything(run) == before


@pytest.mark.parametrize("word", ["lr=0.1", "seed=1", "method=fedprox", "partition=iid"])
def test_a_setting_cannot_change_on_the_way(word: str, whole: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole["stateless"], run)
    (run / "result.json").unlink()
    before = everything(run)
    said = complaint(isofed("run", "--resume", run, word), 2)
    assert word.partition("=")[0] in said and "cannot change" in said
    assert everything(run) == before


def test_only_a_run_can_go_on(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, why in (("empty", "no config.yaml"), ("file", "is a file"), ("missing", "does not exist")):
        said = complaint(isofed("run", "--resume", tmp_path / name), 2)
        assert "not a run folder" in said and why in said
    assert sorted(os.listdir(tmp_path)) == ["empty", "file"] and not os.listdir(tmp_path / "empty")


def test_other_data_are_noticed_when_a_run_goes_on(tmp_path: Path) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (40, 3, 3), dtype=np.uint8), np.arange(40) % 2
    np.savez(tmp_path / "data.npz", images=images, labels=labels)
    words = (
        f"data={tmp_path / 'data.npz'}",
        "model=mlp",
        "partition=iid",
        "clients=2",
        "rounds=100000",
        "executor=serial",
    )
    command = start("run", *words, f"out={tmp_path / 'run'}")
    command.when(lambda: any((tmp_path / "run").glob("checkpoints/*.safetensors")))
    command.kill()
    images[0, 0, 0] ^= 1
    np.savez(tmp_path / "data.npz", images=images, labels=labels)
    assert "data" in complaint(isofed("run", "--resume", tmp_path / "run"), 2)


def stopped(whole: Path, run: Path) -> list[Path]:
    """A run as a kill after the last round leaves it, and its checkpoints, the newest last."""
    shutil.copytree(whole, run)
    (run / "result.json").unlink()
    (run / "model.safetensors").unlink()
    found = sorted((run / "checkpoints").glob("*.safetensors"))
    assert len(found) == 2
    return found


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "emptied":
        path.write_bytes(b"")
    else:
        path.write_bytes(data[:-10] + bytes([data[-10] ^ 1]) + data[-9:])


@pytest.mark.parametrize("how", ["truncated", "emptied", "flipped"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_used(
    how: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    before, newest = stopped(whole["client state"], run)
    damage(newest, how)
    out = succeeds("run", "--resume", run)
    assert f"{newest.name} is damaged" in out
    assert f"going on after round {int(before.stem.removeprefix('round-'))}" in out
    same_record(run, whole["client state"])
    assert any(newest.name in note for note in result(run)["notes"])


def test_with_all_checkpoints_damaged_a_run_says_so(whole: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    for path in stopped(whole["stateless"], run):
        damage(path, "truncated")
    before = everything(run)
    said = complaint(isofed("run", "--resume", run), 1)
    assert "no checkpoint" in said and "damaged" in said
    assert everything(run) == before


def test_without_checkpoints_a_run_starts_again(whole: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopped(whole["stateless"], run)
    shutil.rmtree(run / "checkpoints")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 201, "accu')  # as a kill leaves it
    succeeds("run", "--resume", run)
    same_record(run, whole["stateless"])


def test_the_recorded_configuration_repeats_the_run(whole: dict[str, Path], tmp_path: Path) -> None:
    for kind in ("stateless", "client state", "persistent momentum"):
        succeeds("run", whole[kind] / "config.yaml", f"out={tmp_path / kind}")
        same_record(tmp_path / kind, whole[kind])
        assert config(tmp_path / kind) == config(whole[kind])
    succeeds("run", whole["stateless"], "seed=1", f"out={tmp_path / 'other'}")  # a folder stands for its configuration
    assert model(tmp_path / "other") != model(whole["stateless"])


# --- Ctrl-C


def test_ctrl_c_while_the_command_is_being_loaded(tmp_path: Path) -> None:
    """Which takes longer than a moment; what is loaded first stands for all of it."""
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    given = environment() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{environment().get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-m", "isofed", "run"], env=given, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "isofed: stopped.\n")


def interrupted(command: Command, within: float = 8, by: signal.Signals = signal.SIGINT) -> str:
    """Press Ctrl-C, or send another signal; what is said must be one sentence, soon."""
    began = time.monotonic()
    command.interrupt(by)
    done = command.wait()
    took = time.monotonic() - began
    said = complaint(done, 130)
    assert took < within, f"{took:.1f} s"
    assert said.startswith("stopped")
    return said


@pytest.mark.parametrize(
    ("kind", "by"),
    [
        ("client state", signal.SIGINT),
        ("client state", signal.SIGHUP),
        ("workers", signal.SIGINT),
        ("workers", signal.SIGTERM),
    ],
)
def test_ctrl_c_and_requests_to_end_in_the_rounds(
    kind: str, by: signal.Signals, whole: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = start("run", *QUICK, *KINDS[kind], f"out={run}")
    command.when(lambda: size(run / "metrics.jsonl") > 5000)
    assert f"isofed run --resume {run}" in interrupted(command, by=by)
    all_gone(command.pid)
    done = len(metrics(run))
    assert 0 < done < ROUNDS
    assert f"going on after round {done}" in succeeds("run", "--resume", run)  # nothing that was finished is lost
    same_record(run, whole[kind])


def test_a_run_whose_output_nobody_reads_ends_as_with_ctrl_c(whole: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = shlex.join(["run", *QUICK, *KINDS["client state"], f"out={run}"])
    shell = f"set -o pipefail; '{sys.executable}' -m isofed.cli {words} | head -2"
    done = subprocess.run(["bash", "-c", shell], env=environment(), capture_output=True, text=True, timeout=60)
    said = complaint(Done(done.returncode, done.stdout, done.stderr), 130)
    assert said == (
        "stopped. Nobody reads the output any more. Nothing that was finished is lost; to go on: "
        f"isofed run --resume {run}"
    )
    last = len(metrics(run))
    assert last < ROUNDS and f"going on after round {last}" in succeeds("run", "--resume", run)
    same_record(run, whole["client state"])


def test_nobody_hears_why_a_run_ends_and_it_is_saved_all_the_same(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shell = f"'{sys.executable}' -m isofed.cli {shlex.join(['run', *QUICK, f'out={run}'])} 2>&1 | head -2"
    subprocess.run(["bash", "-c", shell], env=environment(), capture_output=True, timeout=60)
    assert f"going on after round {len(metrics(run))}" in succeeds("run", "--resume", run)


def test_what_is_ignored_stays_ignored() -> None:
    """As nohup wants it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminated():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(5)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])
    assert {number: signal.getsignal(number) for number in before} == before


def test_ctrl_c_while_workers_start_is_quiet(whole: dict[str, Path], tmp_path: Path) -> None:
    """Workers take seconds to import torch, in which they cannot yet ignore the signal by themselves."""
    run = tmp_path / "run"
    command = start("run", *QUICK, *KINDS["workers"], f"out={run}")
    command.when(lambda: len(workers_of(command.pid)) == 1)
    time.sleep(0.3)
    assert f"--resume {run}" in interrupted(command)
    all_gone(command.pid)


def test_ctrl_c_twice_and_long_visits_do_not_hold_it_up(tmp_path: Path) -> None:
    file = tmp_path / "methods.py"
    file.write_text(METHODS)
    words = (*QUICK, f"method={file}:Slow:flag={tmp_path / 'flag'}", "executor=workers", "workers=1")
    command = start("run", *words, f"out={tmp_path / 'run'}")
    command.when(lambda: (tmp_path / "flag").exists())
    command.interrupt()
    time.sleep(0.05)
    interrupted(command)
    all_gone(command.pid)


def test_ctrl_c_in_an_evaluation_leaves_no_gap(tmp_path: Path) -> None:
    data = "data=synthetic:samples=60,test=200000,size=3"
    words = (data, *QUICK[1:-1], "rounds=6", "executor=serial", "train_loss=false")
    succeeds("run", *words, f"out={tmp_path / 'whole'}")
    run = tmp_path / "run"
    command = start("run", *words, f"out={run}")
    command.when(lambda: size(run / "metrics.jsonl") > 0 and (run / "metrics.jsonl").read_text().count("\n") > 1)
    time.sleep(metrics(run)[1]["seconds"] + 0.03)  # the first one warms up; nearly all of the others is evaluation
    interrupted(command)
    succeeds("run", "--resume", run)
    same_record(run, tmp_path / "whole")


def test_ctrl_c_in_the_server_step_leaves_a_whole_state(tmp_path: Path) -> None:
    file, flag = tmp_path / "methods.py", tmp_path / "flag"
    file.write_text(METHODS)
    words = (*QUICK, "rounds=6", f"method={file}:StoppedWhileAggregating:flag={flag}", "executor=serial")
    said = complaint(isofed("run", *words, f"out={tmp_path / 'run'}"), 130)
    assert "--resume" in said and flag.exists()
    succeeds("run", "--resume", tmp_path / "run")
    succeeds("run", *words, f"out={tmp_path / 'whole'}")  # the flag is there: nothing stops it
    same_record(tmp_path / "run", tmp_path / "whole")
