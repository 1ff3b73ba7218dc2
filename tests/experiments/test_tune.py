"""Tuning from the command line: chosen on held-out data, judged on the test part, taken up again."""

from __future__ import annotations

import json
import math
import signal
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from isofed.config import settings
from isofed.engine.world import World
from isofed.errors import UserError
from isofed.experiments import apply_point
from tests.cli_tools import complaint, config, everything, isofed, metrics, model, result, start, succeeds
from tests.experiments.tools import MINE, TUNE


def tuned(root: Path, *words: str, cwd: Path | None = None) -> tuple[dict[str, Any], str]:
    out = succeeds("tune", *words, f"out={root}", cwd=cwd)
    return json.loads((root / "tuning.json").read_text()), out


def trials_of(root: Path) -> list[Path]:
    return [p.parent for p in root.rglob("result.json") if "chosen" not in p.relative_to(root).parts]


def test_a_grid_is_judged_on_validation_and_the_best_on_test(tmp_path: Path) -> None:
    root = tmp_path / "tune"
    table, out = tuned(root, "fedprox", "lr=0.001,0.05", "fedprox.mu=0.01,1", *TUNE, "seeds=2", "validation=0.25")
    trials = trials_of(root)
    assert len(trials) == 8
    means: dict[str, float] = {}
    for lr, mu in product(("0.001", "0.05"), ("0.01", "1")):
        mine = [
            t
            for t in trials
            if config(t)["lr"] == float(lr) and config(t)["method"] == [{"fedprox": {"mu": float(mu)}}]
        ]
        assert sorted(config(t)["seed"] for t in mine) == [0, 1]
        means[f"lr={lr} fedprox.mu={mu}"] = float(np.mean([metrics(t)[-1]["accuracy"] for t in mine]))
    shown = {row["setting"]: row for row in table["rows"]}
    assert list(shown) == list(means)  # in the order of the grid
    for setting, mean in means.items():
        assert shown[setting]["validation_accuracy"] == pytest.approx(mean, abs=1e-12)
        assert f"{100 * mean:.1f}" in next(line for line in out.splitlines() if line.startswith(setting))
    best = max(means, key=lambda s: means[s])
    assert table["chosen"] == best and [r["setting"] for r in table["rows"] if r["chosen"]] == [best]
    assert f"chosen: {best};" in out

    for trial in trials:  # nothing in a trial knows the test part
        record = result(trial)
        assert record["accuracy"] == record["validation_accuracy"] == metrics(trial)[-1]["accuracy"]
        assert config(trial)["final_test"] is False and config(trial)["validation"] == 0.25
        assert record["accuracy"] * 50 == pytest.approx(round(record["accuracy"] * 50), abs=1e-9)

    finals = [p.parent for p in (root / "chosen").rglob("result.json")]
    assert sorted(config(f)["seed"] for f in finals) == [0, 1]
    for final in finals:
        assert config(final)["validation"] == 0 and f"lr={config(final)['lr']:g}" in best
        assert result(final)["validation_accuracy"] is None
        assert metrics(final)[-1]["samples"] == 200  # trained on the whole training part
    accuracy = np.array([result(f)["accuracy"] for f in finals])
    assert table["test_accuracy"] == pytest.approx(accuracy.mean())
    shown_test = f"{100 * accuracy.mean():.1f} ± {100 * accuracy.std(ddof=1):.1f} %"
    assert shown_test in " ".join(out.split())


