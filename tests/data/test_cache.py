"""Decoded data on disk: made once, shared, renewed when the source changes, and never trusted when damaged."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from isofed.data import cache, load
from isofed.data.cache import cached, fingerprint
from isofed.data.sources import items
from tests.cli_tools import environment

SHAPES = {"x": ((100, 8, 8, 3), "uint8"), "y": ((100,), "int64"), "none": ((0, 4), "float32")}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOFED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Filling:
    """A fill that counts how often it ran."""

    def __init__(self, value: int = 7) -> None:
        self.value, self.count = value, 0

    def __call__(self, arrays: dict[str, Any]) -> None:
        self.count += 1
        arrays["x"][:] = self.value
        arrays["y"][:] = np.arange(100)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_the_second_time_comes_from_disk(folder: Path) -> None:
    fill = Filling()
    first = cached("set", {"size": 8}, SHAPES, fill)
    second = cached("set", {"size": 8}, SHAPES, fill)
    assert fill.count == 1
    for arrays in (first, second):
        assert {k: (v.shape, str(v.dtype)) for k, v in arrays.items()} == SHAPES
        assert (arrays["x"] == 7).all() and arrays["y"].tolist() == list(range(100))
    (entry,) = names(folder)
    told = json.loads((folder / entry / "entry.json").read_text())
    assert (told["kind"], told["about"]) == ("set", {"size": 8})
    assert {k: v["bytes"] for k, v in told["files"].items()}["x"] == 128 + 100 * 8 * 8 * 3
    np.testing.assert_array_equal(np.load(folder / entry / "x.npy"), first["x"])


def test_arrays_may_be_written_without_changing_the_entry() -> None:
    fill = Filling()
    cached("set", {}, SHAPES, fill)
    tensor = torch.from_numpy(cached("set", {}, SHAPES, fill)["x"])  # a warning would be an error here
    tensor.zero_()
    assert (cached("set", {}, SHAPES, fill)["x"] == 7).all() and fill.count == 1


def test_whatever_the_content_depends_on_makes_another_entry(folder: Path) -> None:
    fill = Filling()
    for kind, about, shapes in (
        ("set", {"size": 8}, SHAPES),
        ("set", {"size": 9}, SHAPES),
        ("other", {"size": 8}, SHAPES),
        ("set", {"size": 8}, SHAPES | {"y": ((100,), "int32")}),
    ):
        cached(kind, about, shapes, fill)
    assert fill.count == 4 and len(names(folder)) == 4


def test_a_changed_source_replaces_its_older_entry_only(tmp_path: Path, folder: Path) -> None:
    sources = [tmp_path / "one", tmp_path / "two"]
    for source in sources:
        source.mkdir()
        (source / "a.bin").write_bytes(b"a")

    def get(source: Path, value: int, **options: Any) -> int:
        about = {"files": fingerprint(sorted(source.iterdir())), **options}
        return int(cached("set", about, SHAPES, Filling(value))["x"][0, 0, 0, 0])

    assert [get(sources[0], 1), get(sources[0], 2, size=9), get(sources[1], 3)] == [1, 2, 3]
    assert [get(sources[0], 9), get(sources[0], 9, size=9), get(sources[1], 9)] == [1, 2, 3]
    (sources[0] / "b.bin").write_bytes(b"b")
    assert get(sources[0], 4) == 4 and len(names(folder)) == 3
    os.utime(sources[0] / "b.bin", ns=(1, 1))
    assert get(sources[0], 5) == 5 and len(names(folder)) == 3
    assert get(sources[0], 6, version="new decoder") == 6 and len(names(folder)) == 3
    assert [get(sources[0], 6, size=9), get(sources[1], 9)] == [6, 3]


def test_a_fingerprint_is_of_names_sizes_and_times(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    files = [tmp_path / "deep" / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(b"123")
        os.utime(file, ns=(5, 5))
    found = fingerprint(files)
    assert found == [str(tmp_path), [os.path.join("deep", "a"), 3, 5], ["b", 3, 5]]
    assert json.loads(json.dumps(found)) == found
    assert fingerprint([]) == [""]
    with pytest.raises(FileNotFoundError):
        fingerprint([tmp_path / "missing"])


def damage(how: str, entry: Path) -> None:
    path = entry / "x.npy"
    if how == "cut":
        os.truncate(path, 1000)
    elif how == "byte":
        with path.open("rb+") as file:
            file.seek(5000)
            file.write(b"!")
    elif how == "gone":
        path.unlink()
    elif how == "header":
        with path.open("rb+") as file:
            file.write(b"nothing like NumPy")
    elif how == "json":
        (entry / "entry.json").write_text('{"files": ')
    elif how == "other json":
        (entry / "entry.json").write_text("[1]")


@pytest.mark.parametrize("how", ["cut", "byte", "gone", "header", "json", "other json"])
def test_a_damaged_entry_is_made_again(how: str, folder: Path) -> None:
    fill = Filling()
    cached("set", {}, SHAPES, fill)
    (entry,) = names(folder)
    damage(how, folder / entry)
    assert (cached("set", {}, SHAPES, fill)["x"] == 7).all() and fill.count == 2
    assert (cached("set", {}, SHAPES, fill)["x"] == 7).all() and fill.count == 2
    assert names(folder) == [entry]


def test_of_a_large_entry_a_sample_is_checked_or_all_on_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CHEAP", 0)
    shapes = {"x": ((1 << 20,), "uint8")}
    count = 0

    def fill(arrays: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        arrays["x"][:] = 1

    cached("set", {}, shapes, fill)
    (entry,) = names(folder)
    for place, ask, expected in ((10_000, "0", 1), (10_000, "1", 2), (0, "0", 3), (1 << 20, "0", 4)):
        monkeypatch.setenv("ISOFED_CACHE_CHECK", ask)
        with (folder / entry / "x.npy").open("rb+") as file:
            file.seek(place)
            file.write(b"!")
        cached("set", {}, shapes, fill)
        assert count == expected


def test_what_fill_raises_comes_through_and_leaves_nothing(folder: Path) -> None:
    def fail(arrays: dict[str, Any]) -> None:
        raise OSError("the source")

    with pytest.raises(OSError, match="the source"):
        cached("set", {}, SHAPES, fail)
    assert names(folder) == []


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["reserve", "fsync", "rename", "room", "mkdir", "lock"])
def test_a_disk_that_refuses_gives_arrays_in_memory(where: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "reserve":
        monkeypatch.setattr(os, "posix_fallocate", full)
    elif where == "room":
        monkeypatch.setattr(cache, "RESERVE", 1 << 62)
    elif where == "mkdir":
        folder.write_text("a file where the folder should be")
    elif where == "lock":
        monkeypatch.setattr(os, "open", full)
    else:
        monkeypatch.setattr(os, where, full)
    fill = Filling()
    for count in (1, 2):
        arrays = cached("set", {}, SHAPES, fill)
        assert fill.count == count, "each time once, and once only"
        assert (arrays["x"] == 7).all() and arrays["y"].tolist() == list(range(100))
        torch.from_numpy(arrays["x"]).zero_()
    monkeypatch.undo()
    assert where == "mkdir" or names(folder) == []


def test_a_folder_that_may_not_be_written_is_still_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = Filling()
    cached("set", {}, SHAPES, fill)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    for name in ("open", "utime", "rename"):
        monkeypatch.setattr(os, name, refuse)
    assert (cached("set", {}, SHAPES, fill)["x"] == 7).all() and fill.count == 1
    assert (cached("set", {"new": 1}, SHAPES, fill)["x"] == 7).all() and fill.count == 2


def test_the_cache_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOFED_CACHE", "off")
    monkeypatch.chdir(tmp_path)
    fill = Filling()
    cached("set", {}, SHAPES, fill)
    cached("set", {}, SHAPES, fill)
    assert fill.count == 2 and names(tmp_path) == []


def test_the_default_folder_is_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISOFED_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cached("set", {}, SHAPES, Filling())
    assert len(names(tmp_path / "home" / ".cache" / "isofed" / "data")) == 1


def test_what_nobody_uses_is_removed_in_the_end(folder: Path) -> None:
    cached("set", {"n": 1}, SHAPES, Filling())
    cached("set", {"n": 2}, SHAPES, Filling())
    long_ago = time.time() - 100 * 86400
    for path in folder.glob("*/entry.json"):
        os.utime(path, (long_ago, long_ago))
    cached("set", {"n": 2}, SHAPES, Filling())
    cached("set", {"n": 3}, SHAPES, Filling())
    left = [json.loads(path.read_text())["about"]["n"] for path in folder.glob("*/entry.json")]
    assert sorted(left) == [2, 3]


def test_a_fill_may_use_the_cache_itself(folder: Path) -> None:
    inner = Filling()

    def outer(arrays: dict[str, Any]) -> None:
        for _ in range(2):
            arrays["x"][:] = cached("inner", {}, SHAPES, inner)["x"] + 1

    assert (cached("outer", {}, {"x": SHAPES["x"]}, outer)["x"] == 8).all()
    assert inner.count == 1 and len(names(folder)) == 2


@pytest.mark.parametrize(("kind", "shapes"), [("a/b", SHAPES), ("set", {"../x": ((1,), "uint8")})])
def test_names_that_are_paths_are_refused(kind: str, shapes: Any) -> None:
    with pytest.raises(ValueError, match="plain words"):
        cached(kind, {}, shapes, Filling())


def test_python_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="Python objects"):
        cached("set", {}, {"x": ((1,), "O")}, Filling())


# Several at once


def test_threads_that_ask_at_once_fill_once() -> None:
    fill, found = Filling(), []

    def slowly(arrays: dict[str, Any]) -> None:
        time.sleep(0.05)
        fill(arrays)

    threads = [
        threading.Thread(target=lambda: found.append(cached("set", {}, SHAPES, slowly)["x"].sum())) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fill.count == 1 and found == [7 * 100 * 8 * 8 * 3] * 6


ONE_OF_MANY = """
import os, pathlib, sys, time
from isofed.data.cache import cached

