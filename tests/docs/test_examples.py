"""The examples of the documentation run.

Every page is worked through from top to bottom in a folder of its own that holds ``examples/``:

- a ``python`` block is executed; the blocks of a page share their names, and a ``text`` block right after one shows
  what it prints;
- a ``python`` or ``yaml`` block that begins with ``# name.py`` or ``# name.yaml`` is also written to that file;
- in ``console`` and ``bash`` blocks every line that begins with ``isofed`` (or ``$ isofed``) is run and must succeed;
  the lines below it must be in its output, numbers aside, ``...`` standing for lines that were left out;
- ``<!-- error -->`` above a block means that its command must fail, with exactly the message shown.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from isofed import cli
from tests.docs.reading import DOCS, ROOT, Command, blocks, commands, form, pages, tables


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to try things in. One core, so that no worker processes are started but those a page asks for."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    monkeypatch.setattr(cli, "console", Console(width=160, color_system=None))
    monkeypatch.setattr(cli, "errors", Console(width=120, color_system=None, stderr=True, soft_wrap=True))
    return tmp_path


def run_command(command: Command, where: str, error: bool) -> None:
    result = CliRunner().invoke(cli.app, command.words)
    said = f"{where}: isofed {' '.join(command.words)}\n{result.output}"
    if error:
        assert result.exit_code in (1, 2), said
        assert " ".join(" ".join(command.shown).split()) == " ".join(result.stderr.split()), said
        return
    assert result.exit_code == 0, said
    real = [form(line) for line in result.stdout.splitlines()]
    for line in command.shown:
        if line.strip() and line.strip() != "...":
            assert form(line) in real, f"{said}\nis not, as shown:\n{line}"
            real = real[real.index(form(line)) + 1 :]


@pages
def test_the_examples_of_a_page_run(page: Path, folder: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    printed = everything = ""
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        if block.file:
            Path(block.file).write_text("\n".join(block.body) + "\n", encoding="utf-8")
        if block.language == "python":
            out = io.StringIO()
            code = compile("\n" * (block.line - 1) + "\n".join(block.body), str(page), "exec", dont_inherit=True)
            with contextlib.redirect_stdout(out):
                exec(code, namespace)
            printed = out.getvalue()
            everything += printed
        elif block.language == "text" and block.follows_python:
            assert [form(line) for line in printed.splitlines()] == [form(line) for line in block.body], where
        elif block.language in ("console", "bash"):
            for command in commands(block):
                run_command(command, f"{page.name}, line {command.line}", block.error)
        if block.error:
            assert len(list(commands(block))) == 1, f"{where}: an error example is one command"
    shown = page.stem in ("README", "design") or page.parent == DOCS / "results"  # made by a command, tested elsewhere
    assert shown or everything or list(folder.glob("runs/*"))


def test_a_page_is_read_as_a_reader_would(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Words\n\n```bash\nmake\nisofed run a=1 \\\n  b=2 # why\n```\n\n"
        "<!-- error -->\n```console\n$ isofed frob\nno\n```\n"
        "```python\n# mine.py\nprint(1)\n```\n\n```text\n1\n```\n\n| a | b |\n|---|---|\n| `x` | `1` | y |\n"
    )
    bash, console, python, text = blocks(page)
    assert [c.words for c in commands(bash)] == [["run", "a=1", "b=2"]]
    assert [(c.words, c.shown, c.line) for c in commands(console)] == [(["frob"], ["no"], 11)]
    assert console.error and not bash.error and python.file == "mine.py" and text.follows_python
    assert list(tables(page, "a")) == [[["x", "1", "y"]]]
    assert form("fedavg  83.5 ± 2.1  -0.5 *  3 s left") == form("fedavg   1.5 ± 12.1  +3   - left")
    assert form("accuracy 5 %") != form("loss 5 %")


def test_the_examples_are_shown_as_they_are() -> None:
    for page, example in (("own-method.md", "my_method.py"), ("own-data.md", "my_model.py")):
        text = (ROOT / "examples" / example).read_text(encoding="utf-8")
        after = ast.parse(text).body[0].end_lineno
        code = "\n".join(text.splitlines()[after:]).strip().splitlines()
        assert code in [block.body for block in blocks(DOCS / page)]
        assert len(text.splitlines()) < 30


def test_an_installed_package_brings_methods_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [b for b in blocks(DOCS / "own-method.md") if b.language == "toml"]
    group = re.fullmatch(r'\[project\.entry-points\."(.*)"\]', block.body[0])
    entry = re.fullmatch(r'(\w+) = "(\w+)\.(\w+):(\w+)"', block.body[1])
    assert group and entry
    name, package, module, cls = entry.groups()
    (folder / package).mkdir()
    shutil.copy(ROOT / "examples" / "my_method.py", folder / package / f"{module}.py")
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group[1]}]\n{name} = {package}.{module}:{cls}\n")
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    listed = CliRunner().invoke(cli.app, ["methods"])
    explained = CliRunner().invoke(cli.app, ["methods", f"fedprox+{name}:amount=0.5"])
    assert listed.exit_code == explained.exit_code == 0
    assert re.search(rf"^{name} .* amount=1\b", listed.stdout, re.MULTILINE)
    assert re.search(r"^option: +amount = 0.5$", explained.stdout, re.MULTILINE)
