"""Help and lists at the width of an ordinary terminal."""

from __future__ import annotations

import re

import pytest

from isofed.config import Settings
from isofed.data.augment import AUGMENTATIONS
from isofed.help import help_text
from tests.cli_tools import isofed, succeeds
from tests.docs.reading import DOCS, tables

NARROW = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
COMMANDS = ["run", "compare", "tune", "methods", "models", "data", "privacy", "diagnose", "report", "watch", "paper"]
COMMANDS += [
    "bench",
    "settings",
    *(f"flower {name}" for name in ("new", "keys", "up", "server", "site", "start", "stop")),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_can_be_copied_at_eighty_columns(command: str) -> None:
    from isofed import cli  # noqa: F401  with isofed.flower.cli, which it imports

    lines = succeeds(*command.split(), "--help", env=NARROW).splitlines()
    assert max(map(len, lines)) <= 80
    begin = next(n for n, line in enumerate(lines) if line.strip() == "Examples")
    examples = [line for line in lines[begin + 1 : lines.index("", begin) if "" in lines[begin:] else None]]
    examples = examples[: next(n for n, line in enumerate(examples) if not line.strip())]
    assert examples and all(line.startswith(" ") and not line.startswith("  ") for line in examples)
    whole = " ".join(line.strip().removesuffix("\\").strip() for line in examples)
    assert len(re.findall(rf"isofed {command}\b", whole)) >= 1
    for line, before in zip(examples, ["", *examples], strict=False):
        assert line.strip().startswith(f"isofed {command}") or before.strip().endswith("\\"), line


def test_prose_is_left_to_the_terminal_to_wrap() -> None:
    made = help_text(
        "One.\n\n    Two words\n    and more.\n\n    [bold]Examples[/]\n\n      isofed a\n\n      isofed b\n    "
    )
    assert made == "One.\n\nTwo words and more.\n\n[bold]Examples[/]\nisofed a\nisofed b"


def test_the_first_page_has_a_first_command() -> None:
    assert "isofed run rounds=3" in succeeds("--help", env=NARROW)
    assert "size=, classes=, channels= and norm=" in succeeds("models", "--help", env=NARROW)
    for command in ("compare", "tune"):
        shown = " ".join(succeeds(command, "--help", env=NARROW).split())
        assert "methods, settings as key=value, and YAML files" in shown and "without it there is one" in shown


def test_lists_keep_to_the_columns_that_there_are() -> None:
    for words in (["methods"], ["settings"], ["methods", "feduv"]):
        assert max(len(line.rstrip()) for line in succeeds(*words, env=NARROW).splitlines()) <= 80
    narrow = succeeds("methods", env=NARROW)
    assert "shown at a width of 130 or more" in " ".join(narrow.split()) and "…" not in narrow
    assert max(map(len, isofed("methods").out.splitlines())) > 120


def test_settings_name_their_choices() -> None:
    out = succeeds("settings")
    for key in ("weighting", "last_batch", "executor", "precision", "track"):
        (line,) = [line for line in out.splitlines() if line.startswith(f"{key} ")]
        choices = Settings.model_fields[key].annotation.__args__  # type: ignore[union-attr]
        assert all(choice in line for choice in choices), key
    (line,) = [line for line in out.splitlines() if line.startswith("augment ")]
    assert all(name in line for name in AUGMENTATIONS)
    assert re.search(r"^norm +own +own \(what the network has\), or batch, group:N or none", out, re.MULTILINE)


def test_a_method_is_explained_with_the_meaning_and_the_limits_of_its_options() -> None:
    out = succeeds("methods", "feduv+gaussian:noise=2")
    assert "``" not in out
    said = " ".join(out.split())
    assert "option: mu = 0.5 weight of L_U; 0 leaves only L_V; at least 0 option:" in said
    assert "option: form = code code divides by the median, paper by twice the median option:" in said
    assert "option: noise = 2 standard deviation of the noise, in clipping norms; above 0 option:" in said
    assert "must be well below one over the number of clients; above 0 and below 1 option:" in said


def test_the_pages_and_the_code_say_the_same_of_every_option() -> None:
    import dataclasses

    from isofed import spec
    from isofed.methods import find, names

    seen = 0
    for name in names():
        for table in tables(DOCS / "methods" / f"{name}.md", "option"):
            fields = {spec.option(f): f for f in dataclasses.fields(find(name)[1])}
            for option, _, text in table:
                plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "")
                assert spec.meaning_of(fields[option]) == plain, (name, option)
                seen += 1
    assert seen > 50
