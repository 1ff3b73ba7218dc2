"""What is measured after a run that belongs to a paper: what it says, and what becomes of the run if it fails."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from isofed.diagnose import Diagnosis
from isofed.errors import NotFinite
from isofed.papers.results import Results
from isofed.papers.runner import run
from isofed.papers.show import Progress

from .made import cell, jobs
from .test_runner import FOREVER, Heard


def test_a_diagnosis_without_memory_is_named_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB.")

    monkeypatch.setattr(Diagnosis, "measure", measure)
    todo, heard = jobs(cell("FedUV", diagnose={"only": "curvature"}), cell()), Heard()
    outcome = run(todo, Results(tmp_path / "r"), tmp_path / "runs", FOREVER, heard)
    assert outcome.finished == 1 and outcome.missing == 1
    (why,) = heard.failures
    assert why.startswith("the run is finished but cannot be diagnosed: the GPU has no memory left") and "\n" not in why


def test_a_diagnosis_that_is_not_finite_is_a_result_and_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def measure(run: Diagnosis, section: str, *_: Any) -> Any:
        tries.append(section)
        raise NotFinite("second derivatives that are not finite")

    monkeypatch.setattr(Diagnosis, "measure", measure)
    columns = {"IID": "accuracy", "IID;H_T": "H_T"}
    todo, heard = jobs(cell(measures=columns, diagnose={"only": "curvature"})), Heard()
    outcome = run(todo, Results(tmp_path / "r"), tmp_path / "runs", FOREVER, heard)
    assert outcome.finished == 1 and outcome.missing == 0 and heard.failures == []
    assert heard.notes == [f"curvature of {todo[0]} is left out: second derivatives that are not finite"]
    found = Results(tmp_path / "r").of(todo[0])
    assert found is not None and found.measures["accuracy"] is not None and found.measures["H_T"] is None
    assert found.content["not_finite"] == {"curvature": "second derivatives that are not finite"}
    again = run(todo, Results(tmp_path / "r"), tmp_path / "runs", FOREVER, Heard())
    assert again.finished == 0 and again.missing == 0 and tries == ["curvature"]


def test_what_cannot_be_diagnosed_is_named_and_the_others_run(tmp_path: Path) -> None:
    # A t-SNE of the three pictures that there are, which is refused.
    few = {"data": "synthetic:samples=200,test=3,classes=4,size=4"}
    odd = cell("FedUV", few, diagnose={"only": "tsne"})
    heard = Heard()
    outcome = run(jobs(odd, cell()), Results(tmp_path / "r"), tmp_path / "runs", FOREVER, heard)
    assert outcome.finished == 1 and outcome.missing == 1
    (why,) = heard.failures
    assert why.startswith("the run is finished but cannot be diagnosed: a t-SNE needs") and "\n" not in why


def test_how_far_a_measurement_has_come_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watcher = Progress(Console(file=said, width=100))
    (job,) = jobs(cell())
    watcher.cell(1, 1, job)
    for now[0], done in [(1, 0), (5, 10), (32, 50), (40, 80), (70, 100)]:
        watcher.diagnosing("curvature", done, 200)
    assert [line.strip() for line in said.getvalue().splitlines()[1:]] == [
        "measuring: curvature",
        "measuring: curvature, 25 %, at most 1:33 left of it",
        "measuring: curvature, 50 %, at most 1:09 left of it",
    ]
