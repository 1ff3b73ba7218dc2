"""What the server does with a site that is slow, gone, back again, or sends what it should not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Error, Message, RecordDict

from isofed.errors import RunError, UserError
from isofed.flower import crew
from isofed.result import Result
from tests.flower.loop import Fault, Loop, asked
from tests.flower.test_equal import deployed, simulated, table

BAD = 101  # the node of site 1


def spoilt(change: Callable[[dict[str, Any], ArrayRecord, Message], Any], when: int = 2) -> Fault:
    """A fault of site 1 in one round."""

    def fault(node: int, message: Message, answer: RecordDict) -> RecordDict | Error | None:
        if node != BAD or asked(message).get("do") != "train" or asked(message)["round"] != when:
            return answer
        facts, arrays = answer["facts"], answer["arrays.0"]
        assert isinstance(arrays, ArrayRecord)
        made = change(facts, arrays, message)  # type: ignore[arg-type]
        return made if isinstance(made, Error) else None if made == "silence" else answer

    return fault


def run(folder: Path, fault: Fault, **changes: Any) -> Result:
    values = table(folder, clients=3, rounds=3, deadline=0.6, patience=2.0, **changes)
    return deployed(folder, values, Loop(values, folder / "states", 3, fault))


def array(old: Array, values: np.ndarray | None = None, **changes: Any) -> Array:
    data = old.data if values is None else values.astype(np.float32).tobytes()
    form = {"dtype": old.dtype, "shape": old.shape, "stype": old.stype, "data": data} | changes
    return Array(form["dtype"], form["shape"], form["stype"], form["data"])


def numbers(old: Array) -> np.ndarray:
    return np.frombuffer(old.data, np.float32).copy()


def nan(facts: Any, arrays: ArrayRecord, message: Message) -> None:
    values = numbers(arrays["update"])
    values[3] = np.nan
    arrays["update"] = array(arrays["update"], values)


def infinite(facts: Any, arrays: ArrayRecord, message: Message) -> None:
    values = numbers(arrays["update"])
    values[-1] = np.inf
    arrays["update"] = array(arrays["update"], values)


def shorter(facts: Any, arrays: ArrayRecord, message: Message) -> None:
    arrays["update"] = array(arrays["update"], numbers(arrays["update"])[1:], shape=(arrays["update"].shape[0] - 1,))


def untrue(facts: Any, arrays: ArrayRecord, message: Message) -> None:
    arrays["update"] = array(arrays["update"], data=arrays["update"].data[:-4])  # says more than it holds


def missing(facts: Any, arrays: ArrayRecord, message: Message) -> None:
    del arrays["update"]


def more(facts: Any, arrays: ArrayRecord, message: Message) -> None:
    arrays["sum/extra"] = array(arrays["update"])


def npy(facts: Any, arrays: ArrayRecord, message: Message) -> None:
    arrays["update"] = Array(numbers(arrays["update"]))  # Flower's own form, with a header to be parsed


def stale(facts: Any, arrays: ArrayRecord, message: Message) -> None:
    facts["round"] = facts["round"] - 1


def foreign(facts: Any, arrays: ArrayRecord, message: Message) -> None:
    facts["client"] = 0


def other_run(facts: Any, arrays: ArrayRecord, message: Message) -> None:
    facts["run"] = "0" * 32


def text(facts: Any, arrays: ArrayRecord, message: Message) -> None:
    facts["steps"] = "many"


def far_too_long(facts: Any, arrays: ArrayRecord, message: Message) -> None:
    arrays["update"] = array(arrays["update"], 5000 * numbers(arrays["update"]))


def silence(facts: Any, arrays: ArrayRecord, message: Message) -> str:
    return "silence"


def crash(facts: Any, arrays: ArrayRecord, message: Message) -> Error:
    return Error(code=2, reason="the app\n has crashed \x1b[31m")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (nan, "sent NaN or numbers out of range"),
        (infinite, "sent NaN or numbers out of range"),
        (shorter, "sent 'update' as float32 ["),
        (untrue, "bytes, where"),
        (missing, "sent no 'update'"),
        (more, "sent 'sum/extra', which nobody asked for"),
        (npy, "bytes, where"),
        (stale, "sent an update of round 1 in round 2"),
        (foreign, "belongs to another run or site"),
        (other_run, "belongs to another run or site"),
        (text, "sent no proper 'steps'"),
        (far_too_long, "times as long as the others"),
        (silence, "did not answer within 0.6 s"),
        (crash, "failed: the app has crashed [31m"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bad_update_is_left_out_and_the_record_names_site_and_reason(
    tmp_path: Path, change: Any, reason: str
) -> None:
    result = run(tmp_path, spoilt(change), method="scaffold")
    assert [line["sites"] for line in result.history] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    (event,) = result.history[1]["events"]
    assert event["client"] == 1
    assert event["event"].startswith("(site 'clinic-1') ")
    assert reason in event["event"]
    recorded = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert recorded[1]["events"] == [event]


def test_what_is_left_out_leaves_no_trace_at_the_server_or_the_site(tmp_path: Path) -> None:
    """The same bits, whatever was wrong with the update; and the site has gone back to its state before it."""
    one = run(tmp_path / "a", spoilt(nan), method="scaffold")
    other = run(tmp_path / "b", spoilt(silence), method="scaffold")
    assert all(one.weights[name].equal(value) for name, value in other.weights.items())
    assert not all(one.weights[name].equal(value) for name, value in simulated_three(tmp_path).items())


def simulated_three(folder: Path) -> dict[str, Any]:
    return simulated(table(folder, clients=3, rounds=3, method="scaffold")).weights


def test_too_few_good_updates_skip_a_round_which_changes_nothing(tmp_path: Path) -> None:
    result = run(tmp_path, spoilt(nan), method="scaffold", min_clients=3, keep="every:1")
    lines = result.history
    assert [line.get("skipped") for line in lines] == [None, "2 good updates where min_clients=3", None]
    assert [line["clients"] for line in lines] == [3, 0, 3]
    assert lines[1]["sites"] == []
    assert lines[1]["accuracy"] == lines[0]["accuracy"]
    kept = sorted((tmp_path / "run" / "kept").glob("*.safetensors"))
    from isofed.files import load_tensors

    first, second, third = (load_tensors(path)[0] for path in kept)
    assert all(second[name].equal(value) for name, value in first.items())
    assert not all(third[name].equal(value) for name, value in first.items())


def test_a_late_answer_is_recorded_and_not_used(tmp_path: Path) -> None:
    held: list[Message] = []

    class Late(Loop):
        def _put(self, message: Message) -> str:
            name = super()._put(message)
            facts = asked(message)
            if message.metadata.dst_node_id == BAD and facts.get("do") == "train" and facts["round"] == 1:
                held.append(self._answers.pop(name))
            elif held and facts.get("round") == 2:
                late = held.pop()
                self._answers[late.metadata.reply_to_message_id] = late
            return name

    values = table(tmp_path, clients=3, rounds=3, deadline=0.6)
    result = deployed(tmp_path, values, Late(values, tmp_path / "states", 3))
    told = [[event["event"] for event in line["events"]] for line in result.history]
    assert told[0] == ["(site 'clinic-1') did not answer within 0.6 s"]
    assert told[2] == ["(site 'clinic-1') sent its update of round 1 too late"]
    assert [line["sites"] for line in result.history] == [[0, 2], [0, 1, 2], [0, 1, 2]]


def test_a_site_that_goes_and_comes_back(tmp_path: Path) -> None:
    values = table(tmp_path, clients=3, rounds=4, method="scaffold")

    class Away(Loop):
        def get_node_ids(self) -> list[int]:
            rounds = [asked(m)["round"] for m in self.sent if asked(m).get("do") == "train"]
            return [n for n in self.nodes if n != BAD or not rounds or max(rounds) not in (1, 2)]

    result = deployed(tmp_path, values, Away(values, tmp_path / "states", 3))
    assert [line["sites"] for line in result.history] == [[0, 1, 2], [0, 2], [0, 2], [0, 1, 2]]
    assert result.history[1]["events"] == [{"client": 1, "event": "(site 'clinic-1') is not connected"}]


class Slow(Loop):
    """Site 1 is connected only when the server has looked so many times, or never."""

    looks: float = 30

    def get_node_ids(self) -> list[int]:
        self.looks -= 1
        return [n for n in self.nodes if n != BAD or self.looks < 0]


def test_a_run_that_goes_on_waits_for_sites_that_are_still_connecting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "SETTLE", 0.1)
    monkeypatch.setattr(crew, "POLL", 0.03)
    few, more = table(tmp_path, clients=3, rounds=1), table(tmp_path, clients=3, rounds=3)
    deployed(tmp_path, few, Loop(few, tmp_path / "states", 3))
    result = deployed(tmp_path, more, Slow(more, tmp_path / "states", 3))
    assert [line["sites"] for line in result.history] == [[0, 1, 2]] * 3
    assert all(result.weights[name].equal(value) for name, value in simulated(more).weights.items())


def test_a_run_that_goes_on_does_so_without_a_site_that_stays_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "SETTLE", 0.1)
    few = table(tmp_path, clients=3, rounds=1, patience=0.6)
    deployed(tmp_path, few, Loop(few, tmp_path / "states", 3))
    more = few | {"rounds": 2}
    grid = Slow(more, tmp_path / "states", 3)
    grid.looks = math.inf
    result = deployed(tmp_path, more, grid)
    assert [line["sites"] for line in result.history] == [[0, 1, 2], [0, 2]]
    said = [record.getMessage() for record in caplog.records]
    assert "isofed: waits for site 1, up to 0.6 s (patience= of the run)" in said
    assert "isofed: goes on without site 1, not connected after 0.6 s" in said


def test_a_number_belongs_to_the_node_that_first_gave_it(tmp_path: Path) -> None:
    values = table(tmp_path, patience=1.0)
    deployed(tmp_path, values, Loop(values, tmp_path / "states", 2))
    (tmp_path / "run" / "result.json").unlink()
    grid = Loop(values, tmp_path / "states", 2)
    grid.nodes = {200: grid.nodes[100], 101: grid.nodes[101]}
    grid.contexts[200] = grid.contexts[100]
    why = r"without site 0; a node that is connected \('clinic-0'\) says it is site 0, and has another key than"
    with pytest.raises(RunError, match=f"only 1 of 2 sites are connected, {why}"):
        deployed(tmp_path, values, grid)


def test_a_run_goes_on_with_more_rounds_and_not_with_other_settings(tmp_path: Path) -> None:
    few, more = table(tmp_path, rounds=2), table(tmp_path, rounds=4)
    deployed(tmp_path, few, Loop(few, tmp_path / "states", 2))
    result = deployed(tmp_path, more, Loop(more, tmp_path / "states", 2))
    whole = table(tmp_path / "whole", rounds=4)
    at_once = deployed(tmp_path / "whole", whole, Loop(whole, tmp_path / "whole" / "states", 2))
    assert [line["round"] for line in result.history] == [1, 2, 3, 4]
    assert all(torch.equal(result.weights[k], v) for k, v in at_once.weights.items())
    other = more | {"lr": 0.7}
    with pytest.raises(UserError, match="holds a run with another lr"):
        deployed(tmp_path, other, Loop(other, tmp_path / "states", 2))
    with pytest.raises(UserError, match="has 4 rounds already"):
        deployed(tmp_path, few, Loop(few, tmp_path / "states", 2))


def test_sites_that_never_come_are_named(tmp_path: Path) -> None:
    values = table(tmp_path, clients=3, patience=0.5)
    with pytest.raises(RunError, match="after 0.5 s only 2 of 3 sites are connected, without site 2"):
        deployed(tmp_path, values, Loop(values, tmp_path / "states", 2))


def test_what_cannot_be_run_is_said_before_any_site_is_waited_for(tmp_path: Path) -> None:
    about = {"data": "sites", "partition": "iid", "classes": "a,b", "shape": "1,8,8", "patience": 60.0}
    noised = {"method": "clip_update:norm=1+gaussian:noise=1,draws=system", "test_data": str(tmp_path / "none")}
    for changes, said in (
        ({}, "'.*none'"),
        ({"test_data": "", "method": "clip_update:norm=1"}, "statistics of batch norm"),
    ):
        values = table(tmp_path, **{**about, **noised, **changes}, model="cnn")
        with pytest.raises(UserError, match=said):
            deployed(tmp_path, values, Loop(values, tmp_path / "states", 0))


def test_a_site_that_has_lost_its_state_says_so(tmp_path: Path) -> None:
    values = table(tmp_path, clients=3, rounds=3, method="scaffold")

    def lose(node: int, message: Message, answer: RecordDict) -> RecordDict:
        if node == BAD and asked(message).get("round") == 1:
            for path in (tmp_path / "states" / "1").rglob("*.safetensors"):
                path.unlink()
        return answer

    result = deployed(tmp_path, values, Loop(values, tmp_path / "states", 3, lose))
    events = [event["event"] for line in result.history for event in line["events"]]
    lost = "(site 'clinic-1') has lost what it remembered after round 1: put its state folder back"
    assert events == [lost, lost]


def test_last_questions_go_on_without_one_site_and_not_without_two(tmp_path: Path) -> None:
    def mute(nodes: set[int]) -> Fault:
        return lambda node, message, answer: None if node in nodes and asked(message)["do"] == "answer" else answer

    result = run(tmp_path / "a", mute({BAD}), method="fedavg+ffc")
    assert any("clinic-1" in note and "when asked 'ffc'" in note for note in result.notes)
    with pytest.raises(RunError, match="too few sites have answered 'ffc'"):
        run(tmp_path / "b", mute({BAD, 102}), method="fedavg+ffc")


def test_what_cannot_be_read_is_that_sites_answer_and_no_others(tmp_path: Path) -> None:
    class Garbled(Loop):
        def pull_messages(self, message_ids: Any) -> Any:
            found = super().pull_messages(message_ids)
            for message in found:
                if message.metadata.src_node_id == BAD and message.metadata.message_type == "train":
                    raise ValueError("no such object")
            return found

    values = table(tmp_path, clients=3, rounds=1)
    result = deployed(tmp_path, values, Garbled(values, tmp_path / "states", 3))
    assert result.history[0]["sites"] == [0, 2]
    said = "(site 'clinic-1') sent a message that cannot be read (ValueError)"
    assert result.history[0]["events"] == [{"client": 1, "event": said}]


def test_a_node_that_never_introduces_itself_holds_up_one_round_at_most(tmp_path: Path) -> None:
    def mute(node: int, message: Message, answer: RecordDict) -> RecordDict | None:
        return None if node == 102 else answer

    values = table(tmp_path, clients=2, rounds=3, deadline=0.5)
    grid = Loop(values, tmp_path / "states", 3, mute)
    result = deployed(tmp_path, values, grid)
    assert sum(1 for message in grid.sent if message.metadata.dst_node_id == 102) == 1
    assert [line["sites"] for line in result.history] == [[0, 1]] * 3


def test_who_takes_part_is_read_back_or_said_to_be_damaged(tmp_path: Path) -> None:
    values = table(tmp_path)
    deployed(tmp_path, values)
    path = tmp_path / "run" / "sites.json"
    known = json.loads(path.read_text())
    assert known["sites"]["1"]["name"] == "clinic-1"
    assert known["sites"]["1"].keys() == {"node", "name", "samples"}
    for broken in ("", "[]", '{"run": "x"}', '{"run": "x", "sites": {"a": {}}}', '{"run": "x", "sites": []}'):
        path.write_text(broken)
        with pytest.raises(RunError, match="is damaged; put it back"):
            deployed(tmp_path, values)
