"""The plan of a visit: which samples, in which batch, how often."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as quickly
from hypothesis import strategies as st

from isofed.config import settings
from isofed.draws import generator
from isofed.engine.plan import batches, steps_of
from isofed.federation import Federation


def rows(samples: np.ndarray, batch_norm: bool = False, seed: int = 0, **chosen: Any) -> list[list[int]]:
    made = batches(samples, settings(chosen), batch_norm, generator(seed, "order", 1, 0))
    assert len(made.order) == len(made.sizes)
    return [row[:size].tolist() for row, size in zip(made.order, made.sizes, strict=True)]


@quickly(max_examples=60, deadline=None)
@given(count=st.integers(1, 70), size=st.integers(1, 33), epochs=st.integers(1, 4))
def test_an_epoch_holds_every_sample_exactly_once(count: int, size: int, epochs: int) -> None:
    samples = np.arange(count) * 3 + 1000
    found = rows(samples, local_epochs=epochs, batch_size=size)
    per_epoch = -(-count // size)
    assert len(found) == epochs * per_epoch
    for epoch in range(epochs):
        part = found[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(i for row in part for i in row) == samples.tolist()
        assert [len(r) for r in part] == [size] * (count // size) + ([count % size] if count % size else [])


@quickly(max_examples=40, deadline=None)
@given(count=st.integers(1, 70), size=st.integers(1, 33), epochs=st.integers(1, 3))
def test_a_dropped_last_batch_leaves_full_ones(count: int, size: int, epochs: int) -> None:
    found = rows(np.arange(count), local_epochs=epochs, batch_size=size, last_batch="drop")
    assert [len(r) for r in found] == [size] * (epochs * (count // size))
    for epoch in range(epochs):
        part = [i for r in found[epoch * (count // size) : (epoch + 1) * (count // size)] for i in r]
        assert len(set(part)) == len(part)


@quickly(max_examples=40, deadline=None)
@given(count=st.integers(1, 50), size=st.integers(1, 16), steps=st.integers(1, 40))
def test_local_steps_are_counted_exactly_and_go_through_the_data_in_turn(count: int, size: int, steps: int) -> None:
    found = rows(np.arange(count), local_steps=steps, batch_size=size)
    assert len(found) == steps
    per_epoch = -(-count // size)
    for start in range(0, steps - per_epoch + 1, per_epoch):
        whole = [i for row in found[start : start + per_epoch] for i in row]
        assert sorted(whole) == list(range(count))


def test_a_single_sample_is_left_out_for_batch_norm_and_counted() -> None:
    chosen = settings({"batch_size": 4, "local_epochs": 3})
    made = batches(np.arange(9), chosen, True, generator(0, "order"))
    assert made.sizes == (4, 4) * 3
    assert made.skipped == 3
    made = batches(np.arange(9), chosen, False, generator(0, "order"))
    assert made.sizes == (4, 4, 1) * 3
    assert made.skipped == 0
    assert batches(np.arange(10), chosen, True, generator(0, "order")).skipped == 0


def test_a_client_with_one_sample_takes_no_step_with_batch_norm() -> None:
    chosen = settings({"batch_size": 4, "local_epochs": 2})
    made = batches(np.array([7]), chosen, True, generator(0, "order"))
    assert made.sizes == () and made.order.shape == (0, 4)
    assert made.skipped > 0
    assert rows(np.array([7]), batch_size=4, local_epochs=2) == [[7], [7]]
    made = batches(np.array([7]), settings({"batch_size": 4, "local_steps": 5}), True, generator(0, "order"))
    assert made.sizes == ()


def test_skipped_batches_are_those_that_would_have_been_taken() -> None:
    # One epoch of 5 samples in fours is a batch and a single: three steps take three batches and meet two singles.
    chosen = settings({"batch_size": 4, "local_steps": 3})
    made = batches(np.arange(5), chosen, True, generator(0, "order"))
    assert made.sizes == (4, 4, 4)
    assert made.skipped == 2
    # A client of one sample meets one single batch in each of its epochs, as any other client would.
    chosen = settings({"batch_size": 4, "local_epochs": 3})
    assert batches(np.arange(1), chosen, True, generator(0, "order")).skipped == 3


def test_nothing_to_do_is_no_steps() -> None:
    assert rows(np.arange(3), batch_size=8, last_batch="drop", local_epochs=2) == []
    assert rows(np.arange(3), batch_size=8, last_batch="drop", local_steps=2) == []


def test_orders_repeat_with_their_key_and_differ_without() -> None:
    samples, chosen = np.arange(40), settings({"batch_size": 8, "local_epochs": 2})

    def order(*key: Any) -> list[int]:
        made: list[int] = batches(samples, chosen, False, generator(*key)).order.reshape(-1).tolist()
        return made

    same = order(0, "order", 1, 0)
    assert order(0, "order", 1, 0) == same
    keys = [(1, "order", 1, 0), (0, "order", 2, 0), (0, "order", 1, 1), (0, "augment", 1, 0)]
    others = [order(*key) for key in keys]
    assert all(other != same for other in others)
    assert same[:40] != same[40:]  # shuffled anew in each epoch


@pytest.mark.parametrize(("chosen", "count"), [({"local_epochs": 3}, 21), ({"local_steps": 5}, 21)])
def test_the_estimate_for_scheduling_is_the_number_of_steps(chosen: dict[str, Any], count: int) -> None:
    s = settings({"batch_size": 4, **chosen})
    assert steps_of(count, s) == len(rows(np.arange(count), batch_size=4, **chosen))


def test_skipped_batches_reach_the_record() -> None:
    usual: dict[str, Any] = {
        "data": "synthetic:samples=27,test=10,classes=3",
        "partition": "iid",
        "clients": 3,
        "batch_size": 4,
        "local_epochs": 2,
        "rounds": 1,
        "executor": "serial",
    }
    with_norm = Federation(model="cnn", **usual).fit()
    without = Federation(model="cnn", norm="group:2", **usual).fit()
    assert (with_norm.history[0]["skipped_batches"], with_norm.history[0]["steps"]) == (3 * 2, 3 * 2 * 2)
    assert (without.history[0]["skipped_batches"], without.history[0]["steps"]) == (0, 3 * 2 * 3)
    assert with_norm.history[0]["samples"] == 3 * 2 * 8
    assert without.history[0]["samples"] == 3 * 2 * 9
