"""The run folder against real damage: truncated and corrupted files, killed processes, full and read-only disks.

Run as a script, this file is the other process of these tests (see ``_main``).
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import yaml

import isofed
from isofed.errors import RunError, UserError
from isofed.files import _exclusive_file, remove_strays, write_error
from isofed.records import DamagedFile, RunFolder, environment, load_tensors, save_tensors, write_atomic

CONFIG = {"method": "fedavg", "lr": 1e-05, "clients": 10, "name": "Prüfung", "also": ["a", "b"]}


def new_run(path: Path) -> RunFolder:
    return RunFolder.create(path, CONFIG, environment("cpu", "abc"))


def state(round: int, size: int = 1000) -> dict[str, torch.Tensor]:
    """A state in which every number tells the round, so that a mixture of two rounds shows."""
    return {"weight": torch.full((size,), float(round)), "count": torch.tensor(round)}


def check_state(checkpoint: Any) -> None:
    assert checkpoint is not None
    assert checkpoint.info == {"round": checkpoint.round}
    assert (checkpoint.tensors["weight"] == checkpoint.round).all()
    assert checkpoint.tensors["count"] == checkpoint.round


def strays(path: Path) -> list[str]:
    return [found.name for found in path.rglob("*") if found.name.endswith(".tmp")]


def flip(path: Path, at: int, mask: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(bytes(data))


def one_sentence(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert not text.endswith(".")
    return text


# --- writing one file


def test_write_atomic_writes_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, b"old")
    write_atomic(path, b"new and longer")
    assert path.read_bytes() == b"new and longer"
    assert os.listdir(tmp_path) == ["file"]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path):
    path = tmp_path / "file"
    contents = [bytes([number]) * 200_000 for number in range(30)]
    write_atomic(path, contents[0])

    def write() -> None:
        for content in contents:
            write_atomic(path, content)

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while writer.is_alive():
        seen.append(path.read_bytes())
    writer.join()
    assert seen
    assert all(content in contents for content in seen)
    assert path.read_bytes() == contents[-1]


def test_write_atomic_under_a_file_or_onto_a_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="nothing already written is lost") as error:
        write_atomic(tmp_path / "file" / "below", b"data")
    assert "Not a directory" in one_sentence(error)
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError):
        write_atomic(tmp_path / "folder", b"data")
    with pytest.raises(RunError):
        write_atomic(tmp_path / "nowhere" / "file", b"data")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_the_sentence_for_a_full_disk():
    with pytest.raises(OSError) as refused, open("/dev/full", "wb", buffering=0) as file:
        file.write(b"data")
    assert refused.value.errno == errno.ENOSPC
    text = str(write_error(Path("run/model"), refused.value))
    assert text == "cannot write run/model: the disk or the quota is full; nothing already written is lost"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission(tmp_path):
    folder = new_run(tmp_path / "run")
    folder.checkpoint(1, state(1), {"round": 1})
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        path.chmod(0o555)
    try:
        with pytest.raises(RunError, match="not writable") as error:
            folder.checkpoint(2, state(2), {"round": 2})
        one_sentence(error)
        with pytest.raises(UserError, match="Permission denied"):
            RunFolder.create(tmp_path / "run" / "other", CONFIG, {})
        check_state(folder.latest())
    finally:
        for path in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
            path.chmod(0o755)


# --- tensor files


def test_tensors_and_info_come_back(tmp_path):
    base = torch.arange(48.0).reshape(2, 3, 2, 4)
    tensors = {
        "plain": base,
        "tied": base,
        "row": base[1],
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "strided": torch.arange(10)[::3],
        "one of a stride": torch.arange(10)[::3][:1],
        "none of a stride": torch.from_numpy(np.zeros((0, 4), np.int64)),
        "channels_last": base.to(memory_format=torch.channels_last),
        "expanded": torch.ones(1).expand(5),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "half": torch.tensor([1.5, -2], dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "bytes": torch.tensor([0, 255], dtype=torch.uint8),
        "imaginary": torch.tensor([1 + 2j]).conj(),
        "parameter": torch.nn.Parameter(torch.tensor([math.nan, math.inf, -0.0])),
        "näme/with \"odd' characters\n": torch.ones(1),
    }
    info = {"round": 3, "best": math.inf, "list": [1, 2.5, None, "ü"], "nested": {"b": 0.1, "a": True}}
    save_tensors(tmp_path / "file", tensors, info)
    loaded, told = load_tensors(tmp_path / "file")
    assert told == info
    assert list(loaded) == sorted(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].is_contiguous()
        assert torch.equal(loaded[name].nan_to_num(9), tensor.detach().nan_to_num(9))
        assert loaded[name].data_ptr() % 64 == 0
    loaded["plain"].zero_()
    assert torch.equal(loaded["tied"], base)
    assert torch.equal(load_tensors(tmp_path / "file")[0]["plain"], base)


def test_no_tensors_and_numbers_from_elsewhere_in_info(tmp_path):
    info: dict[Any, Any] = {"a": np.float32(0.5), "b": torch.tensor([1, 2]), "c": (3,), 4: np.int64(5)}
    save_tensors(tmp_path / "file", {}, info)
    assert load_tensors(tmp_path / "file") == ({}, {"a": 0.5, "b": [1, 2], "c": [3], "4": 5})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_tensors_from_a_gpu(tmp_path):
    save_tensors(tmp_path / "gpu", {"a": torch.arange(6.0, device="cuda").reshape(2, 3).t()}, {})
    save_tensors(tmp_path / "cpu", {"a": torch.arange(6.0).reshape(2, 3).t()}, {})
    assert (tmp_path / "gpu").read_bytes() == (tmp_path / "cpu").read_bytes()


def test_the_bytes_depend_on_the_content_alone(tmp_path):
    image = torch.arange(48.0).reshape(2, 3, 2, 4)
    save_tensors(tmp_path / "a", {"x": image, "y": torch.ones(2)}, {"p": 1, "q": 2})
    save_tensors(
        tmp_path / "b", {"y": torch.ones(2), "x": image.to(memory_format=torch.channels_last)}, {"q": 2, "p": 1}
    )
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    save_tensors(tmp_path / "c", {"x": image, "y": torch.ones(2)}, {"p": 1, "q": 3})
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_other_programs_can_read_a_tensor_file(tmp_path):
    save_tensors(tmp_path / "file", state(4), {"round": 4})
    with safetensors.safe_open(str(tmp_path / "file"), framework="np") as file:
        assert (file.get_tensor("weight") == 4).all()
        assert list(file.metadata()) == ["isofed"]


def test_every_truncation_is_found(tmp_path):
    path = tmp_path / "file"
    save_tensors(path, state(3, size=16), {"round": 3})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DamagedFile) as error:
            load_tensors(path)
        assert "damaged" in one_sentence(error)
    path.write_bytes(whole + b"more")
    with pytest.raises(DamagedFile):
        load_tensors(path)
    path.write_bytes(whole)
    assert load_tensors(path)[1] == {"round": 3}


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path):
    path = tmp_path / "file"
    save_tensors(path, state(3, size=16), {"round": 3, "best": 0.25})
    whole = path.read_bytes()
    for at in range(len(whole)):
        flip(path, at, 1 << (at % 8))
        with pytest.raises(DamagedFile):
            load_tensors(path)
        path.write_bytes(whole)
    assert load_tensors(path)[1]["round"] == 3


def test_files_of_another_kind_are_refused_and_never_run(tmp_path):
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    torch.save(Bomb(), tmp_path / "pickle")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("not tensors, but long enough to have a header")
    (tmp_path / "foreign").write_bytes(safetensors.torch.save({"a": torch.ones(2)}))
    (tmp_path / "liar").write_bytes(safetensors.torch.save({"a": torch.ones(2)}, {"isofed": "[1]"}))
    for name in ("pickle", "empty", "text", "foreign", "liar"):
        with pytest.raises(DamagedFile) as error:
            load_tensors(tmp_path / name)
        assert name in one_sentence(error)
    assert not (tmp_path / "exploded").exists()
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(RunError) as missing:
            load_tensors(path)
        assert not isinstance(missing.value, DamagedFile)
        one_sentence(missing)


# --- making and opening a run


def test_create_and_open(tmp_path):
    made = new_run(tmp_path / "deep" / "er" / "run")
    folder = RunFolder.open(str(made.path))
    assert folder.config == CONFIG
    assert list(folder.config) == list(CONFIG)
    assert folder.environment["isofed"] == isofed.__version__
    assert folder.environment["torch"] == torch.__version__
    assert folder.environment["data"] == "abc"
    assert all(folder.environment[key] for key in ("python", "numpy", "platform", "device", "device_name"))
    assert (folder.metrics(), folder.latest(), folder.result()) == ([], None, None)


def test_the_configuration_is_plain_yaml(tmp_path):
    shared = ["a"]
    RunFolder.create(tmp_path / "run", {"x": shared, "y": shared, "z": (1, 2)}, {})
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "&" not in text
    assert yaml.safe_load(text) == {"x": ["a"], "y": ["a"], "z": [1, 2]}


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    folder = new_run(tmp_path / "run")
    folder.append({"round": 1})
    with pytest.raises(UserError) as error:
        RunFolder.create(tmp_path / "run", {"other": 1}, {})
    assert f"isofed run --resume {tmp_path / 'run'}` or choose another out=" in one_sentence(error)
    assert RunFolder.open(tmp_path / "run").config == CONFIG
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(UserError, match="already holds a run"):
        new_run(tmp_path / "run")


def test_a_folder_with_other_things_or_half_a_beginning_can_become_a_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "environment.json").write_text("{}")
    assert new_run(tmp_path).environment["data"] == "abc"
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_places_where_no_run_can_be(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "file" / "deep" / "run"):
        with pytest.raises(UserError, match="file in its place") as error:
            new_run(path)
        one_sentence(error)
    if os.path.isdir("/proc/self"):
        with pytest.raises(UserError, match="cannot make"):
            new_run(Path("/proc/self/run"))


def test_what_is_missing_is_said(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="it is a file"):
        RunFolder.open(tmp_path / "file")
    with pytest.raises(UserError, match="does not exist"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"it has no config.yaml and no environment.json$"):
        RunFolder.open(tmp_path)
    (tmp_path / "config.yaml").write_text("a: 1")
    with pytest.raises(UserError, match=r"it has no environment.json$"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("text", ["a: [1", "- 1\n- 2", "", "a: !!python/object/apply:os.getcwd []", "\x00"])
def test_a_spoilt_configuration_is_one_sentence(tmp_path, text):
    folder = new_run(tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml") as error:
        folder.config  # noqa: B018
    one_sentence(error)


# --- metrics


def test_lines_come_back_and_are_valid_json(tmp_path):
    folder = new_run(tmp_path)
    folder.append({"round": 1, "loss": math.nan, "nested": {"x": [math.inf, 1.5]}, "text": "ü\n\u2028"})
    folder.append({"round": 2, "loss": np.float32(0.5), "count": np.int64(3), "t": torch.tensor([1.0, -math.inf])})
    expected = [
        {"round": 1, "loss": None, "nested": {"x": [None, 1.5]}, "text": "ü\n\u2028"},
        {"round": 2, "loss": 0.5, "count": 3, "t": [1.0, None]},
    ]
    assert folder.metrics() == expected

    def refuse(name: str) -> None:
        raise AssertionError(name)

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse) for line in lines] == expected


def test_a_half_written_last_line_is_left_out_wherever_it_ends(tmp_path):
    folder = new_run(tmp_path)
    for round in (1, 2):
        folder.append({"round": round, "loss": 0.5})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        assert [line["round"] for line in folder.metrics()] == [1]
        again = RunFolder.open(tmp_path)
        again.append({"round": 7})
        assert [line["round"] for line in again.metrics()] == [1, 7]
    for tail in (b"\0\0\0", b"\xff\xfe\n", b'{"round": 3, "lo\n', b"12\n"):
        path.write_bytes(whole + tail)
        assert [line["round"] for line in folder.metrics()] == [1, 2]
        RunFolder.open(tmp_path).append({"round": 3})
        assert [line["round"] for line in folder.metrics()] == [1, 2, 3]


def test_a_damaged_middle_line_is_named(tmp_path):
    folder = new_run(tmp_path)
    for round in range(1, 5):
        folder.append({"round": round})
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b'{"rou\n', lines[3]]))
    for use in (folder.metrics, lambda: folder.rewind(1), lambda: RunFolder.open(tmp_path).append({"round": 5})):
        with pytest.raises(DamagedFile, match="line 3 of") as error:
            use()
        one_sentence(error)


def test_rewind_drops_later_rounds_and_a_half_line(tmp_path):
    folder = new_run(tmp_path)
    folder.rewind(3)
    assert not (tmp_path / "metrics.jsonl").exists()
    folder.append({"note": "no round"})
    for round in range(1, 7):
        folder.append({"round": round, "loss": 1 / round})
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()
    folder.rewind(6)
    assert path.read_bytes() == before
    with path.open("ab") as file:
        file.write(b'{"round": 7, "lo')
    folder.rewind(6)
    assert path.read_bytes() == before
    folder.rewind(4)
    assert before.startswith(path.read_bytes())
    assert [line.get("round") for line in folder.metrics()] == [None, 1, 2, 3, 4]
    folder.append({"round": 5})
    assert folder.metrics()[-1] == {"round": 5}
    folder.rewind(0)
    assert folder.metrics() == [{"note": "no round"}]
    assert strays(tmp_path) == []


# --- checkpoints, kept models and the end


def test_the_last_two_checkpoints_stay(tmp_path):
    folder = new_run(tmp_path)
    for round in (1, 2, 5, 999_999, 1_000_000):
        folder.checkpoint(round, state(round), {"round": round})
        checkpoint = folder.latest()
        check_state(checkpoint)
        assert checkpoint is not None
        assert (checkpoint.round, checkpoint.note) == (round, None)
    names = sorted(os.listdir(tmp_path / "checkpoints"))
    assert names == ["round-1000000.safetensors", "round-999999.safetensors"]
    # Going on from an earlier round leaves that one and no later ones.
    folder.checkpoint(7, state(7), {"round": 7})
    assert os.listdir(tmp_path / "checkpoints") == ["round-000007.safetensors"]


@pytest.mark.parametrize("damage", ["empty", "half", "header", "data", "info"])
def test_a_damaged_newest_checkpoint_is_skipped_with_a_note(tmp_path, damage):
    folder = new_run(tmp_path)
    for round in (11, 12):
        folder.checkpoint(round, state(round), {"round": round})
    path = tmp_path / "checkpoints" / "round-000012.safetensors"
    data = path.read_bytes()
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "half":
        path.write_bytes(data[: len(data) // 2])
    else:
        flip(path, {"header": 3, "data": len(data) - 1, "info": data.index(b"12")}[damage], 0x01)
    checkpoint = RunFolder.open(tmp_path).latest()
    check_state(checkpoint)
    assert checkpoint is not None
    assert checkpoint.note == (
        "round-000012.safetensors is damaged, so the newest state that can be read is that of round 11"
    )
    folder.checkpoint(12, state(12), {"round": 12})
    after = folder.latest()
    assert after is not None
    assert (after.round, after.note) == (12, None)


def test_when_every_checkpoint_is_damaged(tmp_path):
    folder = new_run(tmp_path)
    for round in (1, 2):
        folder.checkpoint(round, state(round), {"round": round})
        flip(tmp_path / "checkpoints" / f"round-{round:06d}.safetensors", -1)
    with pytest.raises(RunError, match=r"round-000002.safetensors, round-000001.safetensors damaged") as error:
        folder.latest()
    assert "out=" in one_sentence(error)


def test_kept_models_and_the_end(tmp_path):
    folder = new_run(tmp_path)
    folder.keep(10, state(10), {"round": 10})
    folder.keep(10, state(3), {"round": 10, "client": 3}, client=3)
    kept = tmp_path / "kept"
    assert sorted(os.listdir(kept)) == ["round-000010-client-000003.safetensors", "round-000010.safetensors"]
    assert load_tensors(kept / "round-000010-client-000003.safetensors")[1] == {"round": 10, "client": 3}
    folder.finish(state(20), {"round": 20}, {"accuracy": 0.9, "loss": math.nan})
    assert folder.result() == {"accuracy": 0.9, "loss": None}
    assert load_tensors(tmp_path / "model.safetensors")[0]["count"] == 20
    for text in ("{", "[1]", ""):
        (tmp_path / "result.json").write_text(text)
        with pytest.raises(DamagedFile, match=r"result\.json is damaged"):
            folder.result()


# --- other processes: each function below runs in one of its own, and prints one line of JSON when it is ready


def say(value: Any) -> None:
    print(json.dumps([os.getpid(), value]), flush=True)


def train(path: str) -> None:
    """Go on with the run for ever, as a training process would."""
    folder = RunFolder.open(path)
    with folder.lock():
        checkpoint = folder.latest()
        round = checkpoint.round if checkpoint else 0
        folder.rewind(round)
        say(strays(folder.path))
        while True:
            round += 1
            folder.append({"round": round, "padding": "x" * 3000})
            folder.checkpoint(round, state(round, size=200_000), {"round": round})


def rewrite(path: str) -> None:
    """Replace one large file for ever: here most of the time goes into writing, where a kill hurts."""
    contents = [bytes([number]) * 4_000_000 for number in range(4)]
    write_atomic(path, contents[0])
    say(None)
    while True:
        for content in contents:
            write_atomic(path, content)


def hold(path: str) -> None:
    """Hold the lock, with a forked child that outlives this process."""
    with RunFolder.open(path).lock():
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        say(child)
        time.sleep(60)


def limited(path: str) -> None:
    """Write under a limit on the size of files, which makes writes fail halfway."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    folder = RunFolder.open(path)
    say([*failures(folder, 3, 70_000), os.path.getsize(folder.path / "metrics.jsonl")])


