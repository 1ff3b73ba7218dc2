"""Paper and measured side by side: tolerances, ratios, orders, what was not run."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from isofed.errors import UserError
from isofed.papers import compare, show
from isofed.papers.compare import Entry, Order
from isofed.papers.plan import Job, Length, matching
from isofed.papers.presets import Preset, load
from isofed.papers.results import Results, code_version, head
from isofed.records import environment

from .made import ENVIRONMENT, cell, jobs, row, write

HOW = head(Job(cell(), 0))["how"]


def entry(paper: float | None, std: float | None, *values: float, measure: str = "accuracy", **more: Any) -> Entry:
    return Entry(cell(), "IID", measure, row(paper, std, **more), paper, (), values)


@pytest.mark.parametrize(
    ("made", "within"),
    [
        (entry(50.0, 1.0, 51.9), True),  # two of the paper's standard deviations
        (entry(50.0, 1.0, 52.1), False),
        (entry(50.0, 0.1, 50.5), False),  # the paper's, also where they are small
        (entry(50.0, None, 50.9), True),  # none printed, one seed: one point
        (entry(50.0, None, 51.1), False),
        (entry(50.0, None, 50.0, 54.0), True),  # ours, 2.83: two of them are more than the two points
        (entry(50.0, None, 52.0, 52.2), False),  # ours are small: one point
        (entry(100.0, None, 101.9, measure="macs"), True),  # counted: 2 %
        (entry(100.0, None, 102.1, measure="macs"), False),
        (entry(297.0, None, 290.0, measure="lambda_max"), None),  # no yardstick
        (entry(None, None, 50.0), None),  # unreadable
        (entry(50.0, 1.0), None),  # not run
    ],
)
def test_within_two_standard_deviations(made: Entry, within: bool | None) -> None:
    assert made.within is within


def test_a_table_is_made_of_its_results(tmp_path: Path) -> None:
    preset = load("feduv", "table1")
    chosen = matching(preset.cells, "cifar100,alpha=0.01")
    assert [c.method for c in chosen] == ["FedAvg", "FedUV", "FedProx", "MOON", "Freeze"]
    for seed, (one, two) in enumerate([(50.1, 47.0), (51.1, 49.0), (49.1, 48.0)]):
        write(tmp_path, Job(chosen[0], seed), {"accuracy": one})
        write(tmp_path, Job(chosen[1], seed), {"accuracy": two})
    results = Results(tmp_path)
    made = [e for e in compare.entries(preset, results) if e.found]
    first, second = made
    assert first.mean == pytest.approx(50.1) and first.std == pytest.approx(1.0) and first.paper == 51.6
    assert first.difference == pytest.approx(-1.5) and first.within is True
    assert second.difference == pytest.approx(-7.7) and second.within is False
    assert compare.orders(made) == [
        Order("CIFAR-100", "alpha=0.01", (("FedUV",), ("FedAvg",)), (("FedAvg",), ("FedUV",)))
    ]
    assert compare.orders(made)[0].agreeing == 0 and compare.orders(made)[0].pairs == 1
    assert compare.done(preset, results) == (2, 2, 45)
    # The same runs are rows of two other tables.
    assert compare.done(load("feduv", "table4"), results)[0] == 2
    assert compare.done(load("univarfl", "table1"), results)[0] == 1
    console = Console(record=True, width=200, color_system=None, file=io.StringIO())
    show.show(console, preset, results, preset.cells)
    text = console.export_text()
    assert "51.6 ± 1.7" in text and "50.1 ± 1.0" in text and "-7.7" in text
    assert "paper FedUV > FedAvg; here FedAvg > FedUV; 0 of 1 pairs agree" in text
    assert "not run: CIFAR-100 alpha=0.01 FedProx, MOON, Freeze; CIFAR-100 alpha=1.0;" in " ".join(text.split("\n"))


def test_shortened_and_tried_results_stay_out_of_the_full_table(tmp_path: Path) -> None:
    preset = load("feduv", "table1")
    (chosen,) = matching(preset.cells, "cifar100,alpha=0.01", "fedavg")
    write(tmp_path, Job(chosen, 0, Length(0.3)), {"accuracy": 41.0})
    write(tmp_path, Job(chosen, 0, Length(), (("lr", "0.1"),)), {"accuracy": 33.0})
    results = Results(tmp_path)
    assert [e for e in compare.entries(preset, results) if e.found] == []
    assert compare.done(preset, results) == (0, 1, 45)
    full, shortened = compare.lengths(preset, results)
    assert (full.label, shortened.label) == ("", "scale=0.3")
    assert [e.mean for e in compare.entries(preset, results, shortened) if e.found] == [41.0]
    ((tried, changes),) = compare.tried(preset, results)
    assert changes == {"lr": "0.1"} and tried.measures == {"accuracy": 33.0}


def test_results_of_what_a_preset_was_before_are_told_apart(tmp_path: Path) -> None:
    preset = load("feduv", "table1")
    (now,) = matching(preset.cells, "cifar100,alpha=0.01", "feduv")
    before = dataclasses.replace(now, values={**now.values, "lr": 0.5, "method": "feduv:mu=0.1"}, keys={})
    write(tmp_path, Job(before, 0), {"accuracy": 12.0})
    write(tmp_path, Job(now, 0), {"accuracy": 50.0})
    results = Results(tmp_path)
    ((old, changes),) = compare.tried(preset, results)
    assert old.measures == {"accuracy": 12.0} and changes == {"lr": "0.5", "method": "feduv:mu=0.1"}
    assert [e.mean for e in compare.entries(preset, results) if e.found] == [50.0]


def test_times_are_relative_to_those_on_the_same_device(tmp_path: Path) -> None:
    preset = load("feduv", "table5")
    fedavg, moon = matching(preset.cells, "cifar100", "FedAvg,MOON")
    write(tmp_path, Job(fedavg, 0), {"seconds": 2.0})
    write(tmp_path, Job(moon, 0), {"seconds": 3.0})
    made = {e.cell.method: e for e in compare.entries(preset, Results(tmp_path)) if e.found}
    assert made["MOON"].mean == 1.5 and made["MOON"].paper == pytest.approx(88 / 57)
    assert made["FedAvg"].mean == made["FedAvg"].paper == 1.0 and made["MOON"].within is None
    elsewhere = {**ENVIRONMENT, "device_name": "another"}
    write(tmp_path, Job(moon, 1), {"seconds": 9.0}, environment=elsewhere)
    write(tmp_path, Job(fedavg, 1), {"seconds": 3.0})
    (again,) = [e for e in compare.entries(preset, Results(tmp_path)) if e.cell.method == "MOON" and e.found]
    assert again.values == (1.5,)  # the second seed's times are of two devices


def test_what_is_not_finite_is_shown_as_that(tmp_path: Path) -> None:
    todo = jobs(cell(measures={"IID": "accuracy", "IID;H_T": "H_T"}, diagnose={"only": "curvature"}), seeds=2)
    write(tmp_path, todo[0], {"accuracy": 50.0, "H_T": None}, not_finite={"curvature": "it overflows"})
    accuracy, trace = compare._of(todo[0].cell, Results(tmp_path), Length())
    assert (show.here(accuracy), show.here(trace)) == ("50.0", "not finite")
    write(tmp_path, todo[1], {"accuracy": 50.0, "H_T": 3.0})
    _, trace = compare._of(todo[0].cell, Results(tmp_path), Length())
    assert show.here(trace) == "1 of 2 not finite"


def test_a_printed_divergence_agrees_with_one_here(tmp_path: Path) -> None:
    preset = load("spherefed", "table3")
    (norm,) = [c for c in preset.cells if c.method == "+Norm" and "MSE" in c.setting]
    write(tmp_path, Job(norm, 0), {}, failure="gave NaN")
    (made,) = [e for e in compare.entries(preset, Results(tmp_path)) if e.found]
    assert made.within is True and show.here(made) == "diverges" and show.printed(made) == "diverges"


def test_a_reference_is_needed_for_a_ratio(tmp_path: Path) -> None:
    slow = cell("FedUV", measures={"IID": "seconds"})
    preset = Preset("feduv", "table9", "", "", 1, (slow,), {})
    write(tmp_path, jobs(slow)[0], {"seconds": 3.0})
    (made,) = compare.entries(preset, Results(tmp_path))
    assert made.values == () and not made.found  # seconds would be shown as if they were a ratio
    assert compare.done(preset, Results(tmp_path)) == (0, 0, 1)


def test_a_variant_that_leaves_the_reference_alone_is_timed_by_the_defaults(tmp_path: Path) -> None:
    preset = load("feduv", "table5")
    (fedavg,) = matching(preset.cells, "cifar100", "FedAvg")
    (detached,) = matching(preset.of("detached"), "cifar100", "FedUV")
    write(tmp_path, Job(fedavg, 0), {"seconds": 2.0})
    write(tmp_path, Job(detached, 0), {"seconds": 3.0})
    made = compare.entries(preset, Results(tmp_path), variant="detached")
    assert [e.values for e in made if e.found] == [(1.5,)]


@pytest.mark.parametrize(
    "other",
    [
        {"environment": {**ENVIRONMENT, "code": "1"}},
        {"environment": {**ENVIRONMENT, "torch": "3"}},
        {"executor": "slots:2"},
        {"how": {**HOW, "slots": 2}},
        {"resumed": 3},
        {"alone": False},
    ],
)
def test_times_of_other_circumstances_are_not_compared(other: dict[str, Any], tmp_path: Path) -> None:
    """Of FedAvg there are two, in either circumstances; each other one is set beside that of its own."""
    fedavg, feduv, moon = (cell(m, preset="table5", measures={"time": "seconds"}) for m in ("FedAvg", "FedUV", "moon"))
    preset = Preset("feduv", "table9", "", "", 1, (fedavg, feduv, moon), {})
    usual = {"environment": ENVIRONMENT, "executor": "slots:8", "how": HOW}
    write(tmp_path, Job(fedavg, 0), {"seconds": 2.0}, **usual)
    longer = cell("FedAvg", {"rounds": 60})  # found first by its name
    write(tmp_path, Job(longer, 0), {"seconds": 8.0}, rounds=60, **{**usual, **other})
    write(tmp_path, Job(feduv, 0), {"seconds": 3.0}, **usual)
    write(tmp_path, Job(moon, 0), {"seconds": 9.0}, **{**usual, **other})
    first, second, third = compare.entries(preset, Results(tmp_path))
    assert first.values == (1.0,) and second.values == (1.5,)
    assert third.values == (() if {"resumed", "alone"} & set(other) else (9 / 8,)) and len(third.found) == len(
        third.values
    )


def test_what_cannot_be_compared_is_timed_again_with_its_reference(tmp_path: Path) -> None:
    fedavg, feduv = (Job(cell(m, measures={"time": "seconds"}), 0) for m in ("FedAvg", "FedUV"))
    todo = [fedavg, feduv]
    write(tmp_path, fedavg, {"seconds": 2.0})
    assert compare.untimed(fedavg, todo, Results(tmp_path))  # by other code than there is now
    write(tmp_path, feduv, {"seconds": 3.0})
    assert not any(compare.untimed(job, todo, Results(tmp_path)) for job in todo)
    write(tmp_path, feduv, {"seconds": 3.0}, environment={**ENVIRONMENT, "code": "another"})
    assert all(compare.untimed(job, todo, Results(tmp_path)) for job in todo)
    assert not compare.untimed(feduv, [feduv], Results(tmp_path))  # nobody asks for what it is relative to
    assert not compare.untimed(Job(cell("FedUV"), 0), todo, Results(tmp_path))  # not about time
    now = environment("cpu", "") | {"code": code_version()}
    write(tmp_path, fedavg, {"seconds": 2.0}, environment=now)
    assert [compare.untimed(job, todo, Results(tmp_path)) for job in todo] == [False, True]


@pytest.mark.parametrize(
    "edited",
    [
        {"probe": "x"},
        {"length": "scale=.."},
        {"curve": [1.0]},
        {},
        {"seed": "x"},
        {"rounds": None},
        {"measures": None},
        {"measures": {"accuracy": "high"}},
        {"length": "half"},
        {"settings": {}},
        {"environment": {}},
        {"how": {}},
    ],
)
def test_a_file_that_is_no_result_is_refused(edited: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, Job(cell(), 0), {"accuracy": 50.0})
    (path,) = tmp_path.rglob("*.json")
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | edited if edited else {"format": 1}))
    with pytest.raises(UserError, match=f"{path.name} is not a result"):
        Results(tmp_path)


def test_how_a_run_is_computed_and_recorded_makes_no_other_run() -> None:
    plain = Job(cell(), 0)
    recorded = cell(values={"diagnose": "every:2", "keep_clients": "last", "train_loss": False})
    same = Job(recorded, 3, how=(("device", "cpu"), ("precision", "bf16")), root="/somewhere")
    assert plain.key == same.key and plain.name == same.name
    assert plain.key != Job(cell(values={"lr": 0.3}), 0).key
    assert plain.key != Job(cell("FedUV"), 0).key


def test_a_longer_run_tells_the_time_of_a_round_as_well(tmp_path: Path) -> None:
    short = {"rounds": 5, "evaluate_every": 5}
    asked = Job(cell("FedUV", short, preset="table5", measures={"time": "seconds"}), 0)
    write(tmp_path, Job(cell("FedUV", {"rounds": 60, "lr_schedule": "cosine"}), 0), {"seconds": 3.0}, rounds=60)
    write(tmp_path, Job(cell("FedUV", {"rounds": 2}), 1), {"seconds": 9.0}, rounds=2)  # too few
    write(tmp_path, Job(cell("FedUV", {"rounds": 60, "local_steps": 9}), 2), {"seconds": 9.0}, rounds=60)
    write(tmp_path, Job(cell("FedUV", {"rounds": 60}), 3, probe=(("lr", "1"),)), {"seconds": 9.0}, rounds=60)
    results = Results(tmp_path)
    assert {seed: one.measures["seconds"] for seed, one in results.by_seed(asked).items()} == {0: 3.0}
    assert results.of(Job(asked.cell, 0, Length(0.5))) is None  # a shortened table has its own
    more = cell("FedUV", short, preset="table5", measures={"time": "seconds", "IID": "accuracy"})
    assert results.of(Job(more, 0)) is None


def test_an_option_that_a_method_got_later_makes_no_other_run(tmp_path: Path) -> None:
    long = Job(cell("FedUV", {"rounds": 60}), 0)
    write(tmp_path, long, {"seconds": 3.0}, rounds=60)
    path = Results(tmp_path).path(long)
    content = json.loads(path.read_text())
    del content["settings"]["method"][0]["feduv"]["sphere"]
    path.write_text(json.dumps(content))
    results = Results(tmp_path)
    asked = Job(cell("FedUV", {"rounds": 5}, preset="table5", measures={"time": "seconds"}), 0)
    assert results.by_seed(asked).keys() == {0}
    content["settings"]["lr"], content["key"] = 0.5, "of other settings"
    path.write_text(json.dumps(content))
    (one,) = Results(tmp_path).all()
    assert compare._changes(one, long.cell) == {"lr": "0.5"}  # and not the method


def test_a_shortened_run_is_no_test_of_a_printed_accuracy(tmp_path: Path) -> None:
    short = Job(cell(measures={"IID": "accuracy", "MACs": "macs"}), 0, Length(0.5))
    write(tmp_path, short, {"accuracy": 20.0, "macs": 5.0})
    (found,) = Results(tmp_path).by_seed(short).values()
    assert Entry(short.cell, "IID", "accuracy", row(52.9), 52.9, (found,), (20.0,)).within is None
    assert Entry(short.cell, "MACs", "macs", row(5.0), 5.0, (found,), (5.0,)).within  # which rounds do not change


@pytest.mark.parametrize(
    ("measure", "values", "text"),
    [
        ("accuracy", (50.04, 51.26), "50.6 ± 0.9"),
        ("macs", (112.704, 111.625), "112.2 ± 0.8"),
        ("macs", (0.45612, 0.48051), "0.4683 ± 0.0172"),
        ("macs", (2.0e9, 2.2e9), "2.1e+09 ± 1.414e+08"),
    ],
)
def test_deviations_have_the_decimals_of_their_mean(measure: str, values: tuple[float, float], text: str) -> None:
    made = compare.Entry(cell(), "IID", measure, None, None, (), values)
    assert show.here(made) == text


def test_methods_that_are_level_are_not_put_in_an_order(tmp_path: Path) -> None:
    preset = load("feduv", "table1")
    chosen = matching(preset.cells, "cifar100,alpha=0.01")  # the paper: FedUV > FedAvg > Freeze > FedProx > MOON
    for one, accuracy in zip(chosen, [20.8, 25.0, 20.8, 20.8, 20.8], strict=True):
        write(tmp_path, Job(one, 0), {"accuracy": accuracy})
    (order,) = compare.orders([e for e in compare.entries(preset, Results(tmp_path)) if e.found])
    assert order.here == (("FedUV",), ("FedAvg", "FedProx", "MOON", "Freeze"))
    assert (order.agreeing, order.pairs) == (4, 10)  # FedUV before each of the others; the rest is level here
    console = Console(record=True, width=200, color_system=None, file=io.StringIO())
    show.show(console, preset, Results(tmp_path), preset.cells)
    assert "here FedUV > FedAvg = FedProx = MOON = Freeze; 4 of 10 pairs agree" in console.export_text()
