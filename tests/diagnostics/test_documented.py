"""The page about diagnostics names every function with its arguments and every result with its fields, and uses all."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil

from isofed import diagnostics
from tests.docs.reading import DOCS, blocks, tables
from tests.test_package import HEAVY, modules_after

PAGE = DOCS / "diagnostics.md"
PUBLIC = {name: getattr(diagnostics, name) for name in diagnostics.__all__}


def test_every_function_and_result_is_documented_with_its_arguments() -> None:
    rows = [row for kind in ("function", "result") for table in tables(PAGE, kind) for row in table]
    documented = {row[0].partition("(")[0]: row[0].rstrip(")").partition("(")[2].split(", ") for row in rows}
    assert documented == {name: list(inspect.signature(made).parameters) for name, made in PUBLIC.items()}
    code = "\n".join(line for block in blocks(PAGE) if block.language == "python" for line in block.body)
    assert [name for name, made in PUBLIC.items() if not isinstance(made, type) and f"D.{name}(" not in code] == []


def test_the_example_of_the_collapse_is_shown_as_it_is() -> None:
    lines = (DOCS.parent / "examples" / "collapse.py").read_text(encoding="utf-8").splitlines()
    assert lines[lines.index("") + 3 :] in [block.body for block in blocks(PAGE)]


def test_the_examples_in_the_docstrings_are_true() -> None:
    tried = 0
    for info in pkgutil.iter_modules(diagnostics.__path__):
        result = doctest.testmod(importlib.import_module(f"isofed.diagnostics.{info.name}"))
        assert result.failed == 0
        tried += result.attempted
    assert tried >= 12


def test_importing_the_diagnostics_loads_nothing_heavy() -> None:
    assert not modules_after("import isofed.diagnostics") & set(HEAVY)
