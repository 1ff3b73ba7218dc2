"""Statistics against scipy and against values worked out by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.special
import scipy.stats

from isofed.errors import UserError
from isofed.stats import Difference, mean_std, paired_difference, student_t_quantile


@pytest.mark.parametrize(
    "df", [1, 2, 3, 4, 5, 9, 29, 98, 99, 100, 101, 1000, 12345, 999_999, 1_000_001, 10**9, 2.5, 0.7]
)
@pytest.mark.parametrize("p", [1e-12, 1e-5, 0.01, 0.025, 0.3, 0.4999, 0.5001, 0.75, 0.9, 0.975, 0.995, 0.99999])
def test_quantile_agrees_with_scipy(p, df):
    assert student_t_quantile(p, df) == pytest.approx(scipy.special.stdtrit(df, p), rel=1e-8, abs=1e-11)


@pytest.mark.parametrize("p", [1e-300, 1e-100, 1e-9, 0.1, 0.49, 0.5, 0.6, 0.999])
def test_quantile_agrees_with_closed_forms(p):
    # One degree of freedom is the Cauchy distribution, two have a root.
    assert student_t_quantile(p, 1) == pytest.approx(-1 / math.tan(math.pi * p), rel=1e-10, abs=1e-12)
    assert student_t_quantile(p, 2) == pytest.approx((2 * p - 1) / math.sqrt(2 * p * (1 - p)), rel=1e-10)


def test_quantile_agrees_with_printed_tables():
    table = {1: 12.706, 2: 4.303, 4: 2.776, 9: 2.262, 30: 2.042, math.inf: 1.960}
    assert {df: round(student_t_quantile(0.975, df), 3) for df in table} == table


def test_quantile_is_symmetric_and_rises():
    ps = np.linspace(0.001, 0.999, 99)
    ts = [student_t_quantile(float(p), 3) for p in ps]
    assert all(low < high for low, high in itertools.pairwise(ts))
    assert student_t_quantile(0.5, 3) == 0
    assert student_t_quantile(0.25, 3) == -student_t_quantile(0.75, 3)


@pytest.mark.parametrize(("p", "df"), [(0, 3), (1, 3), (-0.1, 3), (math.nan, 3), (0.5, 0), (0.5, -1), (0.5, math.nan)])
def test_quantile_refuses_what_has_none(p, df):
    with pytest.raises(UserError):
        student_t_quantile(p, df)


def test_mean_std_by_hand():
    # Squared deviations from 5: 9 + 1 + 1 + 1 + 0 + 0 + 4 + 16 = 32, over 7.
    mean, std = mean_std([2, 4, 4, 4, 5, 5, 7, 9])
    assert mean == 5
    assert std == pytest.approx(math.sqrt(32 / 7))
    assert mean_std([0.25, 0.25, 0.25]) == (0.25, 0)


def test_one_value_has_no_spread_and_none_has_no_mean():
    assert mean_std([3.5]) == (3.5, None)
    with pytest.raises(UserError, match="at least one"):
        mean_std([])


def test_mean_std_keeps_its_digits_far_from_zero():
    mean, std = mean_std([1e9 + 4, 1e9 + 7, 1e9 + 13, 1e9 + 16])
    assert mean == 1e9 + 10
    assert std == pytest.approx(math.sqrt(30), rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_run_that_diverged_shows(bad):
    mean, std = mean_std([1.0, bad, 2.0])
    assert not math.isfinite(mean)
    assert std is not None
    assert math.isnan(std)
    difference = paired_difference([1.0, bad, 2.0], [1.0, 1.0, 1.0])
    assert not math.isfinite(difference.mean)
    assert difference.low is not None
    assert math.isnan(difference.low)
    assert not math.isfinite(mean_std([math.inf, -math.inf])[0])


def test_paired_difference_by_hand():
    # Differences 1, 2, 3: mean 2, deviation 1; t with two degrees of freedom is (2p - 1) / sqrt(2p(1 - p)) = 4.302653.
    difference = paired_difference([2, 4, 6], [1, 2, 3])
    half = 0.95 / math.sqrt(2 * 0.975 * 0.025) / math.sqrt(3)
    assert (difference.mean, difference.n) == (2, 3)
    assert difference.low == pytest.approx(2 - half, rel=1e-10)
    assert difference.high == pytest.approx(2 + half, rel=1e-10)


@pytest.mark.parametrize("n", [2, 3, 5, 10, 200])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.999])
def test_paired_difference_agrees_with_scipy(n, level):
    rng = np.random.default_rng(n)
    a, b = rng.normal(size=n), rng.normal(0.3, 2, size=n)
    interval = scipy.stats.ttest_rel(a, b).confidence_interval(level)
    difference = paired_difference(a.tolist(), b.tolist(), level)
    assert difference.mean == pytest.approx((a - b).mean(), rel=1e-12)
    assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_one_pair_has_no_interval():
    assert paired_difference([0.5], [0.25]) == Difference(0.25, None, None, 1)


def test_equal_differences_have_no_interval():
    assert paired_difference([2, 3, 4], [1, 2, 3]) == Difference(1, None, None, 3)
    assert paired_difference([0.0, 0.0], [0.0, 0.0]) == Difference(0, None, None, 2)


def test_differences_that_only_rounding_makes_differ_are_equal():
    a, b = [270 / 359, 271 / 359], [269 / 359, 270 / 359]
    assert a[0] - b[0] != a[1] - b[1]
    found = paired_difference(a, b)
    assert found.low is found.high is None and found.mean == pytest.approx(1 / 359)
    near = paired_difference([0.5 + 1e-12, 0.5], [0.25, 0.25])
    assert near.low is not None and near.high is not None and near.low < near.high


def test_paired_difference_refuses_what_has_no_pairs():
    with pytest.raises(UserError, match="not 2 and 1"):
        paired_difference([1, 2], [1])
    with pytest.raises(UserError, match="at least one"):
        paired_difference([], [])
    for level in (0, 1, 95):
        with pytest.raises(UserError, match="level"):
            paired_difference([1, 2], [1, 2], level)
