"""Mistakes of newcomers are answered with what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isofed.errors import UserError, unknown
from isofed.experiments import plan_comparison, plan_tuning
from isofed.records import RunFolder
from tests.cli_tools import SMALL, complaint, isofed, result, succeeds
from tests.docs.reading import ROOT


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "seeds=3"], "seeds= belongs to compare and tune; one run has one seed, as in seed=3"),
        (["run", "method=fedprox,feduv"], r"with '\+', as in fedprox\+feduv, or, .*: isofed compare fedprox feduv"),
        (["compare", "fedavg,fedprox"], r"join them with '\+'"),
        (["tune", "fedprox", "mu=0.01,1"], "no setting 'mu'; the option of fedprox is tuned as fedprox.mu=0.01,1"),
        (["run", "method=fedprox", "mu=1"], "there is no setting 'mu'; .* it is written method=fedprox:mu=1"),
        (["run", "partition=dirichlet", "alpha=1"], "no setting 'alpha'; .* it is written partition=dirichlet:alpha=1"),
        (["data", "data="], "data= is empty: it must name a data set, such as digits, or the path of your own"),
        (["run", "data=", "rounds=1"], "data= is empty"),
        (["data", "synthetic:test=9", "size=4"], "no setting 'size'; .* is written data=synthetic:test=9,size=4"),
        (["run", "final_test=false"], "final_test=false needs a validation part .*, such as validation=0.1"),
        (["tune", "fedavg", "lr=0.1,1", "final_test=false"], "tune ends with .* on the test part; .*compare"),
        (["tune", "fedavg", "method=fedprox", "lr=0.1,1"], "tune takes one method"),
        (["tune", "fedprox:mu=0.1,0.2"], "values of an option are tried as isofed tune fedprox fedprox.mu=0.1,0.2"),
        (["tune", "fedavg", "lr=0.1,", "0.2"], "'lr=0.1,' ends with a comma: write values without blanks between them"),
        (["run", "fedprox.mu=1"], "'fedprox.mu=1' is neither .*; did you mean method=fedprox:mu=1"),
        (["run", "local-epochs=1"], "'local-epochs=1' is neither .*; did you mean local_epochs=1"),
        (["run", "lr = 0.1"], "'lr = 0.1' is neither .*; did you mean lr=0.1"),
        (["run", "learning_rate=1"], "no setting 'learning_rate': it is called lr here; `isofed settings` lists all"),
        (["run", "num_clients=1"], "no setting 'num_clients': it is called clients here"),
        (["run", "Rounds=1"], "no setting 'Rounds': it is called rounds here"),
        (["compare", "fedavg", "methods=fedprox"], "given twice, as 'fedavg' and as 'fedprox'; give all in one way"),
        (["run", "data=mnist"], "needs the folder .*; `isofed data get mnist root=PATH` fetches it"),
        (["run", "--rounds", "3"], "there is no option '--rounds': settings have no dashes, write rounds=3"),
        (["tune", "fedavg", "--batch-size=4"], "'--batch-size': settings have no dashes, write batch_size=4"),
        (["run", "model=resnet21"], r"no model 'resnet21': did you mean 'resnet20'\? `isofed models` lists all"),
        (["run", "lr=abc"], "lr=abc is not possible: it must be a number"),
        (["run", "ruonds=3"], r"there is no setting 'ruonds': did you mean 'rounds'\? `isofed settings` lists all"),
        (["rnu", "rounds=3"], "there is no command 'rnu': did you mean 'run'"),
        (["frobnicate"], "there is no command 'frobnicate'. Known: bench, compare, .*, watch"),
        (["flower", "sevrer"], "there is no command 'sevrer': did you mean 'server'"),
        (["settings", "lrs"], "there is no setting 'lrs': did you mean 'lr'"),
        (["models", "resnet19"], "there is no model 'resnet19': did you mean 'resnet18'"),
        (["models", "sise=3"], "'sise=3' means nothing here; write size="),
        (["run", "frobnicate=3"], "there is no setting 'frobnicate'. Known: .*, out, "),
    ],
)  # fmt: skip
def test_a_slip_is_answered_with_what_is_right(words: list[str], said: str, tmp_path: Path) -> None:
    assert re.search(said, complaint(isofed(*words, cwd=tmp_path), 2))
    assert not list(tmp_path.iterdir())


def test_settings_and_networks_by_name() -> None:
    found = succeeds("settings", "LR", "epochs").splitlines()
    assert [line.split()[0] for line in found] == ["setting", "local_epochs", "lr", "lr_schedule"]
    parts = succeeds("models", "feduv-cnn", "size=96", "classes=7").splitlines()
    rows = [" ".join(line.split()) for line in parts]
    # By hand: the last stage has 32 * 64 * 9 + 64 * 64 * 9 + 64 * 64 weights and three batch norms of 2 * 64.
    assert "stage3 64 x 19 x 19 59,776" in rows and "projector 256 83,456" in rows and "head 7 1,799" in rows
    assert not any(row.startswith("resnet") for row in rows)


def test_a_network_of_ones_own_shows_its_parts(tmp_path: Path) -> None:
    out = succeeds("models", "examples/my_model.py:build", "size=4", "channels=1", cwd=ROOT)
    rows = [" ".join(line.split()) for line in out.splitlines()]
    # By hand: 8 * 9 weights at 16 places and 16 * 8 * 9 at 4, then 16 * 10 in the head; 96 + 1,200 + 170 numbers.
    assert "examples/my_model.py:build 1,466 0.0059 16 your own" in rows and "stage2 16 x 2 x 2 1,200" in rows
    assert "pictures of 4x4 with 1 channel;" in " ".join(rows)
    (tmp_path / "mine.py").write_text("")
    assert "no model 'build' in mine.py" in complaint(isofed("models", "mine.py:build", cwd=tmp_path), 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--frobnicate"], "there is no option '--frobnicate'; isofed run --help shows how it is used"),
        (
            ["run", "--queit"],
            "there is no option '--queit'; did you mean '--quiet'? isofed run --help shows how it is us",
        ),
        (["--verison"], "there is no option '--verison'; did you mean '--version'? isofed --help shows how it is used"),
        (["run", "--resume"], "option '--resume' requires an argument; isofed "),
        (["flower", "new"], "missing argument 'FOLDER'; isofed flower new --help shows how it is used"),
        (["compare", "--resume", "runs/a"], "the same command again goes on: isofed compare has no option '--resume'"),
    ],
)
def test_a_mistaken_option_is_a_sentence(words: list[str], said: str, tmp_path: Path) -> None:
    assert complaint(isofed(*words, cwd=tmp_path), 2).startswith(said)


def test_a_short_word_helps_as_well() -> None:
    for words in ([], ["run"], ["flower", "new"]):
        assert succeeds(*words, "-h") == succeeds(*words, "--help")
    alone = isofed()
    assert alone.code == 2 and "Usage: isofed" in alone.out + alone.err and "compare" in alone.out + alone.err


def test_a_short_list_of_names_is_still_shown_with_the_nearest() -> None:
    assert str(unknown("option of paper", "sed", ["seed", "seeds"])).endswith("did you mean 'seed'? Known: seed, seeds")


def test_a_folder_is_of_one_run_or_of_many(tmp_path: Path) -> None:
    one, many, tuned = (tmp_path / name for name in ("one", "many", "tuned"))
    RunFolder.create(one, {}, {})
    RunFolder.create(many / "fedavg" / "seed-0", {}, {})
    RunFolder.create(tuned / "lr=0.1" / "seed-0", {}, {})

    def refused(make: Callable[[], Any]) -> str:
        with pytest.raises(UserError) as caught:
            make()
        return str(caught.value).replace(f"{tmp_path}/", "")

    begun = refused(lambda: RunFolder.create(many, {}, {}))
    assert begun.startswith("many holds runs of a comparison or a tuning,")
    (many / "comparison.json").write_text("{}")
    (tuned / "tuning.json").write_text("{}")
    mixed = "would be mixed: choose another out="
    grid = {"lr": ["0.1", "0.2"]}
    for make, said in (
        (lambda: RunFolder.create(many, {}, {}), "many holds a comparison, with which a single run"),
        (lambda: RunFolder.create(tuned, {}, {}), "tuned holds a tuning, with which a single run"),
        (lambda: plan_comparison(["fedavg"], [0], {}, one), "one holds a single run, with which a comparison"),
        (lambda: plan_tuning("fedavg", grid, [0], {}, one), "one holds a single run, with which a tuning"),
        (lambda: plan_comparison(["fedavg"], [0], {}, tuned), "tuned holds a tuning, with which a comparison"),
        (lambda: plan_tuning("fedavg", grid, [0], {}, many), "many holds a comparison, with which a tuning"),
    ):
        assert refused(make) == f"{said} {mixed}"
    assert plan_comparison(["fedavg"], [0], {}, many)[1] == many  # goes on
    several = refused(lambda: RunFolder.open(tuned))
    assert several == "tuned is not a run folder: it holds a tuning, which goes on when its command is given again"


def test_a_run_may_become_longer_but_not_another(tmp_path: Path) -> None:
    said = complaint(isofed("run", "--resume", "one", "lr=0.2", cwd=tmp_path), 2)
    assert said.startswith("'lr' cannot change when a run is resumed, only rounds, actors, device, executor, root,")
    assert said.endswith("for a new run write: isofed run one/config.yaml lr=0.2 out=...")
    said = complaint(isofed("run", "--resume", "one", "round=2", cwd=tmp_path), 2)
    assert said.startswith("there is no setting 'round': did you mean 'rounds'?")
    succeeds("run", *SMALL, "rounds=1", "out=one", cwd=tmp_path)
    assert "after 2 rounds" in succeeds("run", "--resume", "one", "rounds=2", cwd=tmp_path)


def test_training_that_diverges_is_told_what_to_try(tmp_path: Path) -> None:
    words = ("run", *SMALL, "rounds=2", "momentum=0")
    out = succeeds(*words, "lr=0.05", "out=well", cwd=tmp_path)
    assert "diverges" not in out and "recorded in well\n" in out
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom isofed import Method\n\n\n"
        "@dataclass(frozen=True)\nclass Lost(Method):\n"
        "    def end(self, visit):\n        if visit.client == 1 and visit.round == 2:\n"
        "            visit.update = visit.update * float('nan')\n"
    )
    out = succeeds(*words, "method=mine.py:Lost", "out=lost", cwd=tmp_path)
    assert "training diverges: try a smaller lr, or clip=10\n" in out
    assert result(tmp_path / "lost")["events"] == 1 and "\n1 event is recorded in lost/metrics.jsonl\n" in out
    compared = succeeds("compare", "fedavg", "mine.py:Lost", *SMALL, "rounds=2", "executor=serial", cwd=tmp_path)
    assert "\ntraining of mine.py:Lost diverges: try a smaller lr, or clip=10\n" in compared
    assert "training of fedavg" not in compared


def test_a_run_that_loses_every_client_is_told_the_same(tmp_path: Path) -> None:
    done = isofed("run", "data=synthetic:samples=60,test=20", "partition=iid", "clients=2", "lr=1e30", cwd=tmp_path)
    assert "gave NaN or numbers out of range: try a smaller lr, or clip=10." in complaint(done, 1)
