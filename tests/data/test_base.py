"""The data set object: its checks, its statistics, its fingerprint and its validation part."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isofed.data import Dataset, Part, validation_split
from isofed.data.base import held_out, moments, stratified
from isofed.errors import UserError


def part(count: int = 6, classes: int = 2, floats: bool = False, domains: int = 0, channels: int = 1) -> Part:
    rng = np.random.default_rng(count)
    images = torch.from_numpy(rng.integers(0, 256, (count, 3, 4, channels), dtype=np.uint8))
    number = torch.arange(count)
    return Part(
        images.float() if floats else images, number % classes, number // classes % domains if domains else None
    )


def build(
    train: Part,
    test: Part | None = None,
    classes: tuple[str, ...] = ("cat", "dog"),
    domains: tuple[str, ...] = (),
    **more: Any,
) -> Dataset:
    test = part(domains=len(domains)) if test is None else test
    return Dataset.build("pets", classes, train, test, domains=domains, **more)


def test_shape_and_length_are_those_of_the_pictures() -> None:
    made = build(part(8, channels=2), part(channels=2))
    assert made.shape == (2, 3, 4)
    assert (len(made.train), len(made.test)) == (8, 6)


def test_subset_keeps_the_order_asked_for() -> None:
    whole = part(6, domains=2)
    some = whole.subset(np.array([4, 1]))
    assert torch.equal(some.images, whole.images[[4, 1]])
    assert some.labels.tolist() == [0, 1]
    assert some.domains is not None and some.domains.tolist() == [0, 0]
    assert some.images.is_contiguous()


def test_images_that_are_not_contiguous_are_made_so() -> None:
    turned = torch.zeros(2, 3, 4, 5, dtype=torch.uint8).permute(0, 2, 3, 1)
    assert Part(turned, torch.tensor([0, 1])).images.is_contiguous()


@pytest.mark.parametrize("floats", [False, True])
def test_moments_agree_with_numpy(floats: bool) -> None:
    images = part(50, floats=floats, channels=3).images
    values = images.numpy().astype(np.float64) / (1 if floats else 255)
    mean, std = moments(images)
    np.testing.assert_allclose(mean, values.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(std, values.std((0, 1, 2)), rtol=1e-9)


@pytest.mark.parametrize("value", [0, 7])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_constant_channel_is_not_divided_by_zero(value: int, dtype: torch.dtype) -> None:
    mean, std = moments(torch.full((5, 2, 2, 1), value, dtype=dtype))
    assert std[0] > 0
    assert mean[0] == pytest.approx(value / 255 if dtype == torch.uint8 else value)


@pytest.mark.parametrize("floats", [False, True])
def test_data_are_the_same_data_whatever_the_threads(floats: bool) -> None:
    # Or a run could not be taken up by a process that has others: the data would seem to have changed.
    images = np.random.default_rng(0).uniform(0, 255, (400, 16, 16, 2)).astype(np.float32 if floats else np.uint8)
    part, before = Part(images, np.arange(400) % 2), torch.get_num_threads()
    found = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            found.add(Dataset.build("mine", ["a", "b"], part, part).fingerprint)
        finally:
            torch.set_num_threads(before)
    assert len(found) == 1


def test_given_mean_and_std_are_kept() -> None:
    made = build(part(), mean=(0.5,), std=(0.25,))
    assert (made.mean, made.std) == ((0.5,), (0.25,))


def test_fingerprint_sees_every_number_that_matters_and_not_the_name() -> None:
    base = build(part(domains=2), domains=("a", "b"))
    assert base.fingerprint == build(part(domains=2), domains=("a", "b")).fingerprint
    assert base.fingerprint == dataclasses.replace(base, name="other").fingerprint
    assert base.test.domains is not None
    flipped = 1 - base.test.domains.clone()
    images = base.train.images.clone()
    images[0, 0, 0, 0] ^= 1
    changed = [
        dataclasses.replace(base, train=dataclasses.replace(base.train, images=images)),
        dataclasses.replace(base, train=dataclasses.replace(base.train, labels=1 - base.train.labels)),
        dataclasses.replace(base, test=dataclasses.replace(base.test, domains=flipped)),
        dataclasses.replace(base, classes=("cat", "cow")),
        dataclasses.replace(base, domains=("a", "c")),
        dataclasses.replace(base, mean=(0.25,)),
        dataclasses.replace(base, std=(0.25,)),
        dataclasses.replace(base, train=base.test, test=base.train.subset(np.arange(4))),
    ]
    prints = {base.fingerprint, *(c.fingerprint for c in changed)}
    assert len(prints) == len(changed) + 1
    assert all(len(p) == 32 and int(p, 16) >= 0 for p in prints)


def test_wrong_parts_are_refused() -> None:
    good = torch.zeros(2, 3, 3, 1, dtype=torch.uint8)
    with pytest.raises(UserError, match=r"shape \[N, H, W, C\], not \[2, 3, 3\]"):
        Part(good[..., 0], torch.tensor([0, 1]))
    with pytest.raises(UserError, match="uint8 or float32, not int64"):
        Part(good.long(), torch.tensor([0, 1]))
    with pytest.raises(UserError, match=r"labels must be int64 \[N\], not int32"):
        Part(good, torch.tensor([0, 1], dtype=torch.int32))
    with pytest.raises(UserError, match="2 images but 3 domains"):
        Part(good, torch.tensor([0, 1]), torch.tensor([0, 0, 0]))


def test_wrong_data_sets_are_refused() -> None:
    empty = part().subset(np.array([], dtype=np.int64))
    nan = part(floats=True)
    nan.images[0, 0, 0, 0] = float("nan")
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("no training samples", (empty,), {}),
        ("no test samples", (part(), empty), {}),
        (r"training images uint8 \[3, 4, 1\] but test images float32", (part(), part(floats=True)), {}),
        (r"but test images uint8 \[3, 4, 2\]", (part(), part(channels=2)), {}),
        ("nothing to tell apart", (part(classes=1), part(classes=1), ("cat",)), {}),
        ("names two of its classes the same", (part(), part(), ("cat", "cat")), {}),
        ("has the label 2: with 2 names they must be 0 to 1", (part(classes=3),), {}),
        ("has the label -1", (Part(part().images, part().labels - 1), part()), {}),
        (r"no training sample of class 'dog' \(number 1\)", (part(classes=1),), {}),
        ("no training sample of domain 'south'", (part(domains=1), part(domains=2)), {"domains": ("north", "south")}),
        ("has the domain 1", (part(domains=2), part(domains=1)), {"domains": ("north",)}),
        ("a domain for every sample of both parts", (part(domains=2), part()), {"domains": ("north", "south")}),
        ("a domain for every sample of both parts", (part(domains=2), part(domains=2)), {}),
        ("training images with NaN or infinite", (nan, part(floats=True)), {}),
        ("test images with NaN or infinite", (part(floats=True), nan), {}),
        ("1 channels, so mean and std need 1 numbers each, not 3 and 1", (part(),), {"mean": (0.5,) * 3}),
        ("std above zero", (part(),), {"std": (0.0,)}),
        ("finite mean", (part(),), {"mean": (float("inf"),)}),
    ]
    for message, given_parts, more in cases:
        with pytest.raises(UserError, match=message):
            build(*given_parts, **more)
    none = Part(torch.zeros(2, 0, 4, 1, dtype=torch.uint8), torch.tensor([0, 1]))
    with pytest.raises(UserError, match="without a pixel"):
        build(none, none)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    fraction=st.floats(0.01, 0.99),
    domains=st.integers(0, 3),
    seed=st.integers(0, 5),
)
def test_stratified_takes_the_share_of_every_group(labels: list[int], fraction: float, domains: int, seed: int) -> None:
    label = np.array(labels)
    domain = np.arange(len(label)) % domains if domains else None
    kept, taken = stratified(label, fraction, np.random.default_rng(seed), domain)
    assert sorted([*kept, *taken]) == list(range(len(label)))
    assert set(label[kept]) == set(label)
    assert domain is None or set(domain[kept]) == set(domain)
    for c in set(labels):
        for d in range(domains or 1):
            group = (label == c) & (True if domain is None else domain == d)
            share = fraction * group.sum()
            # Never more than the share rounded up; less than rounded down only to keep a sample of class or domain.
            assert np.floor(share) - (2 if domains else 1) <= group[taken].sum() <= np.ceil(share)
    stays = [(label == c).sum() * (1 - fraction) >= max(domains, 1) for c in set(labels)]
    stays += (
        [(domain == d).sum() * (1 - fraction) >= len(set(labels)) for d in set(domain)] if domain is not None else []
    )
    if all(stays):
        assert len(taken) == round(fraction * len(label))


def test_validation_part_is_stratified_disjoint_and_drawn_from_the_seed() -> None:
    whole = build(part(200, domains=2), part(domains=2), domains=("north", "south"))
    rest, valid = validation_split(whole, 0.1, seed=3)
    assert (len(rest.train), len(valid)) == (180, 20)
    assert torch.bincount(valid.labels).tolist() == [10, 10]
    assert valid.domains is not None and torch.bincount(valid.domains).tolist() == [10, 10]
    assert rest.test is whole.test and (rest.mean, rest.std) == (whole.mean, whole.std)
    assert rest.fingerprint != whole.fingerprint
    rows = {row.tobytes() for row in whole.train.images.numpy()}
    assert {row.tobytes() for row in rest.train.images.numpy()} | {r.tobytes() for r in valid.images.numpy()} == rows
    assert torch.equal(validation_split(whole, 0.1, seed=3)[1].images, valid.images)
    assert not torch.equal(validation_split(whole, 0.1, seed=4)[1].images, valid.images)


def test_validation_keeps_a_training_sample_of_every_class() -> None:
    rest, valid = validation_split(build(part(4)), 0.99, seed=0)
    assert sorted(rest.train.labels.tolist()) == [0, 1]
    assert len(valid) == 2


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, float("nan")])
def test_a_validation_share_outside_0_and_1_is_refused(fraction: float) -> None:
    with pytest.raises(UserError, match="between 0 and 1"):
        validation_split(build(part()), fraction, seed=0)


def test_an_empty_validation_or_test_part_is_refused() -> None:
    with pytest.raises(UserError, match=r"share of 0\.01 of 6 training samples is empty"):
        validation_split(build(part()), 0.01, seed=0)
    with pytest.raises(UserError, match="no test part and only 2 samples, too few to set 20% aside"):
        held_out("pets", part(2))