def failures(folder: RunFolder, round: int, line: int) -> list[str]:
    """The messages of a checkpoint and of a line, repeated until it fails."""
    messages = []
    with pytest.raises(RunError) as error:
        folder.checkpoint(round, state(round, size=400_000), {"round": round})
    messages.append(one_sentence(error))

    def append() -> None:
        for _ in range(1000):
            folder.append({"round": round, "padding": "x" * line})

    with pytest.raises(RunError) as error:
        append()
    messages.append(one_sentence(error))
    return messages


def full_disk(path: str) -> None:
    """Fill the small file system mounted at this path, then make it read-only."""
    folder = new_run(Path(path) / "run")
    folder.append({"round": 1})
    folder.checkpoint(1, state(1), {"round": 1})
    messages = failures(folder, 2, 10_000)
    lines = len(folder.metrics())
    check_state(folder.latest())
    left = strays(folder.path)
    subprocess.run(["mount", "-o", "remount,ro", path], check=True)
    with pytest.raises(RunError) as error:
        folder.checkpoint(2, state(2), {"round": 2})
    messages.append(one_sentence(error))
    for use in (lambda: new_run(Path(path) / "other"), lambda: folder.lock().__enter__()):
        with pytest.raises(UserError) as refused:
            use()
        messages.append(one_sentence(refused))
    check_state(folder.latest())
    say({"messages": messages, "lines": lines, "strays": left})


