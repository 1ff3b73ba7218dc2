"""Exact sums: every order gives the same bits, and the value is right."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isofed.engine import exact
from isofed.engine.exact import LIMIT, SMALL, ExactSum, Uneven, fits
from isofed.functional import native

QUICK = settings(max_examples=60, deadline=None)
GRID = 2.0**-58  # to which each scaled term is rounded


def total(values: list[torch.Tensor], weights: list[float], expected: float | None = None) -> ExactSum:
    made = ExactSum(sum(weights) if expected is None else expected)
    for value, weight in zip(values, weights, strict=True):
        made.add(value, weight)
    return made


def told(value: torch.Tensor, rng: np.random.Generator) -> float:
    """What a sum may know of a tensor: nothing, or a bound that is as low as it can be or higher."""
    return float(rng.choice([1.0, 1.5, math.inf])) * float(value.abs().max())


def drawn(seed: int, count: int, size: int, low: float, high: float) -> list[torch.Tensor]:
    """Values of either sign with magnitudes from 2^low to 2^high, different in each element and each term."""
    rng = np.random.default_rng(seed)
    values = rng.choice([-1.0, 1.0], (count, size)) * 2.0 ** rng.uniform(low, high, (count, size))
    return [torch.from_numpy(v.astype(np.float32)) for v in values]


@pytest.mark.skipif(native.compiled_by() == "none", reason="there is no C compiler")
@QUICK
@given(seed=st.integers(0, 2**32), count=st.integers(1, 20), low=st.floats(-60, 20), span=st.floats(0, 60))
def test_c_gives_the_bits_of_pytorchs_operations(seed: int, count: int, low: float, span: float) -> None:
    values = drawn(seed, count, 67, low, min(low + span, math.log2(LIMIT) - 0.1))
    rng = np.random.default_rng(seed + 1)
    weights, known = [float(n) for n in rng.integers(1, 5000, count)], [told(v, rng) for v in values]
    found = []
    for functions in (exact._functions, lambda: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exact, "_functions", functions)
            made = ExactSum(sum(weights))
            for value, weight, largest in zip(values, weights, known, strict=True):
                made.add(value, weight, largest)
            found.append(made)
    first, second = (made.parts() for made in found)
    assert exact._functions() is not None
    assert torch.equal(first.fine, second.fine) and torch.equal(first.coarse, second.coarse)
    assert all(
        found[0]._fine is not None and torch.equal(m._fine, found[0]._fine) for m in found if m._fine is not None
    )


@pytest.mark.skipif(native.compiled_by() == "none", reason="there is no C compiler")
def test_c_is_not_asked_to_read_what_lies_otherwise() -> None:
    square = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
    straight, turned, double, column = ExactSum(1.0), ExactSum(1.0), ExactSum(1.0), ExactSum(1.0)
    straight.add(square.t().contiguous())
    turned.add(square.t())
    double.add(square.t().double())
    column.add(square[:, 3])
    assert torch.equal(straight.sum(), turned.sum()) and torch.equal(straight.sum(), double.sum())
    assert torch.equal(column.sum(), straight.sum()[3])


def test_terms_of_different_shapes_are_refused() -> None:
    """Written in C, a longer one would go over the end of the sum's memory, and a shorter one be part of a term."""
    made, other = ExactSum(4.0), ExactSum(4.0)
    made.add(torch.ones(10))
    other.add(torch.ones(1))
    for shape in ((4,), (100,), (2, 5), ()):
        with pytest.raises(Uneven, match=r"\[10\] and"):
            made.add(torch.ones(shape))
    with pytest.raises(Uneven):
        made.merge(other.parts())
    assert torch.equal(made.sum(), torch.ones(10, dtype=torch.float64))


def test_a_number_that_is_negated_when_it_is_read() -> None:
    made = ExactSum(1.0)
    made.add(torch.complex(torch.ones(3), torch.ones(3)).conj().imag[:1])
    assert made.sum().tolist() == [-1.0]


