"""Running what is missing: budgets, going on, branches, failures."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from isofed.errors import UserError
from isofed.papers import budget
from isofed.papers.budget import Budget, Telling
from isofed.papers.data import Data
from isofed.papers.plan import Job, Length
from isofed.papers.results import Results
from isofed.papers.runner import run
from isofed.records import RunFolder

from .made import cell, jobs

FOREVER = Budget(None)


class Heard(Telling):
    """Remembers what it was told, and can do something at the end of a round."""

    def __init__(self, at_round: int = 0, act: Any = None) -> None:
        self.rounds: list[int] = []
        self.begun: list[str] = []
        self.left: list[str] = []
        self.failures: list[str] = []
        self.notes: list[str] = []
        self.later: list[str] = []
        self.measured: list[tuple[str, int, int]] = []
        self.clients = 0
        self._at, self._act = at_round, act

    def cell(self, number: int, of: int, job: Job) -> None:
        self.begun.append(job.cell.method)

    def round(self, line: dict[str, Any]) -> None:
        self.rounds.append(line["round"])
        if line["round"] == self._at:
            self._act()

    def client(self, done: int, of: int) -> None:
        self.clients += 1

    def diagnosing(self, section: str, done: int, of: int) -> None:
        self.measured.append((section, done, of))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def failed(self, job: Job, why: str) -> None:
        self.failures.append(why)

    def left_out(self, data: str, count: int, why: str) -> None:
        self.left.append(why)

    def put_off(self, job: Job, needed: float, left: float) -> None:
        self.later.append(str(job))


class Spent(Budget):
    """A budget that is over after so many rounds, or so many clients."""

    def __init__(self, seconds: float | None, heard: Heard, rounds: int = 99, clients: int = 99) -> None:
        super().__init__(seconds)
        object.__setattr__(self, "_over", lambda: len(heard.rounds) >= rounds or heard.clients >= clients)

    @property
    def left(self) -> float:
        return -1.0 if self._over() else math.inf  # type: ignore[attr-defined]


def measures(folder: Path, job: Job) -> Mapping[str, float | None]:
    found = Results(folder).of(job)
    assert found is not None
    return found.measures


def curve(folder: Path, job: Job) -> Any:
    found = Results(folder).of(job)
    assert found is not None
    return found.content["curve"]


@pytest.fixture
def short_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "RESERVE", 0.0)


def test_a_spent_budget_stops_between_rounds_and_the_next_call_goes_on(tmp_path: Path, short_reserve: None) -> None:
    todo = jobs(cell("FedUV"), seeds=1)
    spent = Heard()
    first = run(todo, Results(tmp_path / "a"), tmp_path / "runs", Spent(None, spent, rounds=2), spent)
    assert first.over and first.finished == 0 and first.missing == 1
    assert spent.rounds == [1, 2]
    again = Heard()
    second = run(todo, Results(tmp_path / "a"), tmp_path / "runs", FOREVER, again)
    assert second.finished == 1 and not second.over and again.rounds == [3, 4]
    run(todo, Results(tmp_path / "b"), tmp_path / "whole", FOREVER, Heard())
    assert curve(tmp_path / "a", todo[0]) == curve(tmp_path / "b", todo[0])


def test_what_cannot_be_expected_to_end_is_not_carried_on(tmp_path: Path, short_reserve: None) -> None:
    todo = jobs(cell("FedAvg", {"rounds": 100_000}))
    heard = Heard()
    outcome = run(todo, Results(tmp_path / "r"), tmp_path / "runs", Budget(3.0), heard, whole=True)
    assert outcome.over and len(heard.rounds) in (2, 3)


def test_a_budget_that_is_over_begins_nothing(tmp_path: Path) -> None:
    heard = Heard()
    outcome = run(jobs(cell()), Results(tmp_path / "r"), tmp_path / "runs", Budget(5.0), heard)
    assert outcome.over and heard.begun == [] and not (tmp_path / "runs").exists()


def test_a_request_to_end_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    todo, before = jobs(cell()), signal.getsignal(signal.SIGTERM)
    asked = Heard(at_round=2, act=lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(KeyboardInterrupt):
        run(todo, Results(tmp_path / "r"), tmp_path / "runs", FOREVER, asked)
    assert signal.getsignal(signal.SIGTERM) is before
    again = Heard()
    run(todo, Results(tmp_path / "r"), tmp_path / "runs", FOREVER, again)
    assert again.rounds == [3, 4]


def test_what_is_done_is_not_done_again_and_counts_for_equal_cells(tmp_path: Path) -> None:
    results = tmp_path / "r"
    run(jobs(cell()), Results(results), tmp_path / "runs", FOREVER, Heard())
    heard = Heard()
    elsewhere = cell(preset="table8", setting="the same")
    outcome = run(jobs(cell(), elsewhere, seeds=2), Results(results), tmp_path / "runs", FOREVER, heard)
    assert heard.begun == ["FedAvg"]  # the second seed, once
    assert outcome.missing == 0 and len(list(results.rglob("*.json"))) == 2


def test_a_result_without_a_measure_that_a_cell_needs_does_not_count(tmp_path: Path) -> None:
    run(jobs(cell()), Results(tmp_path / "r"), tmp_path / "runs", FOREVER, Heard())
    costly = cell(preset="table8", measures={"IID": "accuracy", "MACs": "macs"})
    heard = Heard()
    run(jobs(costly), Results(tmp_path / "r"), tmp_path / "runs", FOREVER, heard)
    assert heard.begun == ["FedAvg"] and measures(tmp_path / "r", jobs(costly)[0])["macs"]


def test_a_row_that_differs_only_at_the_end_branches_off(tmp_path: Path) -> None:
    branched = cell("FFC", after="FedAvg")
    heard = Heard()
    todo = jobs(cell(), branched)
    run(todo, Results(tmp_path / "r"), tmp_path / "runs", FOREVER, heard)
    assert heard.begun == ["FedAvg", "FFC"] and heard.rounds == [1, 2, 3, 4]
    # The same as if it had trained by itself.
    own = jobs(cell("FFC"))
    run(own, Results(tmp_path / "own"), tmp_path / "own-runs", FOREVER, Heard())
    one, two = dict(measures(tmp_path / "r", todo[1])), dict(measures(tmp_path / "own", own[0]))
    assert one.pop("seconds") and two.pop("seconds") and one == two
    assert one["before"] == measures(tmp_path / "r", todo[0])["accuracy"]


def test_a_row_that_was_killed_while_it_branched_off_is_branched_off_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    base, branched = jobs(cell())[0], jobs(cell("FFC", after="FedAvg"))[0]
    run([base], Results(tmp_path / "r"), tmp_path / "runs", FOREVER, Heard(), keep=True)
    with monkeypatch.context() as killed:
        killed.setattr(RunFolder, "checkpoint", stopped)
        with pytest.raises(KeyboardInterrupt):
            run([base, branched], Results(tmp_path / "r"), tmp_path / "runs", FOREVER, Heard(), keep=True)
    again = Heard()
    run([base, branched], Results(tmp_path / "r"), tmp_path / "runs", FOREVER, again, keep=True)
    assert again.rounds == [] and measures(tmp_path / "r", branched)["accuracy"] is not None
    # The state is the row's own now, so that nobody takes its settings for changed ones.
    last = RunFolder.open(branched.folder(tmp_path / "runs")).latest()
    assert last is not None and "ffc" in json.dumps(last.info["settings"]["method"])


def test_models_of_finished_runs_go_unless_they_are_to_be_kept(tmp_path: Path) -> None:
    todo = jobs(cell(), cell("FFC", after="FedAvg"))
    run(todo, Results(tmp_path / "r"), tmp_path / "runs", FOREVER, Heard())
    assert list((tmp_path / "runs").rglob("*.safetensors")) == []
    assert len(list((tmp_path / "runs").rglob("metrics.jsonl"))) == 2
    run(todo, Results(tmp_path / "k"), tmp_path / "kept", FOREVER, Heard(), keep=True)
    assert len(list((tmp_path / "kept").rglob("model.safetensors"))) == 2


def test_a_run_that_diverges_is_a_result(tmp_path: Path) -> None:
    todo = jobs(cell("FedAvg", {"lr": 1e30, "momentum": 0.0}))
    heard = Heard()
    run(todo, Results(tmp_path / "r"), tmp_path / "runs", FOREVER, heard)
    found = Results(tmp_path / "r").of(todo[0])
    assert found is not None and "NaN" in found.content["failure"] and found.measures == {}
    assert len(heard.failures) == 1


def test_cells_without_data_are_left_out_and_the_others_run(tmp_path: Path) -> None:
    absent = cell("FedUV", {"data": "cifar100", "root": str(tmp_path)})
    heard = Heard()
    outcome = run(jobs(absent, cell()), Results(tmp_path / "r"), tmp_path / "runs", FOREVER, heard)
    assert outcome.finished == 1 and outcome.missing == 1 and "cifar100" in heard.left[0]
    with pytest.raises(UserError, match="there is no data set 'cifar100'"):
        run(jobs(absent), Results(tmp_path / "r"), tmp_path / "runs", FOREVER, Heard())


def test_a_result_says_what_it_was_made_with_and_nothing_of_the_machines_folders(tmp_path: Path) -> None:
    job = Job(cell("FedUV", {"diagnose": "every:2"}), 1, Length(0.5), (("lr", "0.1"),))
    run([job], Results(tmp_path / "r"), tmp_path / "runs", FOREVER, Heard())
    (path,) = (tmp_path / "r").rglob("*.json")
    content = json.loads(path.read_text())
    assert content["settings"]["rounds"] == 2 and content["settings"]["lr"] == 0.1 and content["probe"] == {"lr": "0.1"}
    assert content["length"] == "scale=0.5" and content["seed"] == 1 and content["curve"]["round"] == [1, 2]
    assert {"isofed", "torch", "device_name", "data", "code"} <= content["environment"].keys()
    assert content["figure"]["lines"][0]["classifier_spectrum"] and content["measures"]["singular_sum"] > 0
    assert str(tmp_path) not in path.read_text() and "root" not in content["settings"]
    assert path.stat().st_size < 50_000


def test_what_others_like_it_took_too_long_for_is_put_off_and_shorter_ones_run(
    tmp_path: Path, short_reserve: None
) -> None:
    results = Results(tmp_path / "r")
    run(jobs(cell()), results, tmp_path / "runs", FOREVER, Heard())
    todo = jobs(cell("FedUV", {"rounds": 100_000}), cell("FedUV"))
    heard = Heard()
    outcome = run(todo, results, tmp_path / "runs", Budget(60.0), heard, whole=True)
    assert outcome.over and outcome.finished == 1 and outcome.missing == 1
    assert heard.begun == ["FedUV"] and heard.rounds == [1, 2, 3, 4]
    assert heard.later == [str(todo[0])] == list(outcome.put_off)


def test_what_was_given_up_tells_about_others_like_it(tmp_path: Path, short_reserve: None) -> None:
    heard = Heard()
    todo = jobs(cell("FedAvg", {"rounds": 100_000}), cell("FedUV", {"rounds": 100_000}))
    outcome = run(todo, Results(tmp_path / "r"), tmp_path / "runs", Budget(3.0), heard, whole=True)
    assert heard.begun == ["FedAvg"] and len(outcome.put_off) == 2  # the second one is not even begun


def test_a_row_that_only_asks_something_after_the_last_round_is_not_put_off(
    tmp_path: Path, short_reserve: None
) -> None:
    base, branched = jobs(cell())[0], jobs(cell("FFC", after="FedAvg"))[0]
    run([base], Results(tmp_path / "r"), tmp_path / "runs", FOREVER, Heard(), keep=True)
    (path,) = (tmp_path / "r").rglob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 1e6}))
    outcome = run(
        [base, branched], Results(tmp_path / "r"), tmp_path / "runs", Budget(60.0), Heard(), whole=True, keep=True
    )
    assert outcome.finished == 1 and not outcome.put_off


def test_a_run_that_goes_on_is_recorded_in_the_precision_that_it_was_begun_in(
    tmp_path: Path, short_reserve: None
) -> None:
    (begun,), heard = jobs(cell()), Heard()
    run([begun], Results(tmp_path / "r"), tmp_path / "runs", Spent(None, heard, rounds=2), heard)
    other = Job(begun.cell, 0, how=(("precision", "bf16"),))
    run([other], Results(tmp_path / "r"), tmp_path / "runs", FOREVER, Heard())
    found = Results(tmp_path / "r").of(other)
    assert found is not None and found.precision == "fp32"


def test_a_diagnosis_that_is_too_long_for_the_budget_is_given_up(tmp_path: Path, short_reserve: None) -> None:
    measures = {"IID": "accuracy", "IID;H_T": "H_T"}
    todo = jobs(cell(measures=measures, diagnose={"only": "curvature", "samples": 20, "probes": 8}))
    heard, again = Heard(), Heard()
    outcome = run(todo, Results(tmp_path / "r"), tmp_path / "runs", Spent(None, heard, rounds=4), heard)
    assert outcome.over and outcome.missing == 1 and heard.rounds == [1, 2, 3, 4]
    # What was known before stays known, for this cell's others and for whoever asks for no more.
    so_far = Results(tmp_path / "r")
    (only,) = jobs(cell())
    known = so_far.of(only)
    assert so_far.of(todo[0]) is None and known is not None and "H_T" not in known.measures
    assert [*so_far.by_seed(todo[0], "accuracy")] == [0] and not so_far.by_seed(todo[0], "H_T")
    assert so_far.undiagnosed(todo[0]) == known and "resumed" not in known.content
    assert run(todo, Results(tmp_path / "r"), tmp_path / "runs", FOREVER, again).finished == 1 and again.rounds == []
    sections, done, of = zip(*again.measured, strict=True)
    assert set(sections) == {"curvature"} and list(done) == sorted(done) and len(done) > 3
    # At first it is not known that fewer will do; at the end, all there are have been made.
    assert done[0] == 0 and list(of[1:]) == sorted(of[1:], reverse=True) and done[-1] == of[-1]
    whole = Results(tmp_path / "r").of(todo[0])
    assert whole is not None and whole.measures["accuracy"] == known.measures["accuracy"]
    assert whole.measures["H_T"] is not None and whole.content["how"] == known.content["how"]
    assert "resumed" not in whole.content and "undiagnosed" not in whole.content


def test_a_diagnosis_without_the_models_that_it_is_of_is_none(tmp_path: Path, short_reserve: None) -> None:
    todo = jobs(cell(values={"keep_clients": "last"}, diagnose={"only": "curvature", "samples": 20, "probes": 8}))
    heard, again = Heard(), Heard()
    run(todo, Results(tmp_path / "r"), tmp_path / "runs", Spent(None, heard, rounds=4), heard)
    (kept,) = (tmp_path / "runs").rglob("kept")
    shutil.rmtree(kept)
    outcome = run(todo, Results(tmp_path / "r"), tmp_path / "runs", FOREVER, again)
    assert (
        outcome.finished == 0
        and outcome.missing == 1
        and again.failures
        == [f"the clients' models that are to be measured are gone from {kept.parent}; remove it to train anew"]
    )


def test_data_are_read_once_however_cells_take_turns(tmp_path: Path) -> None:
    one, two = jobs(cell(), cell("FedUV", {"data": "synthetic:samples=100,test=80,classes=4,size=4"}))
    data = Data()
    first = data.get(one)
    data.get(two)
    assert data.get(one) is first


def test_a_round_that_is_too_long_for_the_budget_is_given_up(tmp_path: Path, short_reserve: None) -> None:
    todo, slow, quick = jobs(cell()), Heard(), Heard()
    outcome = run(todo, Results(tmp_path / "r"), tmp_path / "runs", Spent(None, slow, clients=5), slow)
    assert outcome.over and slow.rounds == [1]
    run(todo, Results(tmp_path / "r"), tmp_path / "runs", FOREVER, quick)
    assert quick.rounds == [2, 3, 4]


def test_results_that_cannot_be_written_are_told_of_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("in its place")
    with pytest.raises(UserError, match="results cannot be written to .*: .* is a file; give another results="):
        run(jobs(cell()), Results(tmp_path / "r" / "here"), tmp_path / "runs", FOREVER, Heard())
    assert not (tmp_path / "runs").exists()


def test_times_are_of_one_process_and_of_the_code_that_there_is(tmp_path: Path, short_reserve: None) -> None:
    todo = [Job(cell(m, {"rounds": 3}, measures={"time": "seconds"}), 0) for m in ("FedAvg", "FedUV")]
    folder, begun, again, idle = tmp_path / "r", Heard(), Heard(), Heard()
    run(todo, Results(folder), tmp_path / "runs", Spent(None, begun, rounds=2), begun)
    run(todo, Results(folder), tmp_path / "runs", FOREVER, again)
    assert begun.rounds == [1, 2] and again.rounds == [1, 2, 3] * 2
    run(todo, Results(folder), tmp_path / "runs", FOREVER, idle)
    assert idle.begun == []
    path = Results(folder).path(todo[1])
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"environment": content["environment"] | {"code": "of before"}}))
    outcome, last = run(todo, Results(folder), tmp_path / "runs", FOREVER, idle), json.loads(path.read_text())
    assert idle.begun == ["FedUV"] and idle.rounds == [1, 2, 3] and outcome.missing == 0
    assert last["environment"]["code"] == content["environment"]["code"]


def test_a_result_says_that_its_run_went_on_in_another_process(tmp_path: Path, short_reserve: None) -> None:
    (job,), heard = jobs(cell()), Heard()
    run([job], Results(tmp_path / "r"), tmp_path / "runs", Spent(None, heard, rounds=2), heard)
    run([job], Results(tmp_path / "r"), tmp_path / "runs", FOREVER, Heard())
    (found,) = Results(tmp_path / "r").all()
    assert found.content["resumed"] == 2 and Results(tmp_path / "r").timed(job) == []


def test_times_from_beside_other_work_do_not_count(tmp_path: Path) -> None:
    job, timing = jobs(cell())[0], Job(cell("FedUV", measures={"time": "seconds"}), 0)
    heard = Heard()
    outcome = run([job, timing], Results(tmp_path / "r"), tmp_path / "runs", FOREVER, heard, alone=False)
    (found,) = Results(tmp_path / "r").all()
    assert heard.begun == ["FedAvg"] and outcome.missing == 1
    assert found.content["alone"] is False and found.measures["accuracy"] is not None
    assert Results(tmp_path / "r").of(job) is not None and Results(tmp_path / "r").timed(job) == []
