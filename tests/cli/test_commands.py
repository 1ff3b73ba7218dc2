"""What the commands say: plainly into a file, shortly when asked to, and about methods, data and settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from isofed.config import settings
from isofed.engine.world import World
from isofed.report.gather import run_folders
from tests.cli_tools import (
    SMALL,
    environment,
    escapes,
    metrics,
    plain,
    succeeds,
)

COMMANDS = (
    *("run", "compare", "tune", "methods", "models", "data", "diagnose", "report", "watch", "bench", "settings"),
)


# --- quiet, plain, piped


def test_output_that_is_not_a_terminal_is_plain_and_short(tmp_path: Path) -> None:
    out = succeeds("run", *SMALL, "rounds=100", f"out={tmp_path / 'run'}")
    assert not escapes(out) and "\r" not in out
    assert len(out.splitlines()) <= 15
    assert max(map(len, out.splitlines())) <= 120


def test_rounds_to_a_target_are_counted_before_a_head_is_refitted(tmp_path: Path) -> None:
    words = (*SMALL, "rounds=1", "executor=serial", "target=0.99", "--quiet")
    for methods, told in ((("fedavg", "fedavg+ffc"), True), (("fedavg",), False)):
        out = " ".join(succeeds("compare", *methods, *words, f"out={tmp_path / str(told)}").split())
        assert "'To 99 %' counts rounds" in out
        assert ("counts rounds, before what fedavg+ffc does after the last one." in out) == told


def test_a_target_that_some_seeds_reach_is_explained_where_there_is_one(tmp_path: Path) -> None:
    words = ("compare", "fedavg", *SMALL, "rounds=1", "executor=serial", "seeds=2", "--quiet")
    out = succeeds(*words, "target=1", f"out={tmp_path / 'never'}")
    assert "never" in out and "enough" not in out
    found = [metrics(run)[0]["accuracy"] for run in run_folders(tmp_path / "never")]
    assert len(found) == 2 and found[0] != found[1]
    out = " ".join(succeeds(*words, f"target={sum(found) / 2}", f"out={tmp_path / 'some'}").split())
    assert "'> 1 (1/2)' means that they were enough for 1 of 2 seeds." in out


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


def test_output_that_cannot_be_written_is_one_sentence() -> None:
    for words in (["methods"], ["--help"], ["methods", "fedprox"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "isofed.cli", *words],
                env=environment() | {"PYTHONUNBUFFERED": ""},  # what is still to be written at the end cannot be either
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
            )
        assert done.returncode == 1, (words, done.stderr)
        assert done.stderr == "isofed: what is to be shown cannot be written: no space is left where the output goes\n"


def test_a_terminal_that_does_not_know_a_sign_shows_another() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "isofed.cli", "paper", "feduv", "table1", "--show", "only=cifar100"],
        env=environment() | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "") and " 51.6 ? 1.7 " in done.stdout


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
    explained = succeeds("methods", *names()).splitlines()
    starts = [explained.index(name) for name in names()]
    assert starts == sorted(starts)
    for name, start, end in zip(names(), starts, [*starts[1:], len(explained)], strict=True):
        shown = explained[start:end]
        assert any(line.startswith("acts at: ") for line in shown), name
        if name not in ("fedavg", "central"):
            assert find(name)[1].paper and f"paper:   {find(name)[1].paper}" in " ".join(shown)
    both = succeeds("methods", "fedprox:mu=0.3+fedbn")
    assert "option:  mu = 0.3" in both and "fedbn" in both
    scaffold = succeeds("methods", "scaffold")
    acts = next(line for line in scaffold.splitlines() if line.startswith("acts at:"))
    assert all(place in acts for place in ("send", "end", "gradient", "aggregate"))


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
    assert "domains" in out
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