def save(path: str) -> None:
    """Write tensors in an order that depends on this process's hash seed."""
    names = list({f"tensor-{number}" for number in range(50)})
    save_tensors(path, {name: torch.full((3,), float(len(name))) for name in names}, dict.fromkeys(names, 1))
    say(names)


def nursery() -> None:
    """Fork a process for each line read: importing torch once makes many of them cheap."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel clears away the dead
    for line in sys.stdin:
        name, path = line.rstrip("\n").split(" ", 1)
        if os.fork() == 0:
            globals()[name](path)
            os._exit(0)


def child_environment(hash_seed: int) -> dict[str, str]:
    package = str(Path(isofed.__file__).parents[1])
    path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(hash_seed)}


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[str, Path], tuple[int, Any]]]:
    """Start one of the functions above in its own process; returns the process's id and what it said."""
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    with subprocess.Popen(
        [sys.executable, __file__, "nursery"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(hash_seed=1),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        pids = []

        def begin(name: str, path: Path) -> tuple[int, Any]:
            stdin.write(f"{name} {path}\n")
            stdin.flush()
            pid, value = json.loads(stdout.readline())
            pids.append(pid)
            return pid, value

        yield begin
        stdin.close()
        for pid in pids:
            kill(pid)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def kill(pid: int) -> None:
    """End a process of this test as the kernel would for want of memory, and wait until it is gone."""
    if alive(pid):
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.001)
    assert not alive(pid)


def test_two_processes_write_the_same_bytes(tmp_path, start):
    _, names = start("save", tmp_path / "one")
    done = subprocess.run(
        [sys.executable, __file__, "save", str(tmp_path / "two")],
        check=True,
        capture_output=True,
        timeout=60,
        env=child_environment(hash_seed=2),
    )
    _, others = json.loads(done.stdout)
    assert names != others
    assert sorted(names) == sorted(others) == list(load_tensors(tmp_path / "two")[0])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_file_is_whole_after_a_kill(tmp_path, start):
    path = tmp_path / "file"
    rng = random.Random(1)
    for _ in range(25):
        pid, _ = start("rewrite", path)
        time.sleep(rng.uniform(0, 0.02))
        kill(pid)
        content = path.read_bytes()
        assert len(content) == 4_000_000
        assert content == content[:1] * len(content)
    # Some of the kills came while a file was being written, or this test would show nothing.
    assert strays(tmp_path) != []
    remove_strays(tmp_path)
    assert os.listdir(tmp_path) == ["file"]


def test_a_run_survives_being_killed_again_and_again(tmp_path, start):
    folder = new_run(tmp_path / "run")
    rng = random.Random(0)
    reached = 0
    for _ in range(30):
        pid, left = start("train", folder.path)
        assert left == []
        time.sleep(rng.uniform(0, 0.05))
        kill(pid)
        checkpoint = RunFolder.open(folder.path).latest()
        rounds = [line["round"] for line in folder.metrics()]
        assert rounds == list(range(1, len(rounds) + 1))
        if checkpoint is not None:
            check_state(checkpoint)
            assert checkpoint.note is None
            assert reached <= checkpoint.round <= len(rounds) <= checkpoint.round + 1
            reached = checkpoint.round
    assert reached > 10
    with folder.lock():
        assert strays(folder.path) == []
        folder.checkpoint(reached + 1, state(reached + 1), {"round": reached + 1})
    assert len(os.listdir(folder.path / "checkpoints")) == 2


def test_the_lock_keeps_others_out_and_ends_with_its_process(tmp_path, start):
    folder = new_run(tmp_path / "run")
    pid, child = start("hold", folder.path)
    with pytest.raises(UserError, match="in use by another process") as error, folder.lock():
        raise AssertionError("two processes hold the lock")
    assert str(folder.path) in one_sentence(error)
    with pytest.raises(UserError):
        new_run(folder.path)
    kill(pid)
    try:
        assert alive(child)
        with folder.lock():  # although a forked child lives on
            assert folder.metrics() == []
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_lock_keeps_its_own_process_out_and_is_released(tmp_path):
    folder = new_run(tmp_path)
    for _ in range(2):
        with folder.lock(), pytest.raises(UserError, match="in use"), RunFolder.open(tmp_path).lock():
            raise AssertionError("held twice")
    with pytest.raises(KeyError), folder.lock():
        raise KeyError
    with folder.lock():
        assert folder.config == CONFIG


def test_the_lock_by_a_file_for_systems_without_record_locks(tmp_path):
    path = tmp_path / "lock"
    for _ in range(2):
        with (
            _exclusive_file(path, "the run"),
            pytest.raises(UserError, match="in use"),
            _exclusive_file(path, "the run"),
        ):
            raise AssertionError("held twice")
    assert not path.exists()
    with pytest.raises(UserError, match="cannot write in"), _exclusive_file(tmp_path / "no" / "lock", "the run"):
        raise AssertionError("no folder")


def test_strays_go_when_the_run_is_locked_and_other_files_stay(tmp_path):
    folder = new_run(tmp_path)
    folder.checkpoint(1, state(1), {"round": 1})
    folder.keep(1, state(1), {})
    places = [tmp_path, tmp_path / "checkpoints", tmp_path / "kept"]
    for place in places:
        (place / ".isofed-0123.tmp").write_bytes(b"half")
        (place / "mine.tmp").write_bytes(b"mine")
    check_state(folder.latest())
    with folder.lock():
        assert strays(tmp_path) == ["mine.tmp"] * 3


def test_a_write_that_fails_halfway_loses_nothing(tmp_path, start):
    folder = new_run(tmp_path / "run")
    for round in (1, 2):
        folder.append({"round": round})
        folder.checkpoint(round, state(round), {"round": round})
    _, (checkpoint, line, size) = start("limited", folder.path)
    for message in (checkpoint, line):
        assert "larger than the file system or a limit" in message
        assert "nothing already written is lost" in message
    assert strays(folder.path) == []
    latest = folder.latest()
    check_state(latest)
    assert latest is not None
    assert (latest.round, latest.note) == (2, None)
    assert [line["round"] for line in folder.metrics()] == [1, 2, 3, 3]
    metrics = folder.path / "metrics.jsonl"
    assert metrics.stat().st_size == size
    assert metrics.read_bytes().endswith(b"\n")


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare here")
def test_a_full_disk_and_a_read_only_one(tmp_path):
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" || exit 77; exec "$2" "$3" full_disk "$1"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", str(tmp_path), sys.executable, __file__],
        capture_output=True,
        text=True,
        timeout=60,
        env=child_environment(hash_seed=0),
    )
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip("no file system can be mounted here")
    assert done.returncode == 0, done.stderr
    _, said = json.loads(done.stdout)
    full, line, read_only, create, lock = said["messages"]
    for message in (full, line):
        assert message.endswith("the disk or the quota is full; nothing already written is lost")
    assert read_only.endswith("its folder is not writable; nothing already written is lost")
    assert "Read-only file system" in create
    assert "Read-only file system" in lock
    assert said["lines"] > 10
    assert said["strays"] == []


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
