"""The documentation is true: its examples run, its tables match the code, its links lead somewhere.

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
import dataclasses
import importlib
import inspect
import io
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from isofed import Federation, Method, bench, cli, diagnose, functional, models, spec
from isofed.config import Settings
from isofed.data.augment import AUGMENTATIONS
from isofed.data.partition import KINDS
from isofed.data.sources import SOURCES, source
from isofed.diagnostics.cost import cost
from isofed.explain import places, relative
from isofed.methods import Final, Step, Visit, find, names, parse
from isofed.papers import command as papers

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
METHODS = DOCS / "methods"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BUILT_IN = [name for name in names() if find(name)[1].__module__.startswith("isofed.")]
FORMULAS = {name: getattr(functional, name) for name in functional.__all__}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT).with_suffix("")))


# --- reading a page


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the number of its first line, its lines, and what stands above it."""

    language: str
    line: int
    body: list[str]
    error: bool
    follows_python: bool

    @property
    def file(self) -> str | None:
        """The file that the block says it is."""
        named = re.fullmatch(r"# ([\w-]+\.(?:py|yaml))", self.body[0]) if self.body else None
        return named[1] if named else None


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number, above, python = 0, "", False
    while number < len(lines):
        opening = re.fullmatch(r"```(\w*)", lines[number])
        if opening:
            end = lines.index("```", number + 1)
            body = lines[number + 1 : end]
            found.append(Block(opening[1], number + 2, body, above == "<!-- error -->", python))
            number, above, python = end + 1, "", opening[1] == "python"
            continue
        assert not lines[number].startswith("```"), f"{page.name}, line {number + 1}: a fence that no reader closes"
        if lines[number].strip():
            above, python = lines[number].strip(), False
        number += 1
    return found


@dataclass(frozen=True)
class Command:
    """An ``isofed`` line of a block, and the lines shown below it."""

    line: int
    words: list[str]
    shown: list[str]


def commands(block: Block) -> Iterator[Command]:
    current: Command | None = None
    lines = iter(enumerate(block.body, block.line))
    for number, text in lines:
        if re.match(r"(\$ )?isofed ", text):
            if current:
                yield current
            text = text.removeprefix("$ ")
            while text.endswith("\\"):
                text = text[:-1] + next(lines)[1].strip()
            current = Command(number, shlex.split(text, comments=True)[1:], [])
        elif current and block.language == "console":
            current.shown.append(text)
    if current:
        yield current


def tables(page: Path, first_column: str) -> Iterator[list[list[str]]]:
    """The rows of every table whose first column has this heading; code marks are taken off the first two cells."""
    text = page.read_text(encoding="utf-8")
    for table in re.findall(rf"^\| {first_column} \|.*\n\|[-| ]+\|\n((?:\|.*\n)*)", text, re.MULTILINE):
        rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
        yield [[cell.strip("` ") for cell in row[:2]] + row[2:] for row in rows]


def form(line: str) -> str:
    """A line of output without what may differ from machine to machine: numbers, times, marks of chance."""
    line = re.sub(r"[█*]|\bchosen$", " ", line.rstrip())
    line = re.sub(r"[-+]?\d[\d,:]*(\.\d+)?(e[-+]?\d+)?", "#", line)
    line = re.sub(r"(# s|#|-) left", "# left", line)
    line = re.sub(r"(# s|#) of training", "# of training", line)
    return " ".join(re.sub(r"(?<= )\.(?= )", "#", line).split())


# --- working through a page


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


# --- tables and code say the same


def test_every_setting_is_documented_with_its_default() -> None:
    documented = {row[0]: row[1] for table in tables(DOCS / "settings.md", "setting") for row in table}
    defaults = {name: spec.show(field.default) for name, field in Settings.model_fields.items()}
    assert documented == defaults | {"out": "a new folder in `runs/"}


def options_of(cls: type) -> dict[str, str]:
    """Options of a choice as they would be typed; one without a default has an empty one."""
    fields = dataclasses.fields(cls)
    return {spec.option(f): "" if f.default is dataclasses.MISSING else spec.show(f.default) for f in fields}


@pages
def test_settings_and_options_that_a_page_names_exist(page: Path) -> None:
    choices = [find(name)[1] for name in BUILT_IN] + [source(name) for name in SOURCES]
    known = {option for cls in [*choices, *KINDS.values(), *AUGMENTATIONS.values()] for option in options_of(cls)}
    known |= {*Settings.model_fields, "out", "seeds", "picture", "every", "factor"}  # the last two are lr_schedule's
    known |= {f.name for f in dataclasses.fields(papers.Words)}
    known |= {*bench.OWN, *(f.name for f in dataclasses.fields(diagnose.Options)), "figures", "port"}
    known |= set(re.findall(r"^    (\w+): float", page.read_text(encoding="utf-8"), re.MULTILINE))  # of examples
    inline = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    named = {key for text in inline for key in re.findall(r"(?<![\w.])([a-z_0-9]+)=(?!=)", text)}
    python = {"dataset", "mean", "std", "at_least", "above", "at_most", "below"}  # arguments of calls
    python |= {argument for function in FORMULAS.values() for argument in inspect.signature(function).parameters}
    assert named - known - python - {"key"} == set()


