"""Comparisons and tuning from the command line, against what their runs recorded and an independent computation."""

from __future__ import annotations

import csv
import functools
import json
import math
import re
import shutil
import signal
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
import yaml

from isofed.config import settings
from isofed.engine.world import World
from isofed.errors import UserError
from isofed.experiments import apply_point, seeds_of
from tests.cli_tools import all_gone, complaint, config, everything, isofed, metrics, model, result, start, succeeds

# Noisy data and few test samples: accuracies differ between seeds and methods.
TUNE = (
    "data=synthetic:samples=200,test=80",
    "model=mlp",
    "partition=dirichlet:0.5",
    "clients=4",
    "local_epochs=1",
    "rounds=12",
    "executor=serial",
)
WORDS = (*TUNE, "lr=0.1")
MINE = '''
from dataclasses import dataclass

from isofed import Method


@dataclass(frozen=True)
class Mine(Method):
    """A method of one's own."""

    scale: float = 0.5

    def aggregate(self, round):
        round.update = self.scale * round.update


@dataclass(frozen=True)
class Diverges(Method):
    """NaN everywhere."""

    def end(self, visit):
        visit.update = visit.update * float("nan")


@dataclass(frozen=True)
class ServerRaises(Method):
    """A mistake of its author."""

    def aggregate(self, round):
        raise ZeroDivisionError("nothing to divide by")

'''


def short(method: str) -> str:
    """A method's name without the folder of its file."""
    return re.sub(r"[^+]*/(?=[^/+]*\.py:)", "", method)


class Comparison:
    """A finished comparison: its folder, what it printed, and its tables."""

    def __init__(self, root: Path, out: str) -> None:
        self.root, self.out = root, out
        self.json: dict[str, Any] = json.loads((root / "comparison.json").read_text())
        self.rows: list[dict[str, Any]] = self.json["rows"]
        with (root / "comparison.csv").open(newline="") as file:
            self.csv = list(csv.DictReader(file))

    def runs(self) -> dict[str, dict[int, Path]]:
        """The runs' folders by method and seed, as the runs themselves say."""
        found: dict[str, dict[int, Path]] = {}
        for path in self.root.rglob("result.json"):
            record = result(path.parent)
            found.setdefault(short(record["method"]), {})[record["seed"]] = path.parent
        return found


def compare(root: Path, *words: str, code: int = 0, cwd: Path | None = None) -> Comparison:
    done = isofed("compare", *words, f"out={root}", cwd=cwd)
    assert done.code == code, done
    if code == 0:
        assert done.err == ""
    return Comparison(root, done.out)


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if "second" not in k and "memory" not in k} for row in rows]


