"""Whole runs whose clients remember: the same whatever is in memory, and nothing wrong from damaged or full disks."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from isofed import store
from isofed.errors import RunError
from isofed.federation import Federation
from isofed.files import Tensors, load_tensors, save_tensors
from isofed.store import Remembered
from tests.engine.plain import small
from tests.run_tools import Stop, content, numbers
from tests.store.tools import in_python, same

MANY: dict[str, Any] = {"clients": 12, "participation": 0.25, "partition": "iid", "rounds": 8, "local_epochs": 1}


@pytest.mark.parametrize("method", ["scaffold", "fedbn", "moon:head=none", "feddyn+fedbn"])
def test_a_run_does_not_depend_on_what_is_in_memory(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = MANY | {"method": method, "model": "cnn"}
    whole = small(**settings)
    whole.fit()
    assert 3 < len(whole.state.clients) <= 12
    out = tmp_path / "run"
    for hot, settings["out"] in ((0, None), (2000, out)):
        monkeypatch.setattr(store, "HOT", hot)
        run = small(**settings)
        run.fit()
        assert (content(run), numbers(run)) == (content(whole), numbers(whole))
        assert run.state.clients._store._held <= hot
    index = {k.removeprefix("clients/"): v for k, v in newest(out).items() if k.startswith("clients/")}
    again = Remembered.restored(index, 12, out / "checkpoints" / "clients.bin")
    assert list(again) == list(run.state.clients)
    assert all(same(again[client], state) for client, state in run.state.clients.items())


def newest(run: Path) -> Tensors:
    return load_tensors(max((run / "checkpoints").glob("*.safetensors")))[0]


@pytest.mark.parametrize("inside", [True, False])
def test_an_interrupted_run_goes_on_in_the_same_process_and_in_another(
    inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = MANY | {"method": "scaffold", "participation": 0.5}
    whole = small(**settings)
    whole.fit()
    monkeypatch.setattr(store, "HOT", 2000)
    for out in (None, tmp_path / "run"):
        run = small(**settings, out=out)
        for rounds in (2, 3):
            with pytest.raises(KeyboardInterrupt):
                run.fit(Stop(rounds, inside))
        assert run.round == 5
        if out:
            run = Federation.resume(out)
        run.fit()
        assert (content(run), numbers(run)) == (content(whole), numbers(whole))


def test_the_checkpoint_before_is_whole_after_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = MANY | {"method": "scaffold"}
    whole = small(**settings)
    whole.fit()
    monkeypatch.setattr(store, "HOT", 5000)
    monkeypatch.setattr("isofed.federation.CHECKPOINT_SHARE", 1e9)
    out = tmp_path / "run"
    small(**settings, out=out)
    for reached in (3, 5, 7):  # on by three rounds and back by one, again and again
        run = Federation.resume(out)
        with pytest.raises(KeyboardInterrupt):
            run.fit(Stop(3))
        assert run.round == reached
        max((out / "checkpoints").glob("*.safetensors")).unlink()
    run = Federation.resume(out)
    run.fit()
    assert (content(run), numbers(run)) == (content(whole), numbers(whole))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("method", ["scaffold", "fedbn"])
@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
def test_a_damaged_file_is_one_sentence_and_no_wrong_result(how: str, method: str, tmp_path: Path) -> None:
    settings = MANY | {"method": method, "model": "cnn", "participation": 1.0, "rounds": 6}
    with pytest.raises(KeyboardInterrupt):
        small(**settings, out=tmp_path / "run").fit(Stop(2))
    file = tmp_path / "run" / "checkpoints" / "clients.bin"
    visited, table = newest(tmp_path / "run")["clients/visited"], newest(tmp_path / "run")["clients/table"]
    offset, _, length, _ = table[visited[1, 7]].tolist()
    assert visited[0, 7] == 7
    if how == "missing":
        file.unlink()
    elif how == "cut":
        os.truncate(file, offset + length - 100)
    else:
        flip(file, offset + length // 2)
    with pytest.raises(RunError) as error:
        Federation.resume(tmp_path / "run").fit()
    said = str(error.value)
    assert str(file) in said and "another out=" in said and "\n" not in said
    if how == "flipped":
        assert "what client 7 remembers is lost" in said
    assert [line["round"] for line in Federation.resume(tmp_path / "run").folder.metrics()] == [1, 2]  # type: ignore[union-attr]


@pytest.mark.parametrize("out", [True, False])
def test_a_full_disk_is_one_sentence_and_loses_nothing(
    out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = MANY | {"method": "scaffold"}
    whole = small(**settings)
    whole.fit()
    run = small(**settings, out=tmp_path / "run" if out else None)
    monkeypatch.setattr(store, "HOT", 5000)
    real, left = os.pwritev, [12]

    def full(file: int, data: Any, offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, [data[0][:1000]], offset)  # and it takes a little at a time

    in_python(monkeypatch)
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(RunError) as error:
        run.fit()
    assert str(error.value).endswith("the disk or the quota is full; nothing already written is lost")
    left[0] = 1 << 30
    run.fit()
    assert (content(run), numbers(run)) == (content(whole), numbers(whole))


def test_a_checkpoint_of_an_older_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        small(**MANY, out=tmp_path / "run").fit(Stop(1))
    (path,) = (tmp_path / "run" / "checkpoints").glob("*.safetensors")
    tensors = {k: v for k, v in load_tensors(path)[0].items() if not k.startswith("clients/")}
    save_tensors(path, tensors, {"visited": []})
    with pytest.raises(RunError, match="is of an older version of isofed; start a new run"):
        Federation.resume(tmp_path / "run").fit()


def test_a_run_without_client_state_makes_no_file(tmp_path: Path) -> None:
    run = small(**MANY, out=tmp_path / "run")
    run.fit()
    assert all(state == {} for state in run.state.clients.values()) and len(run.state.clients) > 3
    assert not (tmp_path / "run" / "checkpoints" / "clients.bin").exists()
