"""A folder with files, data and methods that are wrong in all ways the commands are tried with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

METHODS = '''
from dataclasses import dataclass

from isofed import Method


@dataclass(frozen=True)
class Broken(Method):
    """Some clients' losses become NaN, in some rounds."""

    client: int = 1
    first: int = 2
    everyone: bool = False

    def end(self, visit):
        if (self.everyone or visit.client == self.client) and visit.round >= self.first:
            visit.update = visit.update * float("nan")


@dataclass(frozen=True)
class LossIsNan(Method):
    """The loss of a client with a single sample is NaN."""

    def loss(self, step):
        return step.logits.sum() * float("nan") if int(step.label_counts.sum()) == 1 else None


@dataclass(frozen=True)
class Raises(Method):
    """A mistake in a method, with signs in its message that mean something to a terminal library."""

    def begin(self, visit):
        if visit.client == 0:
            raise ValueError("no [/bold] idea [red]")


@dataclass(frozen=True)
class ServerDiverges(Method):
    """A server step that breaks its own state before it breaks the weights."""

    def server_state(self, run):
        return {"sum": run.zeros()}

    def aggregate(self, round):
        round.server["sum"].add_(1)
        if round.number == 3:
            round.update = round.update * float("inf")


@dataclass(frozen=True)
class ServerRaises(Method):
    def aggregate(self, round):
        raise ZeroDivisionError("nothing to divide by")


@dataclass(frozen=True)
class Refuses(Method):
    def check(self, settings):
        raise ValueError("it wants a larger batch")


@dataclass(frozen=True)
class WithoutDecorator(Method):
    def begin(self, visit):
        pass


class Forgotten(Method):
    strength: float = 1.0


not_a_class = 3
'''


@pytest.fixture(scope="session")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the commands of these tests name."""
    folder = tmp_path_factory.mktemp("input")
    (folder / "methods.py").write_text(METHODS)
    (folder / "broken.py").write_text("this is no Python\n")
    (folder / "file").write_text("a file\n")
    (folder / "empty").mkdir()
    (folder / "list.yaml").write_text("- fedavg\n")
    (folder / "bad.yaml").write_text("lr: [0.1\n")
    (folder / "unknown.yaml").write_text("learning_rate: 0.1\n")
    (folder / "good.yaml").write_text("lr: 0.2\nmethod: [fedprox: {mu: 0.1}]\nclients: 2\n")
    (folder / "twice.json").write_text("[[0, 1, 2], [2, 3]]")
    (folder / "beyond.json").write_text("[[0, 1, 2], [5000]]")
    (folder / "text.json").write_text("no JSON")

    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (40, 4, 4), dtype=np.uint8)
    np.savez(folder / "good.npz", images=images, labels=np.arange(40) % 4)
    gap = np.arange(40) % 4
    gap[gap == 2] = 3
    np.savez(folder / "gap.npz", images=images, labels=gap)
    missing: dict[str, Any] = {
        "x_train": images[:30],
        "y_train": np.arange(30) % 2,
        "x_test": images[30:],
        "y_test": np.arange(10) % 3,
    }
    np.savez(folder / "gap-in-training.npz", **missing)
    whole = (folder / "good.npz").read_bytes()
    (folder / "truncated.npz").write_bytes(whole[: len(whole) // 2])
    np.savez(folder / "short.npz", images=images, labels=np.arange(39))
    bad = rng.standard_normal((40, 4, 4)).astype(np.float32)
    bad[3, 0, 0] = np.nan
    np.savez(folder / "nan.npz", images=bad, labels=np.arange(40) % 4)

    for label in ("cat", "dog"):
        (folder / "pictures" / label).mkdir(parents=True)
        for n in range(10):
            pixels = rng.integers(0, 255, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "pictures" / label / f"{n}.png")
    shutil.copytree(folder / "pictures", folder / "one-broken")
    (folder / "one-broken" / "dog" / "3.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")
    return folder
