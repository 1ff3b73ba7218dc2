"""Logging to TensorBoard: what is logged, after an interruption too, and what is said when it is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from isofed.errors import UserError
from isofed.federation import Federation
from isofed.progress import Watcher
from isofed.tracking import check, scalars
from tests.engine.plain import small
from tests.run_tools import Stop

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed (the extra 'track')"
)


def test_scalars_of_a_record() -> None:
    line = {
        "round": 3, "accuracy": 0.5, "loss": None, "class_accuracy": [0.1, 0.9], "events": [], "part": "test",
        "domain_accuracy": {"art": 0.25}, "client_accuracy": {"0": 1.0}, "alignment": {"cosine": 0.75},
        "drift": {"distance": [1.0, 3.0], "angle": [90.0], "clients": [0, 1]},
    }  # fmt: skip
    assert scalars(line) == {
        "accuracy": 0.5, "domain_accuracy/art": 0.25, "alignment/cosine": 0.75, "drift/distance": 2.0,
        "drift/angle": 90.0,
    }  # fmt: skip


def test_without_the_package_one_sentence_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"track=tensorboard needs TensorBoard: pip install 'tensorboard>="):
        small(track="tensorboard", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    check("none", recorded=False)


@needs_tensorboard
def test_it_needs_a_run_folder() -> None:
    with pytest.raises(UserError, match="say where that is with out="):
        small(track="tensorboard")


def logged(run: Path) -> dict[str, list[tuple[int, float]]]:
    """All values by name, as TensorBoard would show them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@needs_tensorboard
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what TensorBoard imports
def test_rounds_and_diagnostics_are_logged_and_heard(tmp_path: Path) -> None:
    heard: list[int] = []

    class Listener(Watcher):
        def round(self, line: dict[str, Any]) -> None:
            heard.append(line["round"])

    run = small(rounds=4, diagnose="every:2", track="tensorboard", out=tmp_path / "run")
    result = run.fit(Listener())
    assert heard == [1, 2, 3, 4]
    found = logged(tmp_path / "run")
    wanted: Any = [(line["round"], pytest.approx(line["accuracy"])) for line in result.history]
    assert found["round/accuracy"] == wanted
    significant = [(line["round"], float(line["significant"])) for line in run.diagnostics]
    assert found["diagnostics/significant"] == significant and len(significant) == 2


@needs_tensorboard
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_that_is_taken_up_goes_on_in_the_same_chart(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 5, "track": "tensorboard", "out": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        small(**settings).fit(Stop(3))
    # As if killed before its checkpoint: what was logged of round 3 counts no more.
    (tmp_path / "run" / "checkpoints" / "round-000003.safetensors").unlink()
    result = Federation.resume(tmp_path / "run").fit()
    wanted: Any = [(line["round"], pytest.approx(line["accuracy"])) for line in result.history]
    assert logged(tmp_path / "run")["round/accuracy"] == wanted
