"""What a comparison makes and shows, against what its runs recorded and an independent computation."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from isofed.config import settings
from isofed.engine.world import World
from tests.cli_tools import config, everything, metrics, model, result, succeeds
from tests.experiments.tools import MINE, WORDS, Comparison, compare, printed


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    folder = tmp_path_factory.mktemp("compare")
    (folder / "mine.py").write_text(MINE)
    methods = ("fedavg", "fedprox:mu=20", "scaffold", "mine.py:Mine")
    return compare(folder / "runs", *methods, *WORDS, "seeds=3", "target=0.3", cwd=folder)


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
        # Of an even number, the shorter of the two in the middle.
        assert row["seconds_per_round"] == pytest.approx(np.percentile(times, 50, method="lower"))
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
        some = [">", "12", f"({row['reached']}/3)"] if row["reached"] else ["never"]
        cells += [f"{row['rounds_to_target']:.1f}"] if row["reached"] == 3 else some
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
