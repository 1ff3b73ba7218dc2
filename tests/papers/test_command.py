"""``isofed paper`` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from isofed import cli
from isofed.errors import UserError
from isofed.papers import command
from isofed.papers.command import Words, seconds_of
from isofed.papers.plan import Job, matching
from isofed.papers.presets import load

from .made import write


def isofed(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["paper", *words])
    return result.exit_code, " ".join(result.stdout.split()), " ".join(result.stderr.split())


def test_a_paper_is_listed_with_what_is_done(tmp_path: Path) -> None:
    (cell,) = matching(load("univarfl", "table2").cells, "rho=0.1", "FedAvg")
    write(tmp_path, Job(cell, 0), {"accuracy": 20.0})
    code, out, _ = isofed("univarfl", f"results={tmp_path}")
    assert code == 0 and "univarfl table1 30 0" in out and "univarfl table2 15 1 Accuracy when" in out


def test_a_table_is_shown(tmp_path: Path) -> None:
    (cell,) = matching(load("univarfl", "table2").cells, "rho=0.1", "FedAvg")
    write(tmp_path, Job(cell, 0), {"accuracy": 20.0})
    code, out, _ = isofed("univarfl", "table2", "--show", f"results={tmp_path}")
    assert code == 0 and "UniVarFL table 2" in out and " 20.0 1 " in out and "not run: " in out


def test_what_a_setting_that_was_tried_out_gave_is_told_beside_no_table(tmp_path: Path) -> None:
    cells = matching(load("univarfl", "table2").cells, "rho=0.1", "FedAvg")
    write(tmp_path, Job(cells[0], 0), {"accuracy": 20.0})
    write(tmp_path, Job(cells[0], 0, probe=(("lr", "0.5"),)), {"accuracy": 34.5})
    words = ("univarfl", "table2", "only=rho=0.1", "methods=FedAvg", "lr=0.5", "seeds=2", "--show")
    code, out, _ = isofed(*words, f"results={tmp_path}")
    assert code == 0 and "tried out, and so in no table:" in out and "20.0" not in out
    assert "seed 0: accuracy 34.5" in out and "seed 1: not run" in out


@pytest.mark.parametrize("words", [["univarfl"], ["univarfl", "table2", "--show"]])
def test_a_folder_without_results_is_told_of(words: list[str], tmp_path: Path) -> None:
    note = f"note: there is no folder {tmp_path / 'elsewhere'} with results here; results=FOLDER says where they are"
    code, out, _ = isofed(*words, f"results={tmp_path / 'elsewhere'}")
    assert code == 0 and out.endswith(note)
    assert "note" not in isofed(*words, f"results={tmp_path}")[1]


def said(*words: str) -> str:
    """What is said of words that are refused."""
    result = CliRunner().invoke(cli.app, list(words))
    assert result.exit_code == 2 and not result.stdout, result.stdout
    return " ".join(result.stderr.split())


@pytest.mark.parametrize(
    "wrong",
    [
        ["device=tpu"],
        ["device=meta"],
        ["device=cuda:99"],
        ["precision=fp8"],
        ["precision=tf32"],
        ["slots=0"],
        ["slots=2"],
        ["executor=fast"],
    ],
)
def test_what_this_machine_cannot_do_is_said_before_anything_is_read(wrong: list[str], tmp_path: Path) -> None:
    # The data are not there, which is what would be said next.
    data = [f"root={tmp_path}", "data=cifar100", f"out={tmp_path / 'out'}"]
    found = {
        said("run", *data, *wrong),
        said("compare", "fedavg", *data, *wrong),
        said("tune", "fedavg", "lr=0.1,0.2", *data, *wrong),
        said("paper", "feduv", "table1", f"data_root={tmp_path}", f"results={tmp_path}", *wrong),
    }
    (sentence,) = found
    assert sentence.startswith("isofed: ") and "data set" not in sentence and not any(tmp_path.iterdir())


def test_what_is_wrong_with_a_later_table_is_said_before_the_first_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    good, bad = load("feduv", "table1"), load("feduv", "table2")
    bad = replace(bad, cells=(replace(bad.cells[0], values={**bad.cells[0].values, "lr": -1}),))
    monkeypatch.setattr(command, "_chosen", lambda names: [good, bad])
    monkeypatch.setattr(command, "run", lambda jobs, *_, **__: begun.append(str(jobs[0])))
    assert "lr=-1 is not possible" in said("paper", "all", f"results={tmp_path}") and begun == []


@pytest.mark.parametrize("width", [80, 160])
def test_no_width_cuts_what_the_paper_prints(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "console", Console(width=width, color_system=None))
    done = CliRunner().invoke(cli.app, ["paper", "spherefed", "table2", "--show", f"results={tmp_path}"])
    words = " ".join(done.stdout.split())
    for cell in load("spherefed", "table2").cells:
        published = [row.printed for row in cell.rows.values() if row.mean is not None]
        assert cell.dataset in words and any(f"{cell.method} {text} " in f"{words} " for text in published), str(cell)


def test_several_tables_and_variants_are_shown_one_after_another_as_far_as_they_have_such_cells(tmp_path: Path) -> None:
    words = ("feduv", "table1", "table2", "only=cifar100,alpha=0.01", "methods=FedUV", "variant=default,softened")
    code, out, _ = isofed(*words, "--show", f"results={tmp_path}")
    assert code == 0 and out.count("FedUV table 1") == 2 and "FedUV table 2" not in out
    assert out.index("FedUV table 1") < out.index("variant softened")


def test_what_the_paper_prints_is_shown_before_anything_is_run(tmp_path: Path) -> None:
    code, out, _ = isofed(
        "feduv", "table1", "only=cifar100,alpha=0.01", "methods=FedUV", "--show", f"results={tmp_path}"
    )
    assert code == 0 and "CIFAR-100 alpha=0.01 FedUV 55.7 ± 1.0" in out and "not run: all of it" in out


def test_a_tiny_run_goes_from_the_words_to_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("univarfl", "table2", "only=rho=0.5", "methods=UniVarFL", "scale=tiny", "executor=serial")
    code, out, err = isofed(*words)
    assert code == 0, err
    assert "UniVarFL, tiny, seed 0: univarfl, 2 rounds" in out and "done: 1 run finished" in out
    (path,) = (tmp_path / "runs" / "papers" / "tiny" / "results").rglob("*.json")
    content = json.loads(path.read_text())
    assert content["length"] == "tiny" and content["how"]["executor"] == "serial"
    assert not (tmp_path / "results").exists()  # never among the results
    assert "made-up pictures stood in for stl10" in out and "shortened, tiny" in out
    code, out, _ = isofed(*words)
    assert code == 0 and "done: 0 runs finished; results" in out
    code, out, _ = isofed(*words, "--show")
    assert code == 0 and f" {content['measures']['accuracy']:.1f} 1 " in out and "shortened, tiny" in out


def test_a_run_that_needs_data_says_so(tmp_path: Path) -> None:
    folders = [f"{key}={tmp_path}" for key in ("data_root", "results", "runs")]
    code, _, err = isofed("feduv", "table1", "only=pacs", *folders)
    assert code == 2 and "pacs" in err and str(tmp_path) in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fedvu"], "there is no paper 'fedvu': did you mean 'feduv'?"),
        (["feduv", "table8"], "there is no table or figure of feduv 'table8'"),
        (["feduv", "table1", "onyl=cifar100"], "there is no option of paper 'onyl': did you mean 'only'?"),
        (["feduv", "table1", "only=cifar1000"], "no cell of feduv table1 fits cifar1000"),
        (["feduv", "table1", "methods=FedAvg,FedUVV"], "no row of feduv table1 'FedUVV'"),
        (["pages"], "there is no folder"),
        (["pages", "only=cifar100"], "'paper pages' shows all results, and takes results= and pages= alone"),
        (
            ["feduv", "table1", "scale=tinny"],
            "scale=tinny must be above 0 and at most 1, as in scale=0.3, or be 'tiny'",
        ),
        (["feduv", "table1", "scale=3"], "scale=3 must be above 0 and at most 1"),
        (["feduv", "table1", "budget=soon"], "budget=soon is no time; write it as 90s, 25m or 1.5h"),
        (["feduv", "table1", "budget=10s"], "budget=10s is too short: 10 s of it are kept to stop in time"),
        (["feduv", "table1", "only=cifar100"], "'cifar100' needs the folder it was unpacked into: give data_root="),
        (["feduv", "table1", "whole=perhaps"], "whole=perhaps must be true or false"),
        (["feduv", "table1", "alone=perhaps"], "alone=perhaps must be true or false"),
        (["feduv", "table5", "alone=false"], "these cells of feduv table5 are about nothing but time"),
        (["feduv", "table1", "variant=papr"], "there is no variant of feduv table1 'papr'"),
        (["feduv", "table1", "variant=default,papr"], "there is no variant of feduv table1 'papr'"),
        (["feduv", "table1", "only=cifar100", "lr=fast"], "lr=fast is not possible"),
        (["feduv", "table1", "only=cifar100", "fedprox.mu=1"], "called 'fedprox'"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], said: str, tmp_path: Path) -> None:
    code, _, err = isofed(*words, f"results={tmp_path}/r", f"runs={tmp_path}/x")
    assert code == 2 and said in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("25m", 1500), ("1.5h", 5400), ("1h30m", 5400), ("1m5s", 65)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


def test_seeds_come_one_after_another_over_all_cells() -> None:
    made = Words.of(["only=pacs", "methods=FedAvg,FedUV", "seeds=2", "device=cpu"]).jobs(load("feduv", "table1"))
    assert [(j.cell.method, j.seed) for j in made] == [("FedAvg", 0), ("FedUV", 0), ("FedAvg", 1), ("FedUV", 1)]
    assert made[0].how == (("device", "cpu"),)
    with pytest.raises(UserError, match="only once"):
        Words.of(["seeds=1,1"]).jobs(load("feduv", "table1"))


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "isofed", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("isofed ")


def test_pages_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    code, out, _ = isofed("pages", f"results={tmp_path}/r", f"pages={tmp_path}/p")
    assert code == 0 and "index.md" in out and (tmp_path / "p" / "feduv.md").is_file()
    (tmp_path / "f").write_text("in its place")
    code, _, err = isofed("pages", f"results={tmp_path}/r", f"pages={tmp_path}/f/p")
    assert code == 1 and f"{tmp_path}/f/p" in err and "internal" not in err and "Traceback" not in err