@QUICK
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 40),
    low=st.floats(-60, 24),
    span=st.floats(0, 90),
    uniform=st.booleans(),
)
def test_any_order_gives_the_same_bits(seed: int, count: int, low: float, span: float, uniform: bool) -> None:
    values = drawn(seed, count, 64, low, min(low + span, math.log2(LIMIT) - 0.1))
    rng = np.random.default_rng(seed + 1)
    weights = [1.0] * count if uniform else [float(n) for n in rng.integers(1, 5000, count)]
    first = total(values, weights)
    for _ in range(3):
        order = rng.permutation(count)
        again = total([values[i] for i in order], [weights[i] for i in order])
        assert torch.equal(again.sum(), first.sum())
        assert torch.equal(again.mean(), first.mean())


@QUICK
@given(seed=st.integers(0, 2**32), count=st.integers(1, 40), low=st.floats(-60, 0), span=st.floats(0, 20))
def test_what_is_known_of_the_terms_does_not_change_the_bits(seed: int, count: int, low: float, span: float) -> None:
    values = drawn(seed, count, 64, low, low + span)
    rng = np.random.default_rng(seed + 1)
    weights = [float(n) for n in rng.integers(1, 5000, count)]
    first = total(values, weights)
    for _ in range(3):
        made, other = ExactSum(sum(weights)), ExactSum(sum(weights))
        for i in rng.permutation(count):
            (made if rng.integers(2) else other).add(values[i], weights[i], told(values[i], rng))
        if other.weight:
            made.merge(other.parts())
        assert torch.equal(made.sum(), first.sum())


def test_many_small_terms_of_one_sign_stay_in_range() -> None:
    # With all bits of a float64 and a bound just small enough: a handful of them fill the fine sum.
    rng = np.random.default_rng(3)
    numerators = rng.integers(2**49, 2**50, (1000, 4))
    made = ExactSum(1.0)
    for row in torch.from_numpy(numerators.astype(np.float64) * 2.0**-58):
        made.add(row, largest=0.999 * SMALL)
    wanted = [Fraction(int(n), 2**58) for n in numerators.astype(object).sum(0)]
    assert [Fraction(v) for v in made.sum().tolist()] == [Fraction(float(w)) for w in wanted]
    parts = made.parts()
    assert float(parts.fine.abs().max()) <= 2.0**-21
    exact = [Fraction(c) + Fraction(f) for c, f in zip(parts.coarse.tolist(), parts.fine.tolist(), strict=True)]
    assert exact == wanted


@pytest.mark.parametrize("count", [4, 10, 100, 1000])
@pytest.mark.parametrize("same_sign", [False, True])
@pytest.mark.parametrize("unit", [-21, -20, -12, 0, 20])
def test_any_order_gives_the_same_bits_for_many_clients(count: int, same_sign: bool, unit: int) -> None:
    # The hard case: terms about the coarse unit of a two-part sum, with all bits of a float64, that add up one way:
    # the sum of their fine parts must not outgrow a float64 either.
    rng = np.random.default_rng(count)
    values = rng.uniform(0 if same_sign else -1, 1, (count, 100)) * 2.0**unit
    values = values * (2.0 ** math.ceil(math.log2(count)))  # the scaling of ExactSum, undone
    terms = [torch.from_numpy(v) for v in values]
    first = total(terms, [1.0] * count).sum()
    for _ in range(4):
        order = rng.permutation(count)
        assert torch.equal(total([terms[i] for i in order], [1.0] * count).sum(), first)


