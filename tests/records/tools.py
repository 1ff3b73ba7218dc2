"""Run folders and states whose content tells whether they are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from isofed.records import RunFolder, environment

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