def test_the_choice_does_not_see_the_test_part(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    centres = rng.integers(60, 190, (3, 4, 4))
    labels = np.arange(150) % 3
    images = (centres[labels] + rng.normal(0, 60, (150, 4, 4))).clip(0, 255).astype(np.uint8)
    parts: dict[str, Any] = {
        "x_train": images[:110],
        "y_train": labels[:110],
        "x_test": images[110:],
        "y_test": labels[110:],
    }
    np.savez(tmp_path / "right.npz", **parts)
    np.savez(tmp_path / "wrong.npz", **parts | {"y_test": (labels[110:] + 1) % 3, "x_test": 255 - images[110:]})
    words = ("model=mlp", "partition=iid", "clients=2", "rounds=3", "executor=serial", "seeds=2")
    made = [
        tuned(tmp_path / name, "fedavg", "lr=0.0001,0.03,0.3", f"data={tmp_path / name}.npz", *words)[0]
        for name in ("right", "wrong")
    ]
    assert made[0]["rows"] == made[1]["rows"] and made[0]["chosen"] == made[1]["chosen"]
    assert made[0]["test_accuracy"] != made[1]["test_accuracy"]
    for trial in trials_of(tmp_path / "right"):
        twin = tmp_path / "wrong" / trial.relative_to(tmp_path / "right")
        assert model(trial) == model(twin)
        assert [line["accuracy"] for line in metrics(trial)] == [line["accuracy"] for line in metrics(twin)]


def test_a_killed_tuning_goes_on_and_a_finished_one_stays(tmp_path: Path) -> None:
    words = ("fedavg", "lr=0.01,0.05,0.1", *TUNE, "rounds=20")
    whole, _ = tuned(tmp_path / "whole", *words)
    root = tmp_path / "tune"
    command = start("tune", *words, f"out={root}")
    command.when(lambda: len(list(root.rglob("result.json"))) == 2)
    assert command.kill().code == -signal.SIGKILL
    table, first = tuned(root, *words)
    assert table == whole
    before = {k: v for k, v in everything(root).items() if not k.startswith("tuning.")}
    again, second = tuned(root, *words)
    assert again == whole and second[second.index("\nsetting") :] == first[first.index("\nsetting") :]
    assert {k: v for k, v in everything(root).items() if not k.startswith("tuning.")} == before
    said = complaint(isofed("tune", *words, "batch_size=16", f"out={root}"), 2)
    assert "batch_size" in said and "out=" in said


def test_ones_own_method_can_be_tuned(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    table, _ = tuned(tmp_path / "tune", "mine.py:Mine", "lr=0.01,0.1", *TUNE, "rounds=2", cwd=tmp_path)
    assert [row["setting"] for row in table["rows"]] == ["lr=0.01", "lr=0.1"]
    assert all("mine.py:Mine" in result(t)["method"] for t in trials_of(tmp_path / "tune"))


def test_a_tuning_from_a_file(tmp_path: Path) -> None:
    values: dict[str, Any] = dict(word.split("=", 1) for word in TUNE)
    values |= {"rounds": 2, "lr": [0.01, 0.1], "method": "fedprox"}
    for name in ("grid.yaml", "grid.yml"):
        (tmp_path / name).write_text(yaml.safe_dump(values | {"fedprox.mu": [0.1, 1]}, sort_keys=False))
        table, _ = tuned(tmp_path / name.replace(".", "-"), name, cwd=tmp_path)
        assert [row["setting"] for row in table["rows"]] == [
            f"lr={lr} fedprox.mu={mu}" for lr in (0.01, 0.1) for mu in (0.1, 1)
        ]


def test_a_split_of_ones_own_is_kept_while_tuning(tmp_path: Path) -> None:
    """Sample numbers mean the samples of the training part, also while some of them are held out to choose by."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (60, 4, 4), dtype=np.uint8)
    parts: dict[str, Any] = {
        "x_train": images[:50],
        "y_train": np.arange(50) % 2,
        "x_test": images[50:],
        "y_test": np.arange(10) % 2,
    }
    np.savez(tmp_path / "data.npz", **parts)
    sites = [list(range(0, 20)), list(range(20, 50))]
    (tmp_path / "sites.json").write_text(json.dumps(sites))
    words = (f"data={tmp_path / 'data.npz'}", f"partition=from_file:{tmp_path / 'sites.json'}", "model=mlp", "rounds=1")
    tuned(tmp_path / "tune", "fedavg", "lr=0.01,0.1", "validation=0.2", "executor=serial", *words)
    world = World.create(settings(config(trials_of(tmp_path / "tune")[0])))
    held = world.parts["train"].images[..., 0].numpy()
    assert sum(map(len, world.clients)) == 40
    for site, places in zip(sites, world.clients, strict=True):
        known = {images[number].tobytes() for number in site}
        assert len(places) and all(held[place].tobytes() in known for place in places)


def test_a_point_of_the_grid_that_fails_is_not_chosen(tmp_path: Path) -> None:
    done = isofed("tune", "fedavg", "lr=0.05,1e30", *TUNE, "rounds=2", "seeds=2", f"out={tmp_path / 'tune'}")
    said = complaint(done, 1)
    assert "2 of the runs" in said and "lr=1e30" in said
    table = json.loads((tmp_path / "tune" / "tuning.json").read_text())
    assert table["chosen"] == "lr=0.05"
    assert [(r["failed"], r["validation_accuracy"] is None) for r in table["rows"]] == [(0, False), (2, True)]
    assert "2 of 2 failed" in done.out


def test_values_with_options_are_a_grid(tmp_path: Path) -> None:
    words = [w for w in TUNE if not w.startswith("partition")]
    table, _ = tuned(
        tmp_path / "tune", "fedavg", "augment=none,crop:1", "partition=iid,dirichlet:0.5", *words, "rounds=1"
    )
    assert [row["setting"] for row in table["rows"]] == [
        f"augment={augment} partition={split}" for augment in ("none", "crop:1") for split in ("iid", "dirichlet:0.5")
    ]


def test_values_with_commas_of_their_own_are_not_a_grid(tmp_path: Path) -> None:
    words = [w for w in TUNE if not w.startswith("partition")]
    table, _ = tuned(
        tmp_path / "tune", "fedavg", "lr=0.01,0.1", "partition=dirichlet:alpha=0.5,min=5", *words, "rounds=1"
    )
    assert len(table["rows"]) == 2


def test_a_point_is_put_into_the_right_part() -> None:
    values = {"method": "fedprox:mu=0.1+fedavgm", "lr": "1"}
    made = apply_point(values, {"fedavgm.momentum": "0.5", "lr": "0.2", "fedprox.mu": "3"})
    assert made == {"method": "fedprox:mu=3+fedavgm:momentum=0.5", "lr": "0.2"}
    assert values["lr"] == "1"
    with pytest.raises(UserError, match="did you mean 'fedprox'"):
        apply_point(values, {"fedprx.mu": "1"})
    assert math.isclose(settings(made).lr, 0.2)