def facts(page: Path) -> dict[str, str]:
    """What a method's page says in its list, by the bold word that an item begins with, each on one line."""
    items = re.findall(r"^- \*\*([\w ]+):\*\* (.*(?:\n  .*)*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(dict(items)) == len(items)
    return {key: " ".join(value.split()) for key, value in items}


def test_the_table_of_costs_is_what_running_them_gives() -> None:
    (rows,) = tables(DOCS / "methods.md", "cost of")
    base = cost("fedavg")
    assert rows == [[name, *relative(cost(name), base)] for name in BUILT_IN]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_method_has_a_page_with_its_options_and_places(name: str) -> None:
    page = METHODS / f"{name}.md"
    cls, text, said = find(name)[1], page.read_text(encoding="utf-8"), facts(page)
    assert text.startswith(f"# `{name}`\n")
    (*rows,) = (row for table in tables(page, "option") for row in table)
    assert [row[:2] for row in rows] == [[option, default] for option, default in options_of(cls).items()]
    assert rows or said["Options"].startswith("none")
    assert re.findall(r"`(\w+)`", said["Acts at"]) == places(cls)
    owned, _, given_up = said.get("Owns", "").partition(";")
    assert set(re.findall(r"`(\w+)`", owned)) == cls().owns
    assert all(f"`{how}`" in given_up and f"`{what}`" in given_up for what, how in cls.leaves.items())
    assert [need for need in cls.needs if need not in said.get("Needs", "")] == []
    assert {"Acts at", "Costs", "Helps", "Does not help"} <= said.keys()
    assert name == "central" or cls.paper in said["Source"].replace("*", "")
    assert name == "central" or {"As in the paper", "As in the papers"} & said.keys()
    assert any(block.language in ("console", "python") for block in blocks(page)), "there is nothing to try"


def test_every_method_is_listed_once_and_no_page_is_about_another() -> None:
    assert sorted(page.stem for page in METHODS.glob("*.md")) == sorted(BUILT_IN)
    listed = [row for table in tables(DOCS / "methods.md", "method") for row in table]
    assert sorted(row[0] for row in listed) == sorted(f"[`{name}`](methods/{name}.md)" for name in BUILT_IN)
    for name, row in zip((row[0].split("`")[1] for row in listed), listed, strict=True):
        assert set(re.findall(r"\w+", row[2])) == find(name)[1]().owns
    ((*owners,),) = tables(DOCS / "methods.md", "owner of")
    for what, _, parts in owners:
        assert set(re.findall(r"`(\w+)`", parts)) == {name for name in BUILT_IN if what in find(name)[1]().owns}


def test_the_compositions_of_the_papers_can_be_made() -> None:
    rows = [row for title in ("paper", "row") for table in tables(DOCS / "methods.md", title) for row in table]
    written = [text for row in rows for cell in row for text in re.findall(r"`([^`]+)`", cell)]
    assert len(written) > 30
    for text in written:
        parse(text)


def test_every_formula_is_documented_with_its_arguments() -> None:
    rows = [row for kind in ("function", "result") for table in tables(DOCS / "functional.md", kind) for row in table]
    documented = {row[0].partition("(")[0]: row[0].rstrip(")").partition("(")[2].split(", ") for row in rows}
    assert documented == {name: list(inspect.signature(made).parameters) for name, made in FORMULAS.items()}
    code = "\n".join(line for block in blocks(DOCS / "functional.md") for line in block.body)
    assert [name for name, made in FORMULAS.items() if not isinstance(made, type) and f"F.{name}(" not in code] == []


def test_every_network_is_documented() -> None:
    listed = {name for row in next(tables(DOCS / "networks.md", "model")) for name in re.findall(r"[\w-]+", row[0])}
    assert listed == set(models.names())


def test_every_split_and_source_is_documented_with_its_options() -> None:
    page = DOCS / "own-data.md"
    ((*rows,),) = tables(page, "partition")
    documented = {row[0]: dict(re.findall(r"(\w+)(?:=([\w.]+))?", row[1])) for row in rows}
    assert documented == {name: options_of(kind) for name, kind in KINDS.items()}
    ((*rows,),) = tables(page, "data")
    for row in rows:
        assert dict(re.findall(r"(\w+)=([\w.]+)", row[-1])) == options_of(source(row[0]))
    ((*rows,),) = tables(page, "option")
    assert {row[0]: row[1] for row in rows} == options_of(source("folder")) == options_of(source("domain-folder"))
    ((*published,),) = tables(DOCS / "data-sets.md", "data")
    for row in published:
        assert dict(re.findall(r"(\w+)=([\w.]+)", row[-1])) == options_of(source(row[0]))
    text = page.read_text(encoding="utf-8")
    own = set(SOURCES) - {row[0] for row in published}
    assert all(f"`{name}`" in text or f"{name}:" in text or f"data={name}" in text for name in own)
    assert all(f"`{name}" in text for name in AUGMENTATIONS)


def test_every_place_of_a_method_is_documented() -> None:
    page = DOCS / "own-method.md"
    hooks = {row[0].partition("(")[0] for table in tables(page, "hook") for row in table}
    facts = {row[0] for table in tables(page, "class variable") for row in table}
    public = {name: value for name, value in vars(Method).items() if not name.startswith("_")}
    assert hooks == {name for name, value in public.items() if callable(value)}
    assert facts == set(public) - hooks
    for table in tables(page, "hook"):
        for row in table:
            name, _, arguments = row[0].rstrip(")").partition("(")
            code = public[name].__code__
            assert arguments.split(", ") == list(code.co_varnames[1 : code.co_argcount])


@pytest.mark.parametrize(("word", "cls"), [("step", Step), ("visit", Visit), ("final", Final)])
def test_what_a_method_is_told_to_find_is_there(word: str, cls: type) -> None:
    page = DOCS / "own-method.md"
    (rows,) = tables(page, f"`{word}.`")
    listed = {name for row in rows for name in re.findall(r"(\w+)(?:\([^)]*\))?`?(?:,|$)", row[0])}
    known = {*cls.__annotations__, *(name for name in vars(cls) if not name.startswith("_"))}
    inline = set(re.findall(rf"\b{word}\.(\w+)", page.read_text(encoding="utf-8")))
    assert (listed | inline) - known == set()
    assert word != "final" or listed == known


def test_every_field_of_the_metrics_is_documented() -> None:
    documented = set(re.findall(r"\w+", " ".join(row[0] for t in tables(DOCS / "runs.md", "field") for row in t)))
    small: dict[str, Any] = {
        "data": "synthetic:samples=200,test=50,domains=2",
        "partition": "domain",
        "rounds": 1,
        "local_epochs": 1,
    }
    methods = ("fedavg", "fedbn", "fedbn+gaussian")
    written = {key for method in methods for key in Federation(method=method, **small).fit().history[0]}
    assert documented == written


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


def test_the_readme_names_the_demo_and_the_tests_as_they_are() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    demo = re.search(r"^DEMO +\?= ((?:.*\\\n)*.*)", makefile, re.MULTILINE)
    assert demo
    wanted = ["isofed", "compare", *demo[1].replace("\\\n", " ").split()]
    assert wanted in [" ".join(block.body).replace("\\", " ").split() for block in blocks(ROOT / "README.md")]
    assert "\nmake demo\n" in readme and "\nmake test\n" in readme
    assert re.search(r"^demo:", makefile, re.MULTILINE) and re.search(r"^test:", makefile, re.MULTILINE)


# --- links and manners


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs and GitHub make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pages
def test_internal_links_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        outside = DOCS in page.parents and DOCS not in target.parents  # of the built pages
        found = target.is_file() and not outside and (not anchor or anchor in anchors(target))
        if not link.startswith("https://") and not found:
            broken.append(link)
    assert broken == []


def files_in(nav: Any) -> Iterator[str]:
    """The pages of a navigation, whatever the headings they stand under."""
    for entry in nav:
        for below in entry.values():
            yield from [below] if isinstance(below, str) else files_in(below)


def reached(start: Path) -> set[Path]:
    """The pages that a reader comes to by following links."""
    seen, waiting = {start}, [start]
    while waiting:
        page = waiting.pop()
        for link in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8")):
            target = (page.parent / link).resolve()
            if target in PAGES and target not in seen:
                seen.add(target)
                waiting.append(target)
    return seen


def test_every_page_is_in_the_navigation_and_reached_from_the_start() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(DOCS / page for page in files_in(nav)) == PAGES[1:]
    start = (DOCS / "index.md").read_text(encoding="utf-8")
    assert [p.name for p in DOCS.glob("*.md") if p.name != "index.md" and f"]({p.name}" not in start] == []
    assert set(PAGES) - {DOCS / "index.md"} == reached(ROOT / "README.md")


@pages
def test_a_page_holds_nothing_of_the_machine_it_was_written_on(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"(?<![\w.])/(?:tmp|work|home|root|usr|opt|Users)/\S*", text) == []
    assert max(map(len, text.splitlines())) < 400