@QUICK
@given(seed=st.integers(0, 2**32), count=st.integers(1, 60), high=st.floats(-30, math.log2(LIMIT) - 0.1))
def test_the_sum_is_right(seed: int, count: int, high: float) -> None:
    values = drawn(seed, count, 16, high - 40, high)
    weights = [float(n) for n in np.random.default_rng(seed).integers(1, 1000, count)]
    made = total(values, weights)
    exact = [
        sum((Fraction(float(v[i])) * Fraction(w) for v, w in zip(values, weights, strict=True)), Fraction(0))
        for i in range(16)
    ]
    scale = 2.0 ** math.ceil(math.log2(sum(weights)))
    for found, wanted in zip(made.sum().tolist(), exact, strict=True):
        # Each term is rounded to the grid of the scaled sum; one more rounding of float64 at the end.
        assert abs(Fraction(found) - wanted) <= Fraction(count * GRID * scale) + abs(wanted) * Fraction(2.0**-51)
    for found, wanted in zip(made.mean().tolist(), exact, strict=True):
        assert found == pytest.approx(float(wanted / Fraction(sum(weights))), rel=1e-14, abs=2 * count * GRID)


@QUICK
@given(st.lists(st.floats(-(2.0**30), 2.0**30, width=32), min_size=1, max_size=30))
def test_the_sum_agrees_with_fsum(numbers: list[float]) -> None:
    found = total([torch.tensor([x]) for x in numbers], [1.0] * len(numbers)).sum()
    assert float(found) == pytest.approx(math.fsum(numbers), rel=1e-15, abs=32 * len(numbers) * GRID)


def test_a_client_that_fails_only_changes_the_divisor() -> None:
    a, b = torch.tensor([1.0, -3.0]), torch.tensor([5.0, 7.0])
    made = total([a, b], [10.0, 30.0], expected=100.0)  # a third client with 60 samples never answered
    assert made.weight == 40
    assert made.mean().tolist() == [(10 * 1 + 30 * 5) / 40, (10 * -3 + 30 * 7) / 40]


def test_cancellation_leaves_the_small_rest() -> None:
    made = total([torch.tensor([2.0**30]), torch.tensor([2.0**-40]), torch.tensor([-(2.0**30)])], [1.0] * 3)
    assert float(made.sum()) == 2.0**-40


def test_very_many_terms_stay_exact() -> None:
    # All of one sign and with all their bits: sums by the integers that the terms are multiples of.
    rng = np.random.default_rng(0)
    count, size = 70_000, 3
    numerators = rng.integers(2**40, 2**50, (count, size))
    made = ExactSum(2.0**17)
    for row in torch.from_numpy(numerators.astype(np.float64) * 2.0**-41):  # scaled: multiples of 2^-58
        made.add(row)
    wanted = [Fraction(int(n), 2**41) for n in numerators.astype(object).sum(0)]
    assert [Fraction(v) for v in made.sum().tolist()] == [Fraction(float(w)) for w in wanted]


def test_the_terms_are_not_changed() -> None:
    value = torch.tensor([1.5, 2.5], dtype=torch.float64)
    made = ExactSum(4)
    made.add(value, 3.0)
    made.add(value)
    assert value.tolist() == [1.5, 2.5]
    assert made.sum().tolist() == [6.0, 10.0]


@QUICK
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 40),
    low=st.floats(-60, 24),
    span=st.floats(0, 90),
    groups=st.integers(1, 8),
)
def test_any_division_into_parts_gives_the_same_bits(
    seed: int, count: int, low: float, span: float, groups: int
) -> None:
    values = drawn(seed, count, 64, low, min(low + span, math.log2(LIMIT) - 0.1))
    rng = np.random.default_rng(seed + 1)
    weights = [float(n) for n in rng.integers(1, 5000, count)]
    whole = total(values, weights)
    for _ in range(3):
        made = [ExactSum(sum(weights)) for _ in range(groups)]
        for i in rng.permutation(count):
            made[rng.integers(groups)].add(values[i], weights[i])
        full = [part for part in made if part.weight]
        order = rng.permutation(len(full))
        first = full[order[0]]  # which goes on with what the others have, some of them by way of another
        for i in order[1:]:
            between = ExactSum(sum(weights))
            between.merge(full[i].parts())
            first.merge(between.parts() if rng.integers(2) else full[i].parts())
        assert torch.equal(first.sum(), whole.sum())
        assert torch.equal(first.mean(), whole.mean())
        assert first.weight == whole.weight