folder = pathlib.Path(sys.argv[1])

def fill(arrays):
    (folder / f"filled-{os.getpid()}").touch()
    time.sleep(0.3)
    arrays["x"][:] = 7

(folder / f"ready-{os.getpid()}").touch()
while not (folder / "begin").exists():
    time.sleep(0.001)
print(int(cached("set", {}, {"x": ((100,), "uint8")}, fill)["x"].sum()))
"""


def test_processes_that_start_at_once_fill_once(tmp_path: Path, folder: Path) -> None:
    command = [sys.executable, "-c", ONE_OF_MANY, str(tmp_path)]
    processes = [subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) for _ in range(4)]
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 4)
    (tmp_path / "begin").touch()
    assert [process.communicate(timeout=60)[0] for process in processes] == ["700\n"] * 4
    assert len(list(tmp_path.glob("filled-*"))) == 1
    assert len(names(folder)) == 1, "no lock and no temporary folder is left"


CHILD = """
import sys, time, pathlib
from isofed.data.cache import cached

def fill(arrays):
    arrays["x"][:50] = 7
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(60)

cached(sys.argv[2], {}, {"x": ((100, 8, 8, 3), "uint8"), "y": ((100,), "int64"), "none": ((0, 4), "float32")}, fill)
"""


@pytest.mark.parametrize("kind", ["set", "another.set-1"])
def test_a_process_killed_in_fill_leaves_nothing_that_counts(kind: str, tmp_path: Path, folder: Path) -> None:
    flag = tmp_path / "flag"
    with subprocess.Popen([sys.executable, "-c", CHILD, str(flag), kind], env=environment()) as process:
        wait_for(lambda: flag.exists() or process.poll() is not None)
        left = names(folder)
        # While it lives, nobody takes its half-made folder away.
        cached("third", {}, SHAPES, Filling())
        assert set(left) < set(names(folder))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert sorted(name.rpartition(".")[2] for name in left) == ["lock", "tmp"]
    fill = Filling()
    assert (cached("set", {}, SHAPES, fill)["x"] == 7).all() and fill.count == 1
    assert (cached("set", {}, SHAPES, fill)["x"] == 7).all() and fill.count == 1
    assert len(names(folder)) == 2 and not any(name.startswith(".") for name in names(folder))


def test_who_waits_for_a_process_that_is_killed_does_its_work(tmp_path: Path) -> None:
    flag, fill, found = tmp_path / "flag", Filling(), []
    with subprocess.Popen([sys.executable, "-c", CHILD, str(flag), "set"], env=environment()) as process:
        wait_for(lambda: flag.exists() or process.poll() is not None)
        waiting = threading.Thread(target=lambda: found.append(cached("set", {}, SHAPES, fill)["x"].sum()))
        waiting.start()
        time.sleep(0.1)
        assert waiting.is_alive() and fill.count == 0
        process.kill()
        process.wait()
    waiting.join(timeout=30)
    assert found == [7 * 100 * 8 * 8 * 3] and fill.count == 1


def wait_for(happened: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.01)


# A folder of pictures


def test_a_folder_of_pictures_is_decoded_once(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for number in range(20):
        path = tmp_path / "pets" / f"{('photo', 'sketch')[number % 2]}" / f"class-{number % 4 // 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(path)
    root = str(tmp_path / "pets")
    plain = load(root)
    assert not folder.exists(), "a few small pictures are not worth an entry"
    monkeypatch.setattr(items, "WORTH_KEEPING", 0)
    told: list[int] = []
    first = load(root, progress=lambda done, total: told.append(done))
    assert told == [20] and len(names(folder)) == 1
    with monkeypatch.context() as patch:
        patch.setattr(items, "decode", None)  # nothing is decoded in here
        assert plain.fingerprint == first.fingerprint == load(root).fingerprint
        assert (plain.mean, plain.std) == (load(root).mean, load(root).std)
    Image.new("RGB", (6, 6)).save(path)
    changed = load(root)
    assert changed.fingerprint != first.fingerprint and len(names(folder)) == 1
    assert load(f"{root}:size=5").shape == (3, 5, 5) and len(names(folder)) == 2