def printed(out: str) -> dict[str, list[str]]:
    """The rows of the printed table by method."""
    lines = out[out.index("\nmethod ") :].strip().splitlines()[1:]
    return {line.split()[0]: line.split() for line in lines[: lines.index("")]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("compare")
    (folder / "mine.py").write_text(MINE)
    methods = ("fedavg", "fedprox:mu=20", "scaffold", "mine.py:Mine")
    return compare(folder / "runs", *methods, *WORDS, "seeds=3", "target=0.3", cwd=folder)


# --- compare


def test_a_comparison_makes_every_run(made: Comparison) -> None:
    runs = made.runs()
    assert [row["method"] for row in made.rows] == ["fedavg", "fedprox:mu=20", "scaffold", "mine.py:Mine"]
    assert {m: sorted(by_seed) for m, by_seed in runs.items()} == {row["method"]: [0, 1, 2] for row in made.rows}
    assert len({result(run)["accuracy"] for by_seed in runs.values() for run in by_seed.values()}) > 3


def test_the_table_is_what_the_runs_recorded(made: Comparison) -> None:
    """Means, deviations and paired intervals from the results, by numpy and scipy."""
    runs = made.runs()
    first = np.array([result(runs["fedavg"][seed])["accuracy"] for seed in range(3)])
    for row in made.rows:
        records = [result(runs[row["method"]][seed]) for seed in range(3)]
        accuracy = np.array([record["accuracy"] for record in records])
        assert row["accuracy"] == pytest.approx(accuracy.mean(), abs=1e-12)
        assert row["std"] == pytest.approx(accuracy.std(ddof=1), abs=1e-12)
        assert (row["seeds"], row["failed"], row["events"]) == (3, 0, 0)
        assert row["megabytes_per_round"] == pytest.approx(
            np.mean([(r["bytes_up"] + r["bytes_down"]) / r["rounds"] / 1e6 for r in records])
        )
        reached = [r["rounds_to_target"] for r in records if r["rounds_to_target"] is not None]
        assert row["reached"] == len(reached)
        assert row["rounds_to_target"] == (pytest.approx(np.mean(reached)) if reached else None)
        times = [line["seconds"] for seed in range(3) for line in metrics(runs[row["method"]][seed])]
        assert row["seconds_per_round"] == pytest.approx(np.median(times))
        assert row["relative_seconds"] == pytest.approx(row["seconds_per_round"] / made.rows[0]["seconds_per_round"])
        if row["method"] == "fedavg":
            assert row["difference"] is row["low"] is row["high"] is None
            continue
        gaps = accuracy - first
        assert gaps.std() > 0, "equal accuracies would hide a wrong interval"
        low, high = scipy.stats.t.interval(0.95, 2, loc=gaps.mean(), scale=scipy.stats.sem(gaps))
        assert row["difference"] == pytest.approx(gaps.mean(), abs=1e-12)
        assert (row["low"], row["high"]) == (pytest.approx(low, abs=1e-9), pytest.approx(high, abs=1e-9))
        test = scipy.stats.ttest_rel(accuracy, first)
        assert (row["low"] > 0 or row["high"] < 0) == bool(test.pvalue < 0.05)


def test_the_printed_table_and_the_files_agree(made: Comparison) -> None:
    shown = printed(made.out)
    for row, plain in zip(made.rows, made.csv, strict=True):
        assert list(plain) == list(row)
        for key, value in row.items():
            cell = plain[key]
            assert cell == ("" if value is None else str(value))
            if isinstance(value, float):
                assert float(cell) == value
        cells = [row["method"], f"{100 * row['accuracy']:.1f}", "±", f"{100 * row['std']:.1f}"]
        if row["difference"] is not None:
            cells += [f"{100 * row['difference']:+.1f}"] + (["*"] if row["low"] > 0 or row["high"] < 0 else [])
            cells += [f"{100 * row['low']:+.1f}", "to", f"{100 * row['high']:+.1f}"]
        cells += [f"{row['rounds_to_target']:.1f}"] if row["reached"] else ["never"]
        cells += [f"({row['reached']}/3)"] if 0 < row["reached"] < 3 else []
        cells += [f"{row['relative_seconds']:.2f}x", f"{row['megabytes_per_round']:.2f}"]
        assert shown[row["method"]] == cells
    assert "over 3 seeds" in made.out and "to fedavg" in " ".join(made.out.split())
    assert made.json["seeds"] == [0, 1, 2] and made.json["target"] == 0.3 and made.json["rounds"] == 12


def test_methods_share_splits_and_initial_weights(made: Comparison) -> None:
    runs = made.runs()
    seen = []
    for seed in range(3):
        worlds = [World.create(settings(config(by_seed[seed]))) for by_seed in runs.values()]
        starts = [world.network().state_dict() for world in worlds]
        assert all(config(by_seed[seed])["seed"] == seed for by_seed in runs.values())
        for world, start_weights in zip(worlds[1:], starts[1:], strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(world.clients, worlds[0].clients, strict=True))
            assert all(torch.equal(start_weights[name], value) for name, value in starts[0].items())
        seen.append((worlds[0].clients[0].tolist(), starts[0]["head.weight"].sum().item()))
    assert len({str(s) for s in seen}) == 3  # and other seeds have others


def test_a_run_of_a_comparison_is_the_run_of_its_configuration(made: Comparison, tmp_path: Path) -> None:
    run = made.runs()["scaffold"][1]
    succeeds("run", run / "config.yaml", f"out={tmp_path / 'again'}")
    assert model(tmp_path / "again") == model(run)


def test_the_same_command_runs_nothing_and_prints_the_same(made: Comparison, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    shutil.copytree(made.root, root)
    (tmp_path / "mine.py").write_text(MINE)
    words = ("fedavg", "fedprox:mu=20", "scaffold", *WORDS, "seeds=3", "target=0.3")
    first = compare(root, *words, cwd=tmp_path)
    before = everything(root)
    again = compare(root, *words, cwd=tmp_path)
    tables = {"comparison.json", "comparison.csv"}
    assert {k: v for k, v in everything(root).items() if k not in tables} == {
        k: v for k, v in before.items() if k not in tables
    }
    assert again.out[again.out.index("\nmethod") :] == first.out[first.out.index("\nmethod") :]
    assert again.rows == first.rows == made.rows[:3]


def test_a_comparison_is_found_again_from_another_folder(made: Comparison, tmp_path: Path) -> None:
    """The file of a method is named by another path there, and still is the same method."""
    root = tmp_path / "runs"
    shutil.copytree(made.root, root)
    before = {k: v for k, v in everything(root).items() if "comparison." not in k}
    file = made.root.parent / "mine.py"
    again = compare(root, "fedavg", f"{file}:Mine", *WORDS, "seeds=3", "target=0.3", cwd=tmp_path)
    assert {k: v for k, v in everything(root).items() if "comparison." not in k} == before
    assert [row["accuracy"] for row in again.rows] == [made.rows[0]["accuracy"], made.rows[3]["accuracy"]]


def test_one_more_method_or_seed_runs_only_what_is_missing(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    compare(root, "fedavg", "fedprox", *WORDS, "seeds=2")
    before = everything(root)
    more = compare(root, "fedavg", "fedprox", "fednova", *WORDS, "seeds=2")
    assert sorted(more.runs()["fednova"]) == [0, 1]
    still = compare(root, "fedavg", "fedprox", "fednova", *WORDS, "seeds=3")
    after = everything(root)
    assert all(after[name] == seen for name, seen in before.items() if "comparison." not in name)
    assert {m: sorted(by_seed) for m, by_seed in still.runs().items()} == {
        m: [0, 1, 2] for m in ("fedavg", "fedprox", "fednova")
    }
    alone = compare(tmp_path / "alone", "fedavg", "fedprox", "fednova", *WORDS, "seeds=3")
    assert without_times(still.rows) == without_times(alone.rows)
    fewer = compare(root, "fednova", "fedavg", *WORDS, "seeds=1,2")
    assert [row["seeds"] for row in fewer.rows] == [2, 2] and fewer.rows[0]["difference"] is None


def in_the_middle(root: Path, finished: int) -> bool:
    """Whether so many runs of a comparison are finished and another has got somewhere."""
    done = {p.parent for p in root.rglob("result.json")}
    others = [p for p in root.rglob("metrics.jsonl") if p.parent not in done]
    return len(done) == finished and any(p.stat().st_size > 2000 for p in others)


@pytest.mark.parametrize("executor", ["serial", "workers"])
def test_a_killed_comparison_goes_on_to_the_same_table(executor: str, tmp_path: Path) -> None:
    words = ("fedavg", "scaffold", *WORDS, "rounds=25", f"executor={executor}", "workers=1", "seeds=2")
    whole = compare(tmp_path / "whole", "fedavg", "scaffold", *WORDS, "rounds=25", "seeds=2")
    root = tmp_path / "runs"
    for finished in (0, 2) if executor == "serial" else (2,):  # in the first run, and in the third
        command = start("compare", *words, f"out={root}")
        command.when(functools.partial(in_the_middle, root, finished))
        assert command.kill().code == -signal.SIGKILL
        all_gone(command.pid)
        assert not (root / "comparison.json").exists()
    done = compare(root, *words)
    assert without_times(done.rows) == without_times(whole.rows)
    for method, by_seed in whole.runs().items():
        for seed, run in by_seed.items():
            assert model(done.runs()[method][seed]) == model(run)


def test_ctrl_c_in_a_comparison_says_how_to_go_on(tmp_path: Path) -> None:
    command = start("compare", "fedavg", "scaffold", *WORDS, "rounds=2000", f"out={tmp_path / 'runs'}")
    command.when(lambda: any(p.stat().st_size > 2000 for p in tmp_path.rglob("metrics.jsonl")))
    command.interrupt()
    assert "the same command again" in complaint(command.wait(), 130)


def test_runs_with_other_settings_are_refused_before_any_work(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    compare(root, "fedavg", "fedprox", *WORDS, "rounds=2", "seeds=2")
    shutil.rmtree(root / "fedavg")  # what is missing comes first, and must not be run
    before = everything(root)
    said = complaint(isofed("compare", "fedavg", "fedprox", *WORDS, "rounds=3", "seeds=2", f"out={root}"), 2)
    assert "rounds=2, not 3" in said and "out=" in said
    assert everything(root) == before
    # How it is computed is not what it computes.
    succeeds("compare", "fedprox", *WORDS, "rounds=2", "seeds=2", "executor=auto", f"out={root}")


@pytest.mark.parametrize("method", ["Diverges", "ServerRaises"])
def test_a_method_that_fails_does_not_stop_the_others(method: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    root = tmp_path / "runs"
    done = isofed("compare", "fedavg", f"mine.py:{method}", "fedprox", *WORDS, "seeds=2", f"out={root}", cwd=tmp_path)
    said = complaint(done, 1)
    assert "2 of the runs" in said and f"mine.py:{method}" in said
    made = Comparison(root, done.out)
    assert [(r["method"], r["seeds"], r["failed"]) for r in made.rows] == [
        ("fedavg", 2, 0),
        (f"mine.py:{method}", 0, 2),
        ("fedprox", 2, 0),
    ]
    assert made.rows[1]["accuracy"] is None and made.rows[2]["difference"] is not None
    assert f"mine.py:{method} (2 failed)" in done.out
    assert done.out.count("failed  ") == 2
    again = isofed("compare", "fedavg", f"mine.py:{method}", "fedprox", *WORDS, "seeds=2", f"out={root}", cwd=tmp_path)
    assert again.code == 1 and without_times(Comparison(root, again.out).rows) == without_times(made.rows)


def test_a_failing_first_method_leaves_nothing_to_compare_with(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    words = ("mine.py:Diverges", "fedavg", *WORDS, "rounds=2", f"out={tmp_path / 'runs'}")
    done = isofed("compare", *words, cwd=tmp_path)
    complaint(done, 1)
    rows = Comparison(tmp_path / "runs", done.out).rows
    assert rows[0]["failed"] == 1 and rows[1]["accuracy"] is not None and rows[1]["difference"] is None


def test_when_every_run_fails_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    done = isofed("compare", "mine.py:Diverges", *WORDS, "seeds=2", f"out={tmp_path / 'runs'}", cwd=tmp_path)
    assert "not one run could be finished" in complaint(done, 1)


def test_seeds_of_a_comparison(tmp_path: Path) -> None:
    words = ("fedavg", *WORDS, "rounds=1")
    made = compare(tmp_path / "a", *words, "seeds=3,5")
    assert sorted(made.runs()["fedavg"]) == [3, 5] and made.json["seeds"] == [3, 5]
    made = compare(tmp_path / "b", *words, "seeds=2", "seed=7")
    assert sorted(made.runs()["fedavg"]) == [7, 8]
    made = compare(tmp_path / "c", *words)
    assert sorted(made.runs()["fedavg"]) == [0]
    assert made.rows[0]["std"] is None and "±" not in " ".join(printed(made.out)["fedavg"])
    assert "over 1 seed." in made.out


def test_seeds_are_read_in_every_form() -> None:
    assert seeds_of(3) == seeds_of("3") == [0, 1, 2]
    assert seeds_of("2", first=5) == [5, 6]
    assert seeds_of("1,5,9") == seeds_of([1, 5, 9]) == seeds_of((1, "5", 9.0)) == [1, 5, 9]
    for wrong in (0, -1, "x", 1.5, "1,x"):
        with pytest.raises(UserError):
            seeds_of(wrong)


def test_a_comparison_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    values: dict[str, Any] = dict(word.split("=", 1) for word in WORDS)
    values |= {"methods": ["fedavg", {"fedprox": {"mu": 3}}, "mine.py:Mine"], "seeds": [1, 4], "rounds": 2}
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(values | {"out": str(tmp_path / "runs")}))
    out = succeeds("compare", "experiment.yaml", cwd=tmp_path)
    made = Comparison(tmp_path / "runs", out)
    assert [row["method"] for row in made.rows] == ["fedavg", "fedprox:mu=3", "mine.py:Mine"]
    assert all(sorted(by_seed) == [1, 4] for by_seed in made.runs().values())
    other = compare(tmp_path / "other", "experiment.yaml", "rounds=1", "seeds=1", cwd=tmp_path)  # words win
    assert other.json["rounds"] == 1 and other.json["seeds"] == [0]


def test_without_out_a_comparison_finds_its_folder_again(tmp_path: Path) -> None:
    succeeds("compare", "fedavg", *WORDS, "rounds=2", cwd=tmp_path)
    (root,) = (tmp_path / "runs").iterdir()
    before = everything(root)
    succeeds("compare", "fedavg", "fedprox", *WORDS, "rounds=2", cwd=tmp_path)
    assert [p.name for p in (tmp_path / "runs").iterdir()] == [root.name]  # one more method belongs to the same
    after = everything(root)
    assert all(after[name] == seen for name, seen in before.items() if "comparison." not in name)
    succeeds("compare", "fedavg", *WORDS, "rounds=3", cwd=tmp_path)
    assert len(list((tmp_path / "runs").iterdir())) == 2  # other settings are another comparison


def test_long_and_odd_methods_have_folders_of_their_own(tmp_path: Path) -> None:
    options = "beta1=0.95,beta2=0.999,tau=0.0001,v0=0.001,bias_correction=true"
    methods = [f"fedadam:lr=0.0{n},{options}+fedprox:mu=0.00{n}" for n in (1, 2)]
    made = compare(tmp_path / "runs", *methods, "central", *WORDS, "rounds=1")
    assert len({by_seed[0] for by_seed in made.runs().values()}) == 3
    assert [row["failed"] for row in made.rows] == [0, 0, 0]
    assert made.rows[2]["megabytes_per_round"] == 0


# --- tune


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
