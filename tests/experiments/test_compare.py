"""Comparisons that grow, are killed and go on, fail in part, and are given in other ways."""

from __future__ import annotations

import functools
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from isofed.errors import UserError
from isofed.experiments import seeds_of
from tests.cli_tools import all_gone, complaint, everything, isofed, model, start, succeeds
from tests.experiments.tools import MINE, WORDS, Comparison, compare, printed, without_times


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


def test_a_method_that_does_not_suit_the_network_is_refused_before_any_work(tmp_path: Path) -> None:
    words = ("compare", "fedavg", "fedbn", *WORDS, f"out={tmp_path / 'runs'}")
    assert "batch norm" in complaint(isofed(*words), 2)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("method", ["Diverges", "ServerRaises", "BuildRaises"])
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


def test_the_parts_of_a_method_in_a_file_act_together(tmp_path: Path) -> None:
    """As in a run of the same file; methods that are to be set side by side are a list of ``methods``."""
    values: dict[str, Any] = dict(word.split("=", 1) for word in WORDS)
    values |= {"method": [{"fedprox": {"mu": 3}}, "fedavgm"], "rounds": 1}
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(values))
    made = compare(tmp_path / "runs", "experiment.yaml", cwd=tmp_path)
    assert [row["method"] for row in made.rows] == ["fedprox:mu=3+fedavgm"]
    said = complaint(isofed("compare", "fedavg", "experiment.yaml", cwd=tmp_path), 2)
    assert said == "methods are given twice, as 'fedavg' and as 'fedprox:mu=3+fedavgm'; give all in one way"


def test_what_is_noted_of_the_data_is_said_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (60, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "mine.npz", images=images, labels=np.arange(60) % 3, patients=np.arange(60) // 4)
    words = [word for word in WORDS if not word.startswith("data=")]
    made = compare(
        tmp_path / "runs", "fedavg", "fedprox", *words, "rounds=1", f"data={tmp_path / 'mine.npz'}", "seeds=2"
    )
    assert made.out.count("note: 'patients' of 'mine.npz' is not used") == 1


def test_every_seed_is_looked_at_before_any_work(tmp_path: Path) -> None:
    """The split of a later one may be impossible: it was found after the runs of the first."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (80, 4, 4), dtype=np.uint8)
    np.savez(tmp_path / "mine.npz", images=images, labels=np.arange(80) % 4)
    words = [word for word in WORDS if not word.startswith(("data=", "partition="))]
    words += [
        f"data={tmp_path / 'mine.npz'}",
        "partition=dirichlet:0.5,min=9,tries=1",
        "rounds=1",
        f"out={tmp_path / 'a'}",
    ]
    possible = [isofed("data", *words[-4:-2], "clients=4", f"seed={seed}").code == 0 for seed in range(40)]
    good, bad = possible.index(True), possible.index(False)
    said = complaint(isofed("compare", "fedavg", *words, f"seeds={good},{bad}"), 2)
    assert said.endswith(f"(with seed {bad})") and not (tmp_path / "a").exists()


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
