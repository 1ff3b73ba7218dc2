"""Means, spreads and paired differences over seeds, with Student's t and nothing beyond the standard library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from isofed.errors import UserError

_ROUNDING = 1e-14  # equal differences of numbers of the size of 1 differ by less


@dataclass(frozen=True)
class Difference:
    """A mean difference over ``n`` pairs, and its confidence interval (None where no spread is known)."""

    mean: float
    low: float | None
    high: float | None
    n: int


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and the sample standard deviation (divisor n - 1).

    One value has a mean and no spread: the deviation is then None, not 0, which would claim certainty. A NaN or
    an infinity among the values (a run that diverged) gives a mean that is not finite and a NaN deviation.

    >>> mean_std([1.0, 2.0, 3.0])
    (2.0, 1.0)
    >>> mean_std([4.0])
    (4.0, None)
    """
    n = len(values)
    if n == 0:
        raise UserError("a mean needs at least one value")
    finite = all(math.isfinite(value) for value in values)
    mean = (math.fsum(values) if finite else float(sum(values))) / n
    if n == 1:
        return mean, None
    if not finite:
        return mean, math.nan
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))


def paired_difference(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Difference:
    """The mean of ``a - b`` over pairs, with its paired t interval at this confidence level.

    Pair what shares its chance, such as two methods on the same seed: what the seeds have in common cancels. Equal
    differences have no interval, as one pair has none: one of no width would claim that every other seed must differ
    by the same, when accuracies are counts of pictures, and a few of them are easily equal.

    >>> paired_difference([3.0], [1.0])
    Difference(mean=2.0, low=None, high=None, n=1)
    """
    if len(a) != len(b):
        raise UserError(f"a paired difference needs as many values on both sides, not {len(a)} and {len(b)}")
    if not 0 < level < 1:
        raise UserError(f"a confidence level lies between 0 and 1, not at {level}")
    n = len(a)
    mean, std = mean_std([x - y for x, y in zip(a, b, strict=True)])
    if std is None or std <= _ROUNDING * max(map(abs, (*a, *b))):
        return Difference(mean, None, None, n)
    half = student_t_quantile((1 + level) / 2, n - 1) * std / math.sqrt(n)
    return Difference(mean, mean - half, mean + half, n)


def student_t_quantile(p: float, df: float) -> float:
    """The t with probability ``p`` below it, for Student's t with ``df`` degrees of freedom, to 1e-8 or better.

    >>> round(student_t_quantile(0.975, 4), 6)
    2.776445
    """
    if not 0 < p < 1:
        raise UserError(f"a probability for a quantile lies between 0 and 1, not at {p}")
    if not df > 0:
        raise UserError(f"degrees of freedom are greater than 0, not {df}")
    if p < 0.5:
        return -_upper_quantile(p, df)
    return _upper_quantile(1 - p, df)


def _upper_quantile(q: float, df: float) -> float:
    """The t >= 0 with probability ``q`` <= 1/2 above it."""
    if q == 0.5:
        return 0.0
    if df > 1e6:
        # Two terms of the expansion about the normal: the next is below 1e-9, and the fraction below is slow here.
        z = -NormalDist().inv_cdf(q)
        return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df * df)
    low, high = 0.0, 1.0
    while _tail(high, df) > q and high < math.inf:
        low, high = high, 2 * high
    while True:
        middle = low + (high - low) / 2
        if not low < middle < high:  # no number lies between them
            return high
        if _tail(middle, df) > q:
            low = middle
        else:
            high = middle


def _tail(t: float, df: float) -> float:
    """The probability above ``t`` >= 0: half the regularised incomplete beta I_x(df/2, 1/2), x = df / (df + t^2)."""
    if t == 0:
        return 0.5
    ratio = t / math.sqrt(df)
    # Logarithms of x and 1 - x, each without cancellation or overflow.
    log_x = -math.log1p(ratio * ratio) if ratio < 1e100 else -2 * math.log(ratio)
    log_y = -math.log1p(1 / ratio / ratio) if ratio > 1e-100 else 2 * math.log(ratio)
    a, b = df / 2, 0.5
    front = math.exp(a * log_x + b * log_y - _log_beta_half(a))
    x = math.exp(log_x)
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a / 2
    return 0.5 - front * _fraction(b, a, math.exp(log_y)) / b / 2


def _log_beta_half(a: float) -> float:
    """log B(a, 1/2); for large a by a series, because the difference of two large log-gammas loses digits."""
    if a < 50:
        return math.lgamma(a) + math.lgamma(0.5) - math.lgamma(a + 0.5)
    series = math.log(a) / 2 - 1 / (8 * a) + 1 / (192 * a**3) - 1 / (640 * a**5)
    return math.lgamma(0.5) - series


def _fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method (DLMF 8.17.22)."""
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, 100_000):
        change = 1.0
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            c = 1 + term / c
            d = 1 + term * d
            c, d = c if abs(c) > tiny else tiny, 1 / (d if abs(d) > tiny else tiny)
            change = c * d
            value *= change
        if abs(change - 1) < 1e-15:
            break
    return value
