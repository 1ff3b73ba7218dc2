"""A sample of ``make fuzz``, and every input that once failed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from isofed.errors import RunError, UserError
from isofed.federation import Federation
from isofed.files import load_tensors, save_tensors
from isofed.progress import Watcher
from tests.engine.plain import small
from tests.fuzz.run import FOUND, inputs, problem
from tests.fuzz.targets import Target, every

KEPT = sorted(path.name for path in FOUND.glob("*-*"))


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return every(tmp_path_factory.mktemp("fuzz") / "targets")


@pytest.mark.parametrize(
    ("name", "count"),
    [("method", 300), ("configuration", 300), ("run folder", 100), ("checkpoint", 200), ("table", 200)],
)
def test_no_input_ends_in_anything_but_a_sentence(name: str, count: int, targets: dict[str, Target]) -> None:
    for data in inputs(name, targets[name], count, seed=1):
        assert problem(targets[name], data) is None, data


@pytest.mark.parametrize("kept", KEPT)
def test_what_once_failed_does_so_no_more(kept: str, targets: dict[str, Target]) -> None:
    name = kept.rpartition("-")[0].replace("-", " ")
    assert problem(targets[name], (FOUND / kept).read_bytes()) is None


FAR = torch.full((2, 4), 2**62)
ALTERED: dict[str, tuple[str, Any]] = {  # a tensor of a checkpoint, and what it becomes; none: it is missing
    "no weights": ("weights", None),
    "weights of another type": ("weights", lambda t: t.double()),
    "no clients": ("clients/visited", None),
    "clients that do not exist": ("clients/visited", lambda t: FAR[:, : t.shape[1]]),
    "clients before the first": ("clients/visited", lambda t: -FAR[:, : t.shape[1]]),
    "clients in one row": ("clients/visited", lambda t: t.reshape(-1)),
    "clients of another type": ("clients/visited", lambda t: t.bfloat16()),
    "a table without rows": ("clients/table", lambda t: torch.zeros((), dtype=torch.int64)),
    "a table of huge states": ("clients/table", lambda t: FAR[:1].expand(len(t), 4).contiguous()),
    "a table of states before the file": ("clients/table", lambda t: torch.full_like(t, -1)),
    "slots that do not exist": ("clients/before", lambda t: torch.tensor([2**62])),
    "a server that remembers too little": ("server/scaffold.c", None),
    "a server that remembers something else": ("server/scaffold.c", lambda t: t[:1].clone()),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that can be taken up again."""
    run = small(method="scaffold", rounds=1, out=tmp_path_factory.mktemp("stopped") / "run")
    run.fit()
    assert run.folder is not None
    (run.folder.path / "result.json").unlink()
    return run.folder.path


@pytest.mark.parametrize("case", ALTERED)
def test_a_whole_checkpoint_with_the_wrong_tensors_is_refused(case: str, stopped: Path) -> None:
    file = stopped / "checkpoints" / "round-000001.safetensors"
    whole, (tensors, info) = file.read_bytes(), load_tensors(file)
    name, change = ALTERED[case]
    value = tensors.pop(name)
    if change is not None:
        tensors[name] = change(value)
    try:
        save_tensors(file, tensors, info)
        with pytest.raises(RunError, match="belongs to another|does not belong to this run|start a new run"):
            Federation.resume(stopped).fit()
    finally:
        file.write_bytes(whole)


def test_a_state_longer_than_its_file_is_lost_without_making_room_for_it(stopped: Path) -> None:
    file = stopped / "checkpoints" / "round-000001.safetensors"
    whole, (tensors, info) = file.read_bytes(), load_tensors(file)
    tensors["clients/table"][:, 1:3] = 2**50
    try:
        save_tensors(file, tensors, info)
        run = Federation.resume(stopped)
        run._take_up(Watcher())
        with pytest.raises(RunError, match="what client 0 remembers is lost, because .*clients.bin is damaged there"):
            run.state.clients[0]
    finally:
        file.write_bytes(whole)


def test_valid_inputs_are_taken_and_others_are_noticed(targets: dict[str, Target]) -> None:
    targets["method"].take(b"fedprox:mu=0.1+fedbn")
    with pytest.raises(UserError):
        targets["method"].take(b"fedprox:mu=x")
    same = [list(inputs("method", targets["method"], 5, seed)) for seed in (1, 1, 2)]
    assert same[0] == same[1] != same[2]

    def crash(data: bytes) -> None:
        raise KeyError("inside")

    found = problem(Target(lambda rng: b"", crash), b"")
    assert found is not None and found.startswith("KeyError: 'inside' (test_fuzz.py")
    assert problem(Target(lambda rng: rng.randbytes(1), lambda data: None), random.Random(0).randbytes(1)) is None
    assert Path(FOUND).is_dir()
