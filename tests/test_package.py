"""What importing the package costs, what it offers, and that every setting of the specification is there."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

import isofed
from isofed.config import Settings, settings
from tests.cli_tools import environment, succeeds

HEAVY = ("flwr", "matplotlib", "sklearn", "plotly", "ray", "tensorboard", "pandas", "PIL")

SPECIFIED = """
    method data root partition clients participation weighting rounds local_epochs local_steps batch_size lr
    lr_schedule momentum nesterov persistent_momentum weight_decay clip last_batch augment validation model norm seed
    device executor workers slots actors precision deterministic evaluate_every target diagnose track keep keep_clients
"""


def modules_after(code: str) -> set[str]:
    """Top-level modules that are loaded after some code, in a new interpreter."""
    show = "\nimport sys; print(' '.join(sorted({name.partition('.')[0] for name in sys.modules})))"
    command = [sys.executable, "-c", code + show]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_isofed_loads_nothing_heavy() -> None:
    assert not modules_after("import isofed") & {*HEAVY, "torch", "numpy", "rich", "typer"}
    assert not modules_after("import isofed.cli") & {*HEAVY, "torch", "numpy"}
    assert not modules_after("import isofed\nisofed.Federation, isofed.Method") & set(HEAVY)


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["--version"]], ids=" ".join)
def test_help_and_version_do_not_wait_for_torch(words: list[str]) -> None:
    lines = ["import sys", "from isofed.cli import main", f"sys.argv = ['isofed', *{words}]"]
    lines += ["try:", "    main()", "except SystemExit:", "    pass"]
    assert not modules_after("\n".join(lines)) & {*HEAVY, "torch", "numpy"}


def test_help_starts_quickly() -> None:
    """Against an interpreter that does nothing, so that a busy machine makes no difference."""

    def seconds(*command: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, *command], env=environment(), capture_output=True, timeout=60, check=True)
        return time.perf_counter() - began

    nothing = min(seconds("-c", "pass") for _ in range(3))
    torch = seconds("-c", "import torch")
    assert min(seconds("-m", "isofed.cli", "--help") for _ in range(3)) < nothing + 0.7 * torch


def test_the_public_names() -> None:
    public = {"Federation", "Method", "Result", "RunError", "UserError", "compare", "tune", "__version__"}
    assert set(isofed.__all__) == public
    assert public <= set(dir(isofed)) and not {"Any", "TYPE_CHECKING", "annotations"} & set(dir(isofed))
    assert not hasattr(isofed, "Any") and callable(isofed.compare) and callable(isofed.tune)
    for name in isofed.__all__:
        assert getattr(isofed, name) is not None
    told = "import isofed; print(isofed.data.load('synthetic:samples=80,test=40').name, isofed.functional.uniformity)"
    done = subprocess.run([sys.executable, "-c", told], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.startswith("synthetic <function ")
    with pytest.raises(AttributeError, match="'nothing'"):
        isofed.nothing  # noqa: B018
    assert issubclass(isofed.UserError, ValueError) and issubclass(isofed.RunError, RuntimeError)


def test_every_setting_of_the_specification_exists() -> None:
    assert set(SPECIFIED.split()) <= set(Settings.model_fields)
    listed = {line.split(" ")[0] for line in succeeds("settings").splitlines()}
    assert {*SPECIFIED.split(), "out"} <= listed


def test_a_configuration_survives_writing_and_reading() -> None:
    values = {
        "method": "fedprox:mu=0.3+fedavgm",
        "clients": "7",
        "lr": "1e-5",
        "lr_schedule": "step:every=3,factor=0.5",
        "nesterov": "yes",
        "clip": 2,
        "root": None,
    }
    made = settings(values)
    assert settings(made.to_dict()).to_dict() == made.to_dict()
    assert (made.clients, made.lr, made.nesterov, made.clip) == (7, 1e-5, True, 2.0)
    assert str(made.method) == "fedprox:mu=0.3+fedavgm"


def test_python_and_the_command_line_make_the_same_run(tmp_path) -> None:
    import torch

    from isofed.files import load_tensors

    words: dict[str, Any] = {"data": "synthetic:samples=60,test=20", "model": "mlp", "clients": 2, "partition": "iid"}
    words["rounds"] = 2
    found = isofed.Federation(**words, method="fedprox:mu=0.5").fit()
    assert found.rounds == 2 and found.folder is None and len(found.history) == 2
    given = [f"{key}={value}" for key, value in words.items()]
    succeeds("run", *given, "method=fedprox:mu=0.5", f"out={tmp_path / 'run'}")
    recorded, _ = load_tensors(tmp_path / "run" / "model.safetensors")
    assert set(recorded) == set(found.weights)
    assert all(torch.equal(value, found.weights[name]) for name, value in recorded.items())
