"""The rows behind the tables, from made-up results and against scipy."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from isofed import tables
from isofed.experiments import Batch
from isofed.result import Result
from isofed.tables import Row, comparison, tuning, write


def made(method: str, seed: int, accuracy: float, seconds: tuple[float, ...] = (1.0, 1.0)) -> Result:
    return Result(
        method,
        seed,
        accuracy,
        loss=1.0,
        best_accuracy=accuracy,
        rounds=len(seconds),
        rounds_to_target=None,
        seconds=sum(seconds),
        bytes_up=1_000_000,
        bytes_down=3_000_000,
        events=seed,
        history=[{"round": n, "seconds": s} for n, s in enumerate(seconds, 1)],
    )


def batch(accuracies: dict[str, dict[int, float]], failures: dict[str, dict[int, str]] | None = None) -> Batch:
    results = {m: {s: made(m, s, a) for s, a in by_seed.items()} for m, by_seed in accuracies.items() if by_seed}
    return Batch(results, failures or {})


@pytest.mark.parametrize("seeds", [2, 3, 5, 20])
def test_rows_agree_with_scipy(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    first, second = rng.uniform(0.4, 0.9, (2, seeds))
    rows = comparison(batch({"a": dict(enumerate(first.tolist())), "b": dict(enumerate(second.tolist()))}), ["a", "b"])
    for row, values in zip(rows, (first, second), strict=True):
        assert row.accuracy == pytest.approx(values.mean(), abs=1e-14)
        assert row.std == pytest.approx(values.std(ddof=1), abs=1e-14)
        assert row.seeds == seeds
    gaps = second - first
    low, high = scipy.stats.t.interval(0.95, seeds - 1, loc=gaps.mean(), scale=scipy.stats.sem(gaps))
    assert rows[1].difference == pytest.approx(gaps.mean(), abs=1e-14)
    assert rows[1].low == pytest.approx(low, abs=1e-10) and rows[1].high == pytest.approx(high, abs=1e-10)
    assert rows[1].clear == bool(scipy.stats.ttest_rel(second, first).pvalue < 0.05)
    assert rows[0].difference is None and not rows[0].clear


def test_differences_are_over_the_seeds_that_both_have() -> None:
    accuracies = {"a": {0: 0.5, 1: 0.6, 2: 0.9}, "b": {1: 0.7, 2: 0.8, 3: 0.1}}
    rows = comparison(batch(accuracies, {"a": {3: "it failed"}, "b": {0: "it failed"}}), ["a", "b"])
    gaps = np.array([0.1, -0.1])
    low, high = scipy.stats.t.interval(0.95, 1, loc=0, scale=scipy.stats.sem(gaps))
    assert rows[1].difference == pytest.approx(0, abs=1e-14)
    assert rows[1].low == pytest.approx(low, rel=1e-9) and rows[1].high == pytest.approx(high, rel=1e-9)
    assert (rows[0].failed, rows[1].failed) == (1, 1)
    assert rows[1].accuracy == pytest.approx((0.7 + 0.8 + 0.1) / 3)


def test_one_seed_and_none_in_common_claim_nothing() -> None:
    rows = comparison(batch({"a": {0: 0.5}, "b": {0: 0.7}, "c": {4: 0.7}, "d": {}}), ["a", "b", "c", "d"])
    assert rows[0].std is None
    assert rows[1].difference == pytest.approx(0.2)
    assert rows[1].low is rows[1].high is None and not rows[1].clear
    assert rows[2].difference is None
    assert rows[3] == Row("d")


def test_differences_without_any_spread_are_not_called_clear() -> None:
    rows = comparison(batch({"a": {0: 0.5, 1: 0.75}, "b": {0: 0.5, 1: 0.75}, "c": {0: 0.75, 1: 1.0}}), ["a", "b", "c"])
    assert [row.difference for row in rows] == [None, 0, 0.25]
    # Two seeds that happen to differ by the same number of pictures are no proof.
    assert all(row.low is row.high is None and not row.clear for row in rows)
    assert [row.no_spread for row in rows] == [False, True, True]


def test_times_are_medians_of_rounds_relative_to_the_first_method() -> None:
    results = {
        "a": {0: made("a", 0, 0.5, (90.0, 2.0, 2.0)), 1: made("a", 1, 0.5, (2.0, 2.0, 2.0))},
        "b": {0: made("b", 0, 0.5, (3.0, 3.0, 70.0))},
    }
    rows = comparison(Batch(results), ["a", "b"])
    assert [row.seconds_per_round for row in rows] == [2.0, 3.0]
    assert [row.relative_seconds for row in rows] == [1.0, 1.5]
    assert [row.megabytes_per_round for row in rows] == [pytest.approx(4 / 3), pytest.approx(4 / 3)]
    assert [row.events for row in rows] == [1, 0]


def test_the_warming_up_of_a_short_run_is_in_no_time() -> None:
    # With two rounds a median would lie between them: the first method, which warms up, would look the slowest.
    results = {"a": {0: made("a", 0, 0.5, (40.0, 2.0))}, "b": {0: made("b", 0, 0.5, (3.0, 3.0))}}
    rows = comparison(Batch(results), ["a", "b"])
    assert [row.relative_seconds for row in rows] == [1.0, 1.5]
    # One round of one seed is nothing but warming up.
    single = {"a": {0: made("a", 0, 0.5, (40.0,))}, "b": {0: made("b", 0, 0.5, (3.0,))}}
    assert [row.relative_seconds for row in comparison(Batch(single), ["a", "b"])] == [None, None]


def test_what_a_megabyte_and_a_second_bought_counts_from_chance_on() -> None:
    one, two, pooled = made("a", 0, 0.6, (2.0,)), made("a", 1, 0.8, (4.0,)), made("b", 0, 0.9, (5.0,))
    one.class_accuracy = two.class_accuracy = [0.5] * 5  # chance is 20 %
    one.peak_memory, two.peak_memory = 3_000_000, 5_000_000
    pooled.bytes_up = pooled.bytes_down = 0
    rows = comparison(Batch({"a": {0: one, 1: two}, "b": {0: pooled}}), ["a", "b"])
    assert rows[0].points_per_megabyte == pytest.approx((40 / 4 + 60 / 4) / 2)
    assert rows[0].points_per_second == pytest.approx((40 / one.seconds + 60 / two.seconds) / 2)
    assert rows[0].peak_memory_megabytes == 5
    assert rows[1].points_per_megabyte is rows[1].peak_memory_megabytes is None
    assert rows[1].points_per_second == pytest.approx(90 / pooled.seconds)


def test_rounds_to_the_target_count_only_where_it_was_reached() -> None:
    curves: dict[int, list[float | None]] = {0: [0.1, 0.2, 0.6], 1: [0.1] * 6, 2: [None, 0.1, 0.4, 0.3, 0.4, 0.5]}
    results = {"a": {s: made("a", s, 0.5) for s in curves}, "b": {0: made("b", 0, 0.1)}}
    for seed, curve in curves.items():
        results["a"][seed].history = [{"round": n, "seconds": 1.0, "accuracy": a} for n, a in enumerate(curve, 1)]
    rows = comparison(Batch(results), ["a", "b"], target=0.5)
    assert (rows[0].rounds_to_target, rows[0].reached, rows[0].seeds) == (4.5, 2, 3)
    assert (rows[1].rounds_to_target, rows[1].reached) == (None, 0)
    # As a text, a mean over some seeds must not look better than one over all.
    texts = [dataclasses.replace(rows[0], rounds=6).to_target, rows[1].to_target, Row("c").to_target]
    assert texts == ["> 6 (2/3)", "never", "-"]
    assert dataclasses.replace(rows[0], reached=3).to_target == "4.5"


def test_epsilon_is_the_worst_of_all_seeds_and_none_where_one_has_no_noise() -> None:
    results = {m: {s: made(m, s, 0.5) for s in (0, 1)} for m in ("a", "b")}
    for seed, epsilon in enumerate((3.0, 4.0)):
        results["a"][seed].privacy = {"epsilon": epsilon, "delta": 1e-5}
    results["b"][0].privacy = {"epsilon": 1.0, "delta": 1e-5}
    rows = comparison(Batch(results), ["a", "b"])
    assert (rows[0].epsilon, rows[0].delta, rows[0].rounds) == (4.0, 1e-5, 2)
    assert rows[1].epsilon is rows[1].delta is None


def test_files_hold_the_rows(tmp_path: Path) -> None:
    rows = comparison(batch({"a": {0: 0.1, 1: 1 / 3}, 'b,"x"\nü': {0: 0.5, 1: 0.25}}), ["a", 'b,"x"\nü'])
    paths = write(rows, tmp_path, "table", {"rounds": 2})
    content = json.loads(paths[0].read_text())
    assert content["rounds"] == 2 and len(content["rows"]) == 2
    with paths[1].open(newline="") as file:
        plain = list(csv.DictReader(file))
    for row, one, other in zip(rows, content["rows"], plain, strict=True):
        assert Row(**one) == row
        assert other["method"] == row.method
        assert float(other["accuracy"]) == row.accuracy
        assert other["rounds_to_target"] == ""
    assert tables.Row(**content["rows"][1]).clear == rows[1].clear


def test_the_best_mean_is_chosen_and_the_earlier_of_two() -> None:
    trials = tuning(batch({"x": {0: 0.5, 1: 0.7}, "y": {0: 0.9, 1: 0.5}, "z": {0: 0.7, 1: 0.7}}), ["x", "y", "z"])
    assert [t.setting for t in trials if t.chosen] == ["y"]
    assert [t.validation_accuracy for t in trials] == [pytest.approx(0.6), pytest.approx(0.7), pytest.approx(0.7)]
    assert trials[0].std == pytest.approx(np.std([0.5, 0.7], ddof=1))


def test_a_point_that_failed_on_a_seed_is_chosen_only_if_all_did() -> None:
    failures = {"x": {1: "it failed"}}
    trials = tuning(batch({"x": {0: 0.99}, "y": {0: 0.2, 1: 0.3}}, failures), ["x", "y"])
    assert [(t.setting, t.failed, t.chosen) for t in trials] == [("x", 1, False), ("y", 0, True)]
    trials = tuning(batch({"x": {0: 0.99}, "y": {}}, {"x": {1: ""}, "y": {0: "", 1: ""}}), ["x", "y"])
    assert [(t.setting, t.chosen) for t in trials] == [("x", True), ("y", False)]
