"""The answer says what the numbers say, and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from isofed.report.answer import Answer, answer
from isofed.report.gather import Reader
from isofed.report.page import content
from tests.report.made import add_privacy, make_comparison, make_run


def of(*paths: Path) -> Answer:
    return answer(Reader().read(paths))


def test_which_by_how_much_how_sure_and_at_what_cost(tmp_path: Path) -> None:
    finals = {
        "fedavg": [0.5, 0.52, 0.54],
        "fedprox": [0.7, 0.73, 0.73],
        "scaffold": [0.69, 0.71, 0.75],
        "central": [0.9] * 3,
    }
    said = of(make_comparison(tmp_path, finals, target=0.6))
    details = dict(said.details)
    assert said.question == (
        "Which of these 4 methods gets furthest on synthetic:samples=200,test=50, "
        "split by iid over 4 clients, in 3 rounds?"
    )
    assert said.headline == "fedprox, with 72.0 ± 1.7 % accuracy."
    # Differences 20, 21, 19: mean 20, deviation 1, half width 4.302653 / sqrt(3) = 2.484. To scaffold 1, 2, -2.
    assert details["by how much"] == (
        "+20.0 points over fedavg (95 % interval +17.5 to +22.5); "
        "+0.3 points over scaffold (95 % interval −4.8 to +5.5), the next best."
    )
    assert (
        details["how sure"]
        == "Over 3 seeds, it is not told apart from scaffold; its lead over the rest is more than chance."
    )
    assert details["at what cost"] == (
        "1.5 s of training and 3.0 MB sent in a run; a round takes 1.00 times as long as with fedavg and sends as much."
    )
    assert "central trains on the pooled data" in details["upper bound"] and "90.0" in details["upper bound"]
    assert details["to the target"] == "It reached 60 % after 3.0 rounds."


def test_a_lead_over_all_and_over_none(tmp_path: Path) -> None:
    clear = dict(of(make_comparison(tmp_path / "a", {"fedavg": [0.5, 0.52], "fedprox": [0.7, 0.7201]})).details)
    assert clear["how sure"] == "Over 2 seeds, every interval of its lead lies above zero."
    unclear = dict(of(make_comparison(tmp_path / "b", {"fedavg": [0.5, 0.6], "fedprox": [0.6, 0.55]})).details)
    assert "told apart from none" in unclear["how sure"]


def test_equal_differences_are_no_certainty(tmp_path: Path) -> None:
    said = dict(of(make_comparison(tmp_path, {"fedavg": [0.5, 0.5], "fedprox": [0.75, 0.75]})).details)
    assert "told apart from none" in said["how sure"]


def test_methods_that_are_level_are_told_as_such(tmp_path: Path) -> None:
    finals = {"fedavg": [1.0, 1.0], "fedprox": [1.0, 1.0], "scaffold": [1.0, 1.0], "central": [1.0, 1.0]}
    said = of(make_comparison(tmp_path / "all", finals, target=0.9))
    details = dict(said.details)
    assert said.headline == "fedavg, fedprox and scaffold are level, with 100.0 ± 0.0 % accuracy."
    assert "by how much" not in details and "how sure" not in details
    assert details["at what cost"].startswith("fedavg: ") and details["to the target"].startswith("fedavg reached")
    said = of(make_comparison(tmp_path / "two", {"fedavg": [0.6, 0.8], "fedprox": [0.8, 0.6], "feduv": [0.3, 0.4]}))
    assert said.headline == "fedavg and fedprox are level, with 70.0 ± 14.1 % accuracy."
    assert dict(said.details)["by how much"].startswith("+35.0 points over feduv")


def test_one_picture_more_in_every_seed_is_no_certainty(tmp_path: Path) -> None:
    finals = {"fedavg": [269 / 359, 270 / 359], "fedprox": [270 / 359, 271 / 359]}
    assert "told apart from none" in dict(of(make_comparison(tmp_path, finals)).details)["how sure"]


def test_one_seed_says_nothing_about_chance(tmp_path: Path) -> None:
    said = of(make_comparison(tmp_path / "two", {"fedavg": [0.5], "fedprox": [0.6]}))
    assert said.headline == "fedprox, with 60.0 % accuracy."
    assert dict(said.details)["how sure"].startswith("One seed says nothing about chance")
    make_run(tmp_path / "one", [0.25, 0.5], rounds=2)
    alone = of(tmp_path / "one")
    assert alone.question.startswith("How far does fedavg get on synthetic") and alone.headline == "50.0 % accuracy."
    assert dict(alone.details)["how sure"].startswith("One run says nothing")


def test_the_first_method_may_win(tmp_path: Path) -> None:
    said = of(make_comparison(tmp_path, {"fedavg": [0.6, 0.7], "fedprox": [0.5, 0.59], "feduv": [0.3, 0.4]}))
    assert said.headline.startswith("fedavg, with")
    assert dict(said.details)["by how much"].startswith("+10.5 points over fedprox")


def test_unfinished_runs_are_said_to_be(tmp_path: Path) -> None:
    make_run(tmp_path / "going", [0.2, 0.4], "fedprox", finished=False, rounds=5)
    said = of(tmp_path)
    assert said.headline == "There is no finished run yet."
    assert said.details == [
        ("so far", "2 of 5 rounds are done; the highest accuracy at this moment is 40.0 %, of fedprox with seed 0.")
    ]
    make_run(tmp_path / "done", [0.3], rounds=5)
    said = of(tmp_path)
    assert said.headline == "30.0 % accuracy."
    assert said.details[0] == ("so far", "1 of 2 runs finished; this is the answer of those that are.")


def test_methods_without_a_common_seed_are_not_paired(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [0.5], "fedavg", seed=0, rounds=1)
    make_run(tmp_path / "b", [0.6], "fedprox", seed=1, rounds=1)
    assert "no seed in common" in dict(of(tmp_path).details)["by how much"]


def test_runs_on_different_data_have_no_single_winner(tmp_path: Path) -> None:
    make_comparison(tmp_path / "a", {"fedavg": [0.5, 0.6], "fedprox": [0.6, 0.55]})
    make_comparison(tmp_path / "b", {"fedavg": [0.9, 0.95]}, data="synthetic:samples=100,test=20")
    said = of(tmp_path / "a", tmp_path / "b")
    assert said.question == "Which method gets furthest on each of these 2 data sets?"
    assert said.headline.startswith("No single one") and "fedavg" not in said.headline
    assert said.details == [
        (
            "synthetic:samples=200,test=50",
            "fedprox, with 57.5 ± 3.5 % accuracy. "
            "Over 2 seeds, it is told apart from none of the others: the lead may be chance.",
        ),
        (
            "synthetic:samples=100,test=20",
            "fedavg alone: 92.5 ± 3.5 % accuracy, mean and standard deviation over 2 seeds.",
        ),
    ]


def test_a_run_at_sites_has_no_split_and_no_command_that_repeats_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [0.5])
    config = folder.path / "config.yaml"
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"data": "sites"}))
    found = Reader().read([folder.path])
    assert answer(found).question == "How far does fedavg get at 4 sites, in 20 rounds?"
    assert content(found)["repeat"] == []


def test_data_that_changed_between_runs_are_different_data(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [0.5], "fedavg", rounds=1)
    make_run(tmp_path / "b", [0.55], "fedprox", rounds=1)
    make_run(tmp_path / "c", [0.7], "fedavg", seed=1, rounds=1)
    assert of(tmp_path).headline == "fedavg, with 60.0 ± 14.1 % accuracy."
    environment = tmp_path / "c" / "environment.json"
    recorded = json.loads(environment.read_text())
    environment.write_text(json.dumps(recorded | {"data": "0123456789abcdef"}))
    said = of(tmp_path)
    assert said.headline.startswith("No single one")
    assert [name for name, _ in said.details] == [
        f"synthetic:samples=200,test=50 (fingerprint {recorded['data'][:8]})",
        "synthetic:samples=200,test=50 (fingerprint 01234567)",
    ]
    rows = Reader().read([tmp_path]).rows
    assert [len(by_seed) for by_seed in rows.values()] == [1, 1, 1]  # the two of fedavg are not averaged
    environment.write_text(json.dumps(recorded | {"data": None}))
    assert not of(tmp_path).headline.startswith("No single one")  # what is not known is no difference


def test_a_target_that_few_seeds_reach_is_not_told_as_a_mean(tmp_path: Path) -> None:
    said = dict(of(make_comparison(tmp_path, {"fedavg": [0.9, 0.4]}, target=0.8)).details)
    assert said["to the target"] == "It reached 80 % in 1 of 2 seeds only, within 3 rounds."


def test_what_noise_amounts_to_is_said(tmp_path: Path) -> None:
    make_run(tmp_path / "plain", [0.6], rounds=1)
    folder = make_run(tmp_path / "private", [0.5], "clip_update:norm=0.5+gaussian:noise=2", rounds=1)
    add_privacy(folder.path, 4.373)
    said = dict(of(tmp_path).details)["privacy"]
    assert said == (
        "clip_update:norm=0.5+gaussian:noise=2: epsilon 4.37 at delta 1e-05 for a whole client, "
        "against whoever sees the models."
    )
    assert dict(of(tmp_path / "private").details)["privacy"].startswith("Epsilon 4.37 at delta 1e-05")


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_extremes(tmp_path: Path, accuracy: float) -> None:
    said = of(make_comparison(tmp_path, {"fedavg": [accuracy] * 2, "fedprox": [accuracy] * 2}))
    assert f"{100 * accuracy:.1f} ± 0.0 %" in said.headline
