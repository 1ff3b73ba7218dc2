"""Groups of samples, such as a patient's, are set aside whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isofed.data import Dataset, Part, validation_split
from isofed.data.base import held_out
from isofed.data.groups import numbered, whole_groups
from isofed.errors import UserError


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    samples=st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 12)), min_size=1, max_size=80),
    fraction=st.floats(0.01, 0.99),
    domains=st.integers(0, 3),
    seed=st.integers(0, 5),
)
def test_groups_stay_whole(samples: list[tuple[int, int]], fraction: float, domains: int, seed: int) -> None:
    labels, groups = np.array(samples).T
    where = np.arange(len(labels)) % domains if domains else None
    kept, taken = whole_groups(labels, groups, fraction, np.random.default_rng(seed), where)
    assert sorted([*kept, *taken]) == list(range(len(labels)))
    assert not set(groups[kept]) & set(groups[taken])
    assert set(labels[kept]) == set(labels)
    assert where is None or set(where[kept]) == set(where)
    assert len(taken) <= fraction * len(labels) + 1e-6


def test_every_class_and_site_gives_its_share() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(rng.integers(0, 3, size=600), 4)  # patients with four pictures of one class
    groups = np.repeat(rng.permutation(600), 4)
    where = np.repeat(rng.integers(0, 2, size=600), 4)
    _, taken = whole_groups(labels, groups, 0.2, np.random.default_rng(1), where)
    assert 0.2 * 2400 - 8 <= len(taken) <= 0.2 * 2400
    for label in range(3):
        for site in range(2):
            here = (labels == label) & (where == site)
            assert abs(here[taken].sum() - 0.2 * here.sum()) <= 8  # a patient less, or one more


@pytest.mark.parametrize("seed", range(5))
def test_a_small_site_gives_its_share_as_well(seed: int) -> None:
    """Ten sites of five patients with pictures of seven classes: a fifth of each is one patient, of whatever class."""
    groups = np.repeat(np.arange(50), 6)
    labels = np.random.default_rng(seed).integers(0, 7, size=300)
    _, taken = whole_groups(labels, groups, 0.2, np.random.default_rng(seed), groups // 5)
    assert np.bincount((groups // 5)[taken]).tolist() == [6] * 10


def test_the_sites_that_lack_most_come_first() -> None:
    """Of 24 and 16 pictures in patients of four, a fifth is 4.8 and 3.2: a patient of each, not two of one."""
    where = np.repeat([0, 1], [24, 16])
    for seed in range(8):
        labels = np.random.default_rng(seed).integers(0, 2, size=40)
        _, taken = whole_groups(labels, np.arange(40) // 4, 0.2, np.random.default_rng(seed), where)
        assert np.bincount(where[taken]).tolist() == [4, 4]


def test_small_strata_take_turns() -> None:
    """Three patients of each of ten classes: a fifth of three is nobody, and of thirty it is six."""
    labels = np.repeat(np.arange(10), 3)
    kept, taken = whole_groups(labels, np.arange(30), 0.2, np.random.default_rng(0))
    assert len(taken) == 6 and np.bincount(labels[taken]).max() == 1
    assert len(kept) == 24


def test_a_large_group_does_not_empty_its_neighbours() -> None:
    """A patient with 500 of 900 pictures is too large for a fifth; the other class gives one patient more at most."""
    labels = np.repeat([0, 1], [500, 400])
    groups = np.concatenate([np.zeros(500, np.int64), 1 + np.arange(400) // 10])
    for seed in range(5):
        _, taken = whole_groups(labels, groups, 0.2, np.random.default_rng(seed))
        assert 80 <= len(taken) <= 90 and set(labels[taken]) == {1}


def test_a_group_of_several_classes_counts_as_of_the_rarest() -> None:
    labels = np.array([0] * 8 + [1, 1])
    groups = np.array([0, 1, 2, 3, 4, 5, 6, 7, 7, 6])
    for seed in range(5):
        kept, taken = whole_groups(labels, groups, 0.5, np.random.default_rng(seed))
        assert len({6, 7} & set(groups[taken])) == 1 and len(taken) == 5 and set(labels[kept]) == {0, 1}


def made(groups: list[int] | None, **more: Any) -> Dataset:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, size=(40, 2, 2, 1), dtype=np.uint8)
    train = Part(images, np.arange(40) % 2, groups=None if groups is None else np.array(groups))
    return Dataset.build("mine", 2, train, Part(images, np.arange(40) % 2), **more)


def test_a_validation_part_has_whole_groups() -> None:
    whole = made([n // 4 for n in range(40)])
    rest, held = validation_split(whole, 0.3, seed=1)
    assert rest.train.groups is not None and held.groups is not None
    assert len(held) == 12 and not set(rest.train.groups.tolist()) & set(held.groups.tolist())
    assert torch.equal(validation_split(whole, 0.3, seed=1)[1].images, held.images)
    assert made([0] * 40).train.divided(0.5, np.random.default_rng(0))[1].tolist() == []
    with pytest.raises(
        UserError, match="is empty, because groups are set aside whole, and one of every class must stay"
    ):
        validation_split(made([0] * 40), 0.5, seed=0)


def test_a_test_part_has_whole_groups() -> None:
    part = made([n // 4 for n in range(40)]).train
    train, test = held_out("mine", part)
    assert len(test) == 8 and not set(train.groups.tolist()) & set(test.groups.tolist())  # type: ignore[union-attr]
    alone = Part(part.images, part.labels, groups=torch.zeros(40, dtype=torch.int64))
    with pytest.raises(UserError, match="no test part and 1 group of samples, too few or too large to set 20% aside"):
        held_out("mine", alone)


def test_groups_in_both_parts_of_a_split_that_was_given_are_told() -> None:
    images, labels = np.zeros((6, 2, 2, 1), dtype=np.uint8), np.arange(6) % 2

    def notes(train: list[int], test: list[int]) -> tuple[str, ...]:
        first, second = (Part(images, labels, groups=np.array(of)) for of in (train, test))
        return Dataset.build("mine", 2, first, second).notes

    assert notes([0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5]) == ()
    one = notes([0, 0, 1, 1, 2, 2], [2, 3, 4, 4, 5, 5])
    assert one == ("1 group has samples in both parts, so the test is not one of groups (such as patients) never seen",)
    assert notes([0, 0, 1, 1, 2, 2], [2, 0, 0, 4, 5, 5])[0].startswith("2 groups have samples in both parts")


def test_what_tells_groups_apart_is_numbered_alike_in_all_parts() -> None:
    first, second = numbered([np.array(["b", "a", "b"]), np.array(["c", "a"])])
    assert first.tolist() == [1, 0, 1] and second.tolist() == [2, 0]
    assert numbered([np.array([-7, 2**62, -7])])[0].tolist() == [0, 1, 0]
    near = 2**60 + np.arange(3)  # which floating point would not tell apart
    assert [list(part) for part in numbered([near, near.astype(np.uint64)])] == [[0, 1, 2], [0, 1, 2]]


def test_groups_must_fit_and_count_in_the_fingerprint() -> None:
    with pytest.raises(UserError, match="40 images but 39 groups"):
        made([0] * 39)
    assert made(None).fingerprint != made([n // 4 for n in range(40)]).fingerprint
