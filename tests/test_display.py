"""What a person sees while runs go on: on a real terminal and elsewhere."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import termios
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from isofed.display import Clock, CompareDisplay, RunDisplay, duration, percent, show_table, simple_table
from isofed.experiments import plan_comparison
from isofed.federation import Federation
from tests.cli_tools import TINY, Done, escapes, metrics, start


def on_a_terminal(*words: str, width: int = 100) -> tuple[Done, str]:
    """Run a command on a terminal of its own, and give all that it wrote there."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
    command = start(*words, tty=os.ttyname(slave))
    seen = b""
    over = False
    while True:
        ready, _, _ = select.select([master], [], [], 0.1)
        if ready:
            seen += os.read(master, 65536)
        elif over:
            break
        else:
            over = command.over()
    os.close(slave)
    os.close(master)
    return command.wait(), seen.decode()


def screen(text: str) -> str:
    """What remains without colours and movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run = tmp_path_factory.mktemp("terminal") / "run"
    done, seen = on_a_terminal("run", *TINY, "rounds=800", f"out={run}")
    assert done.code == 0, seen
    return run, seen


def test_a_terminal_shows_round_accuracy_and_time_left(shown: tuple[Path, str]) -> None:
    run, seen = shown
    frames = re.findall(r"round +(\d+)/800 +accuracy +([\d.-]+) % +loss ([\d.-]+) +([^\r\n]+?) left", screen(seen))
    rounds = [int(frame[0]) for frame in frames]
    assert len(set(rounds)) >= 3 and rounds == sorted(rounds)
    by_round = {line["round"]: line for line in metrics(run)}
    for number, accuracy, loss, _ in frames:
        if int(number):
            assert float(accuracy) == pytest.approx(100 * by_round[int(number)]["accuracy"], abs=0.051)
            assert float(loss) == pytest.approx(by_round[int(number)]["loss"], abs=0.0006)
    assert any(re.fullmatch(r"\d+ s|\d+:\d\d", frame[3]) for frame in frames)


def test_the_live_line_is_gone_in_the_end(shown: tuple[Path, str]) -> None:
    _, seen = shown
    assert "\x1b[?25l" in seen and seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")  # the cursor is back
    assert "\x1b[2K" in seen[seen.rindex(" left") :]
    assert screen(seen).rstrip().splitlines()[-2].strip().startswith("test accuracy")


def test_a_terminal_shows_a_comparison_as_a_growing_table(tmp_path: Path) -> None:
    done, seen = on_a_terminal(
        "compare", "fedavg", "fedprox", *TINY, "rounds=120", "seeds=2", f"out={tmp_path / 'runs'}"
    )
    assert done.code == 0
    text = screen(seen)
    assert "> fedavg" in text and "> fedprox" in text and "accuracy now" in text
    assert re.search(r"\d of 4 runs, [^\n]* left", text)
    assert "#" * 20 in text and re.search(r"#\.+", text)
    assert re.search(r"fedprox +[\d.]+ ± [\d.]+", text)


def test_quiet_on_a_terminal_has_no_live_line(tmp_path: Path) -> None:
    done, seen = on_a_terminal("run", *TINY, "rounds=20", "-q", f"out={tmp_path / 'run'}")
    assert done.code == 0 and "left" not in seen and "\x1b[?25l" not in seen
    assert screen(seen).startswith("test accuracy")


def test_an_error_on_a_terminal_is_one_red_line() -> None:
    done, seen = on_a_terminal("run", "method=fedprx")
    assert done.code == 2 and seen.startswith("\x1b[31misofed: there is no method 'fedprx'")
    assert len(screen(seen).strip().splitlines()) == 1


LONG = "fedadam:lr=0.01,beta1=0.95,beta2=0.999,tau=0.0001,v0=0.001,bias_correction=true+fedprox:mu=0.00"


def all_numbers(row: dict[str, Any]) -> list[str]:
    """What the printed table must show of a row, whatever has to give way to it."""
    cells = [f"{100 * row['accuracy']:.1f} ± {100 * row['std']:.1f}"]
    if row["difference"] is not None:
        cells += [f"{100 * row['difference']:+.1f}", f"{100 * row['low']:+.1f} to {100 * row['high']:+.1f}"]
    return [*cells, f"{row['relative_seconds']:.2f}x", f"{row['megabytes_per_round']:.2f}"]


@pytest.mark.parametrize("width", [None, 80, 100])
def test_no_number_of_a_comparison_is_ever_cut(width: int | None, tmp_path: Path) -> None:
    """Method names can be long; they give way, in a file of 120 columns and on any usual terminal."""
    words = ("compare", "fedavg", f"{LONG}1", f"{LONG}2", *TINY, "rounds=2", "seeds=2", f"out={tmp_path / 'runs'}")
    if width is None:
        done = start(*words).wait()
        text = done.out
    else:
        done, seen = on_a_terminal(*words, width=width)
        text = screen(seen)
    assert done.code == 0
    table = text[text.rindex("\nmethod ") :].replace("\r", "")
    header, rows = (
        table.strip().splitlines()[0],
        json.loads((tmp_path / "runs" / "comparison.json").read_text())["rows"],
    )
    assert [name in header for name in ("accuracy %", "differ", "95 % interval", "time", "MB")] == [True] * 5, header
    for row in rows:
        for cell in all_numbers(row):
            assert cell in table, table
    names = "".join(line.strip().split(" ")[0] for line in table.splitlines())  # what goes on stands further right
    assert f"{LONG}1" in names and f"{LONG}2" in names and "…" not in table


def test_no_number_of_a_split_is_cut() -> None:
    done = start("data", "synthetic:samples=12000,test=10,classes=12", "partition=iid", "clients=3").wait()
    assert done.code == 0 and "…" not in done.out
    assert re.search(r"(1,000 +){12}", done.out)


# --- the parts


def test_numbers_are_written_for_people() -> None:
    assert [percent(v) for v in (None, 0.0, 0.8734, 1.0)] == ["-", "0.0", "87.3", "100.0"]
    assert [duration(s) for s in (0, 4.21, 42, 59.4, 60, 185, 3599.6, 3723, 90000)] == [
        *("0 s", "4.2 s", "42 s", "59 s", "1:00", "3:05", "1:00:00", "1:02:03", "25:00:00"),
    ]


def test_time_left_is_in_proportion() -> None:
    clock = Clock()
    assert clock.left(0, 10) == "-"
    clock._began = time.monotonic() - 100
    assert clock.left(1, 4) == "5:00"
    assert clock.left(4, 4) == "0 s"


def test_a_bit_of_work_that_took_long_does_not_make_all_of_it_long() -> None:
    clock = Clock()
    clock._began = time.monotonic() - 10
    assert clock.left(0.1, 100.1) == "2:46:40"
    assert clock.left(0.1, 100.1, known=20) == "2:29"  # thirty seconds for 20.1, and a hundred are left
    assert clock.left(0, 60, known=20) == "1:30"


def told(display: Any, run: Federation, lines: list[dict[str, Any]]) -> str:
    display.start(run)
    for line in lines:
        display.client(1, 2)
        display.round(line)
    assert isinstance(display.console.file, io.StringIO)
    return display.console.file.getvalue()


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=120, force_terminal=False)


def test_a_run_that_goes_on_says_where_and_counts_its_own_time(tmp_path: Path) -> None:
    values: dict[str, Any] = dict(word.split("=", 1) for word in TINY)
    run = Federation(**values, rounds=2, out=tmp_path / "run")
    run.fit()
    (tmp_path / "run" / "result.json").unlink()
    resumed = Federation.resume(tmp_path / "run")
    console = plain_console()
    resumed.fit(RunDisplay(console))
    assert isinstance(console.file, io.StringIO)
    assert "going on after round 2" in console.file.getvalue()


def test_rounds_without_an_evaluation_show_the_last_one() -> None:
    values: dict[str, Any] = dict(word.split("=", 1) for word in TINY)
    run = Federation(**values, rounds=10)
    events: list[Any] = []
    lines: list[dict[str, Any]] = [{"round": 1, "accuracy": 0.25, "loss": 1.5, "events": events}]
    lines += [{"round": 2, "events": events}, {"round": 3, "accuracy": None, "events": events}]
    out = told(RunDisplay(plain_console()), run, lines)
    assert out.count("accuracy  25.0 %   loss 1.500") == 3
    assert not escapes(out)


def test_ten_lines_for_any_number_of_rounds() -> None:
    values: dict[str, Any] = dict(word.split("=", 1) for word in TINY)
    for rounds in (1, 9, 25, 1000):
        run = Federation(**values, rounds=rounds)
        lines: list[dict[str, Any]] = [
            {"round": n, "accuracy": 0.5, "loss": 1.0, "events": []} for n in range(1, rounds + 1)
        ]
        out = told(RunDisplay(plain_console()), run, lines)
        assert f"round {rounds}/{rounds}" in out.replace("  ", " ")
        assert min(rounds, 10) <= out.count("accuracy") <= 20
        assert told(RunDisplay(plain_console(), quiet=True), run, lines) == ""


def dropping(clients: list[int], tmp_path: Path) -> dict[str, Any]:
    """Settings by which clients with fewer samples than a batch of 32 take no step; the last one has enough."""
    ends = np.cumsum([*clients, 40 - sum(clients)]).tolist()
    split = tmp_path / "split.json"
    split.write_text(json.dumps([list(range(a, b)) for a, b in zip([0, *ends], ends, strict=False)]))
    values: dict[str, Any] = dict(word.split("=", 1) for word in TINY)
    more = {"partition": f"from_file:{split}", "clients": len(ends), "batch_size": 32, "last_batch": "drop"}
    return values | more


def test_an_event_is_shown_once_however_often_it_happens(tmp_path: Path) -> None:
    run = Federation(**dropping([4, 4], tmp_path), rounds=30)
    console = plain_console()
    found = run.fit(RunDisplay(console))
    assert isinstance(console.file, io.StringIO)
    out = console.file.getvalue()
    for client in range(2):
        assert out.count(f"client {client} took no step: it has less than one batch") == 1
    assert found.events == 60  # and is recorded every time


def test_what_happens_to_many_clients_is_one_note(tmp_path: Path) -> None:
    console = plain_console()
    found = Federation(**dropping([1] * 8, tmp_path), rounds=2).fit(RunDisplay(console))
    assert isinstance(console.file, io.StringIO)
    notes = [line for line in console.file.getvalue().splitlines() if line.startswith("note: ")]
    said = "client 0 took no step: it has less than one batch; the same of 7 other clients"
    assert notes == [f"note: round 1: {said}"] and found.events == 16


def test_a_comparison_prints_a_line_for_each_run(tmp_path: Path) -> None:
    from isofed.experiments import run_all

    values: dict[str, Any] = dict(word.split("=", 1) for word in TINY)
    plans, _ = plan_comparison(["fedavg", "fedprox:mu=0.5"], [0, 3], values | {"rounds": 1}, tmp_path)
    console = plain_console()
    run_all(plans, CompareDisplay(console))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["[1/4]", "fedavg", "seed", "0"],
        ["[2/4]", "fedprox:mu=0.5", "seed", "0"],
        ["[3/4]", "fedavg", "seed", "3"],
        ["[4/4]", "fedprox:mu=0.5", "seed", "3"],
    ]
    assert len({line.index("seed") for line in lines}) == 1  # in columns


@pytest.mark.parametrize("width", [30, 44, 60, 120])
def test_no_width_cuts_a_number_or_loses_a_name(width: int) -> None:
    cells = ["fedprox:mu=0.1+scaffold", "[bold]56.7 ± 16.5[/]", "-148.7 to +105.4", "0.78"]
    table = simple_table("method", "accuracy %", "95 % interval", "MB")
    table.add_row(*cells)
    table.add_row("fedavg", "35.0 ± 2.4", "", "0.99")
    console = Console(width=width, file=io.StringIO(), color_system=None)
    show_table(console, table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    # Names and sentences may go on in the next line, and nothing else may be missing.
    whole = " ".join(text.split())
    for number in ("56.7 ± 16.5", "-148.7 to +105.4", "0.78", "35.0 ± 2.4", "0.99", "accuracy %", "95 % interval"):
        assert number in whole
    assert "fedavg" in whole and "fedprox" in whole


LONGER = [
    "feddyn:alpha=0.1+spherefed:loss=ce",
    "fedprox+examples/my_method.py:KeepRows:amount=0.5",
    "[bold]  fedavg[/]",
]


@pytest.mark.parametrize("width", [50, 60, 80, 160])
def test_a_long_name_goes_on_between_its_words(width: int) -> None:
    table = simple_table("method", "accuracy %", "differ", "95 % interval", "MB")
    for name in LONGER:
        table.add_row(name, "56.7 ± 16.5", "+11.0 *", "+4.2 to +16.9", "0.78")
    console = Console(width=width, file=io.StringIO(), color_system=None)
    show_table(console, table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in re.findall(r"[\w.=]+", " ".join(Text.from_markup(name).plain for name in LONGER)):
        assert re.search(rf"(?<![\w.=]){re.escape(word)}(?![\w.=])", text), (word, text)
    begun = [line for line in text.splitlines() if "56.7" in line]
    assert len(begun) == 3 and max(map(len, text.splitlines())) <= width
    if width > 50:  # a table, in which what belongs to a name stands further to the right
        assert [line.startswith(("feddyn", "fedprox", "  fedavg")) for line in begun] == [True] * 3
        others = text.splitlines()[1:]
        assert all(line in begun or line.startswith("  ") for line in others)
    else:
        assert "feddyn:alpha=0.1+spherefed:loss=ce\n" in text
