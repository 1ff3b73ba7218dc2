"""Only what was asked for, in the form that was asked for, becomes a tensor."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from isofed.flower import wire
from isofed.flower.template import Down, Up
from isofed.flower.wire import BadMessage
from tests.engine.plain import small
from tests.flower.messages import message

TENSORS = {
    "update": torch.arange(6, dtype=torch.float32).view(2, 3),
    "sum/n": torch.tensor(3.5, dtype=torch.float64),
    "seen": torch.tensor([1, 2**40]),
    "none": torch.empty(0),
    "flags": torch.tensor([True, False]),
}


def test_tensors_come_back_as_they_were_and_aligned() -> None:
    content = wire.content({"round": 3}, wire.record(TENSORS))
    found = wire.tensors(content, wire.forms(TENSORS))
    assert found.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert found[name].dtype == value.dtype
        assert found[name].equal(value)
        assert found[name].numel() == 0 or found[name].data_ptr() % 64 == 0
    assert wire.facts(content)["round"] == 3


def test_several_records_make_one_message_but_no_name_comes_twice() -> None:
    one, two = wire.record({"a": torch.zeros(2)}), wire.record({"b": torch.ones(1)})
    forms = {"a": ("float32", (2,)), "b": ("float32", (1,))}
    assert wire.tensors(wire.content({}, one, two), forms)["b"].item() == 1
    with pytest.raises(BadMessage, match="sent 'a' twice"):
        wire.tensors(wire.content({}, one, wire.record({"a": torch.zeros(2)})), forms)


def test_nothing_is_made_of_a_size_that_only_the_message_claims() -> None:
    """A shape of terabytes is refused by comparing it, before anything is allocated."""
    huge = ArrayRecord({"update": Array("float32", (2**20, 2**20), "isofed.raw", b"\0" * 4)})
    with pytest.raises(BadMessage, match="where float32 \\[6\\] was expected"):
        wire.tensors(RecordDict({"arrays.0": huge}), {"update": ("float32", (6,))})
    short = ArrayRecord({"update": Array("float32", (6,), "isofed.raw", b"\0" * 20)})
    with pytest.raises(BadMessage, match="as 20 bytes, where 24 were expected"):
        wire.tensors(RecordDict({"arrays.0": short}), {"update": ("float32", (6,))})


@pytest.mark.parametrize("value", [None, -1, 1.5, True, "3", 2**60, [1]])
def test_whole_numbers(value: Any) -> None:
    with pytest.raises(BadMessage, match="no proper 'round'"):
        wire.whole({"round": value}, "round")


def test_texts_are_short_and_printable() -> None:
    content = wire.content({"problem": "a\x1b[31m\nb" + "x" * 5000})
    text = wire.text(wire.facts(content), "problem")
    assert len(text) == 2000
    assert text.startswith("a [31m b")
    with pytest.raises(BadMessage, match="no proper 'name'"):
        wire.text({"name": 3}, "name")


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"facts": MetricRecord({"isofed": 1})}),
        RecordDict({"facts": ConfigRecord({"isofed": 99})}),
        RecordDict({"facts": ConfigRecord({})}),
    ],
)
def test_messages_of_another_kind(content: RecordDict) -> None:
    with pytest.raises(BadMessage, match="another kind or version"):
        wire.facts(content)


def test_made_up_messages_are_refused_in_one_sentence() -> None:
    rng = random.Random(0)
    expected = {"update": ("float32", (6,)), "sum/n": ("float64", ())}
    refused: list[str] = []
    for _ in range(3000):
        content = made_up(rng)
        try:
            facts = wire.facts(content)
            wire.whole(facts, "round")
            wire.number(facts, "loss")
            wire.text(facts, "problem")
            wire.tensors(content, expected)
        except BadMessage as error:
            refused.append(str(error))
    assert 1000 < len(refused) < 3000
    assert max(map(len, refused)) < 400


def made_up(rng: random.Random) -> RecordDict:
    """A message that is right in parts."""
    names = ["update", "sum/n", "x" * rng.randrange(200), ""]
    arrays = {}
    for name in ("update", "sum/n", *rng.sample(names, rng.choice([0, 0, 0, 1, 2]))):
        right = rng.random() < 0.8
        dtype, shape = {"update": ("float32", (6,)), "sum/n": ("float64", ())}.get(name, ("int64", (1,)))
        if not right:
            dtype = rng.choice(["float32", "float64", "object", "int64", "", "O"])
            shape = tuple(rng.choice([0, 1, 6, -1, 2**40]) for _ in range(rng.randrange(4)))
        size = {"update": 24, "sum/n": 8}.get(name, 8) if right else rng.randrange(64)
        arrays[name] = Array(
            dtype, shape, rng.choice(["isofed.raw"] * 9 + ["numpy.ndarray", "pickle"]), rng.randbytes(size)
        )
    facts: dict[str, Any] = {"isofed": 1, "round": 2, "loss": 0.5, "problem": ""}
    if rng.random() < 0.3:
        facts[rng.choice([*facts, "more"])] = rng.choice(
            [-1, 1e300, float("nan"), "text", b"bytes", [1, 2], True, 2**62]
        )
    made = RecordDict({"facts": ConfigRecord(facts)})
    made[rng.choice(["arrays.0"] * 9 + ["other"])] = ArrayRecord(arrays)
    return made


def test_an_answer_of_too_many_pieces_is_not_fetched() -> None:
    from flwr.proto.message_pb2 import Message, ObjectTree
    from flwr.proto.runtime_pb2 import PullAppMessagesResponse

    from isofed.flower.limits import PIECE, limit, objects

    def tree(children: int) -> ObjectTree:
        return ObjectTree(object_id="0", children=[ObjectTree(object_id=str(i)) for i in range(children)])

    class Client:
        def PullMessages(self, request: object) -> PullAppMessagesResponse:
            return PullAppMessagesResponse(
                messages_list=[Message(), Message(), Message()], message_object_trees=[tree(3), tree(5000), tree(7)]
            )

    class Fetching:
        _runtime_client = Client()

    most = objects({"update": ("float32", (6,))})
    notes: list[str] = []
    limit(Fetching(), lambda: most, notes.append)  # type: ignore[arg-type]
    found = Fetching._runtime_client.PullMessages(None)
    assert [len(t.children) for t in found.message_object_trees] == [3, 7]
    assert len(found.messages_list) == 2
    assert notes == [f"an answer of more than {most} pieces was not fetched"]
    big = objects({"update": ("float32", (100 * 2**20,))})
    assert big - most == 400 * 2**20 // PIECE


def test_generated_answers_are_taken_or_refused_in_one_sentence(tmp_path: Path) -> None:
    """A sample; ``make fuzz`` takes a hundred thousand."""
    make, take = message(tmp_path)
    rng = random.Random(1)
    inputs = [make(rng) for _ in range(300)]
    assert len(set(inputs)) > 200
    for data in inputs:
        take(data)


@pytest.mark.parametrize("method", ["fednova+ffc", "scaffold", "ccvr", "fedexp+spherefed", "fedbabu"])
def test_recorded_traffic_is_what_travels(method: str) -> None:
    """But for what fills the gaps between tensors: less than 64 bytes for each."""
    run = small(method=method, clients=2, rounds=1)
    up, down = Up(run.world), Down.of(run.world, run.layout)
    sent = sum(wire.size(form) for form in up.visit.values())
    received = sum(wire.size(form) for part in (down.shared, down.sent, down.once) for form in part.values())
    answers = [sum(wire.size(form) for form in up.answer(name).values()) for name, _ in run.settings.method.exchanges]
    result = run.fit()
    gaps = 2 * 2 * 64 * len(run.layout.entries)  # twice the model at most, of two clients
    assert 0 <= 2 * sent - result.history[0]["bytes_up"] < gaps
    assert 0 <= 2 * received - result.history[0]["bytes_down"] < gaps
    assert [line["bytes_up"] for line in result.exchanges] == [2 * answer for answer in answers]