def test_merged_sums_are_those_of_the_rounded_fractions() -> None:
    values = drawn(5, 30, 8, -40, 20)
    weights = [float(n) for n in np.random.default_rng(5).integers(1, 900, 30)]
    scale = Fraction(2) ** -math.ceil(math.log2(sum(weights)))
    merged = ExactSum(sum(weights))
    for k in range(7):
        merged.merge(total(values[k::7], weights[k::7], sum(weights)).parts())
    for i, found in enumerate(merged.sum().tolist()):
        # float64 rounds the product; what is left is a whole number of grid steps, and sums of these are exact.
        terms = [Fraction(float(v[i]) * (w * float(scale))) for v, w in zip(values, weights, strict=True)]
        exact = sum((Fraction(round(t / Fraction(GRID))) for t in terms), Fraction(0)) * Fraction(GRID)
        assert found == float(exact) / float(scale)


def test_a_million_clients_in_parts_stay_in_range() -> None:
    # The largest rests that there are, all of one sign: 2^-21 in units of 2^-58 each, far more of them than a float64
    # could add up by itself. Parts are merged until the sum that takes them has carried, too.
    expected, count = 2.0**25, 2**17 + 5
    value = torch.tensor([(2.0**-21 - 2.0**-58) * expected], dtype=torch.float64)
    part = total([value] * 200, [1.0] * 200, expected)
    wanted = 200 * Fraction(2.0**-21 - 2.0**-58)
    parts = part.parts()
    assert abs(float(parts.fine)) <= 2.0**-21
    assert Fraction(float(parts.coarse)) + Fraction(float(parts.fine)) == wanted
    made = ExactSum(expected)
    for n in range(count):
        made.merge(parts)
        if n % 9973 == 0 or n > count - 3:
            rest = made.parts()
            assert Fraction(float(rest.coarse)) + Fraction(float(rest.fine)) == (n + 1) * wanted
    assert made.weight == 200 * count < expected


def test_a_part_is_left_as_it_is() -> None:
    part, made = total([torch.tensor([1.5, 2.5])], [3.0], 8), ExactSum(8)
    parts = part.parts()
    made.merge(parts)
    made.add(torch.tensor([1.0, 1.0]), 2.0)
    assert part.sum().tolist() == [4.5, 7.5] and ((parts.coarse + parts.fine) * 8).tolist() == [4.5, 7.5]
    part.add(torch.tensor([1.0, 1.0]))
    assert made.sum().tolist() == [6.5, 9.5] and made.weight == 5


def test_sums_of_different_scales_are_not_merged() -> None:
    with pytest.raises(ValueError, match="different scales"):
        ExactSum(8).merge(total([torch.ones(2)], [1.0], 4).parts())
    with pytest.raises(ValueError, match="sum of nothing"):
        ExactSum(8).parts()


def test_the_sum_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="sum of nothing"):
        ExactSum(1.0).sum()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, LIMIT, -LIMIT, 3e38])
def test_what_cannot_be_summed_is_refused(bad: float) -> None:
    good = torch.tensor([0.0, 1.0])
    assert not fits(good, torch.tensor([1.0, bad, 2.0]))
    assert not fits(torch.tensor([bad], dtype=torch.float64), good)


def test_what_can_be_summed_is_let_through() -> None:
    below = float(np.nextafter(np.float32(LIMIT), np.float32(0)))
    assert fits(torch.tensor([below, -below, 0.0, 1e-45]))
    assert fits(torch.empty(0), torch.zeros(3))
    assert fits()
    assert fits(torch.tensor([5], dtype=torch.int64), torch.tensor([True, False]))  # a client may remember flags


def test_values_at_the_limit_are_summed_in_range() -> None:
    below = float(np.nextafter(np.float32(LIMIT), np.float32(0)))
    for count in (1, 2, 3, 100, 1000):
        made = total([torch.tensor([below])] * count, [7.0] * count)
        assert float(made.mean()) == pytest.approx(below, rel=1e-15)
