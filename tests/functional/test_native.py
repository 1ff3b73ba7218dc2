"""C files are compiled once, kept, and done without where that cannot be."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isofed.functional import native

here = pytest.mark.skipif(native.compiled_by() == "none", reason="there is no C compiler")
here_is = shlex.join(native.compiler() or [])
TEXT = '#include "native.h"\nint seven(void) { return 7; }\ndouble three(double x) { return x * x + x; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOFED_CACHE", str(tmp_path / "cache"))
    native.library.cache_clear()
    file = tmp_path / "some.c"
    file.write_text(TEXT)
    return file


def made(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache/native").iterdir())


@here
def test_a_file_is_compiled_once_and_again_when_it_has_changed(source: Path, tmp_path: Path) -> None:
    found = native.library(source)
    assert found is not None and found.seven() == 7
    (first,) = made(tmp_path)
    before = first.stat().st_mtime_ns
    native.library.cache_clear()
    assert native.library(source) is not None and made(tmp_path) == [first] and first.stat().st_mtime_ns == before
    source.write_text(TEXT.replace("return 7", "return 8"))
    native.library.cache_clear()
    found = native.library(source)
    assert found is not None and found.seven() == 8 and len(made(tmp_path)) == 2


@here
def test_flags_make_another_one(source: Path, tmp_path: Path) -> None:
    x, answers = 1 + 2.0**-30, []
    for flag in ("-ffp-contract=off", "-O0"):
        found = native.library(source, flag)
        assert found is not None
        found.three.argtypes, found.three.restype = [ctypes.c_double], ctypes.c_double
        answers.append(found.three(x))
    assert answers[0] == x * x + x and len(made(tmp_path)) == 2  # as Python rounds


@here
def test_nothing_is_kept_where_nothing_shall_or_can_be(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in ("off", str(file)):
        monkeypatch.setenv("ISOFED_CACHE", folder)
        native.library.cache_clear()
        found = native.library(source)
        assert found is not None and found.seven() == 7
    assert not (tmp_path / "cache").exists()


@here
def test_what_has_lost_its_functions_is_not_taken(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.write_text("int isofed_seven(void) { return 7; }\n")
    found = native.library(source)
    assert found is not None and found.isofed_seven() == 7
    monkeypatch.setenv("CC", f"{here_is} -fwhole-program")
    native.library.cache_clear()
    assert native.library(source) is None


@here
@pytest.mark.parametrize("asked", ["-ffast-math", "-Ofast", "-funsafe-math-optimizations"])
def test_a_compiler_that_is_asked_to_round_off_small_numbers_does_so_to_nobody(asked: str, tmp_path: Path) -> None:
    (tmp_path / "some.c").write_text(TEXT)
    told = (
        "import sys, torch; from pathlib import Path; from isofed.functional import native; "
        "assert native.library(Path(sys.argv[1])) is not None; print(float(torch.full((1,), 1e-40) * 1) > 0)"
    )
    given = os.environ | {"CC": f"{here_is} {asked}", "ISOFED_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", told, str(tmp_path / "some.c")]
    assert subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout == "True\n"


@here
@pytest.mark.parametrize("what", ["another file", "cut", "zeros", "somebody else's"])
def test_what_is_damaged_or_somebody_elses_is_made_again(
    what: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.library(source)
    (kept,) = made(tmp_path)
    other = tmp_path / "other/native" / kept.name  # a process loads a file of one name only once
    other.parent.mkdir(parents=True)
    whole = kept.read_bytes()
    half = len(whole) // 2  # to load such a file ends the process
    damaged = {"another file": b"not a library", "cut": whole[:half], "zeros": whole[:half] + bytes(len(whole) - half)}
    other.write_bytes(damaged.get(what, whole))
    before = other.stat().st_ino
    if what not in damaged:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setenv("ISOFED_CACHE", str(tmp_path / "other"))
    native.library.cache_clear()
    found = native.library(source)
    assert found is not None and found.seven() == 7
    # A folder of somebody else's is left alone.
    assert (other.stat().st_ino == before) == (what not in damaged)


@here
def test_a_folder_that_others_can_write_to_is_not_used(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache/native").mkdir(parents=True)
    (tmp_path / "cache/native").chmod(0o777)
    found = native.library(source)
    assert found is not None and found.seven() == 7 and not made(tmp_path)


@here
def test_a_compiler_may_say_what_it_likes(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loud = source.with_name("loud")
    loud.write_text(f"#!/bin/sh\nprintf '\\377\\376' >&2\nexec {here_is} \"$@\"\n")
    loud.chmod(0o755)
    monkeypatch.setenv("CC", str(loud))
    found = native.library(source)
    assert found is not None and found.seven() == 7


@here
def test_a_command_may_have_words_behind_it(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = source.parent / "with a space"
    folder.mkdir()
    mine = folder / "mine"
    mine.write_text(f'#!/bin/sh\nexec {here_is} "$@"\n')
    mine.chmod(0o755)
    source.write_text("int seven(void) { return MINE; }\n")
    monkeypatch.setenv("CC", f"'{mine}' -DMINE=7")
    found = native.library(source)
    assert found is not None and found.seven() == 7 and native.compiled_by() == "mine -DMINE=7"
    source.write_text("int seven(void) { return 70; }\n")
    monkeypatch.setenv("CC", str(mine))
    native.library.cache_clear()
    found = native.library(source)
    assert found is not None and found.seven() == 70 and native.compiled_by() == "mine"
    monkeypatch.setenv("CC", "no-such-compiler 'and an open quotation mark")
    assert shlex.join(native.compiler() or []) != str(mine) and native.compiler() is not None


def test_a_compiler_that_hangs_is_waited_for_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = source.with_name("slow")
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(native, "_PATIENCE", 0.2)
    began = time.monotonic()
    assert native.library(source) is None and native.library(source, "-O0") is None
    with pytest.raises(subprocess.SubprocessError, match="did not come back in 0.2 s"):
        native._compiled([], source.parent)
    assert time.monotonic() - began < 30


@here
def test_what_cannot_be_compiled_is_done_without(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    source.write_text("int seven(void) { return")
    with caplog.at_level("INFO"):
        assert native.library(source) is None
    assert "some.c is not compiled, and PyTorch's own functions are used" in caplog.text
    assert native.library(source.with_name("missing.c")) is None


def test_a_machine_without_a_compiler_does_without(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(source.parent))
    monkeypatch.delenv("CC", raising=False)
    assert native.compiler() is None and native.library(source) is None and native.compiled_by() == "none"


@here
def test_the_compiler_can_be_chosen(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = source.with_name("mine")
    mine.write_text(f'#!/bin/sh\nexec {here_is} -DMINE "$@"\n')
    mine.chmod(0o755)
    source.write_text("#ifdef MINE\nint seven(void) { return 70; }\n#else\nint seven(void) { return 7; }\n#endif\n")
    assert native.library(source) is not None
    monkeypatch.setenv("CC", str(mine))
    native.library.cache_clear()
    found = native.library(source)  # and not what the other one has made
    assert found is not None and found.seven() == 70


@here
def test_a_compiler_that_was_replaced_makes_its_own(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = source.with_name("mine")
    source.write_text("int seven(void) { return MINE; }\n")
    monkeypatch.setenv("CC", str(mine))
    for version in ("7", "70"):
        mine.write_text(f'#!/bin/sh\nexec {here_is} -DMINE={version} "$@"\n')
        mine.chmod(0o755)
        native.library.cache_clear()
        found = native.library(source)
        assert found is not None and found.seven() == int(version)


@here
@pytest.mark.parametrize("words", ["-x c++", "-fvisibility=hidden"])
def test_functions_are_found_whatever_a_compiler_is_told(
    words: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", f"{here_is} {words}")
    found = native.library(source)
    assert found is not None and found.seven() == 7


@here
def test_the_arithmetic_of_the_process_stays_as_it_is(source: Path, tmp_path: Path) -> None:
    """With ``-ffast-math`` GCC makes libraries that switch small numbers off for all of a process."""
    script = (
        "import torch; from pathlib import Path; from isofed.functional import native; "
        f"found = native.library(Path({str(source)!r})); print(found.seven(), float(torch.full((1,), 1e-40) * 1) > 0)"
    )
    told = os.environ | {"CC": f"{here_is} -ffast-math", "ISOFED_CACHE": str(tmp_path / "told")}
    said = subprocess.run([sys.executable, "-c", script], env=told, capture_output=True, text=True)
    assert said.stdout.split() == ["7", "True"], said.stderr


@here
def test_where_nothing_kept_may_be_run_it_is_compiled_elsewhere(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = ctypes.CDLL

    def refusing(path: str) -> ctypes.CDLL:
        if path.startswith(str(tmp_path / "cache")):
            raise OSError("failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(ctypes, "CDLL", refusing)
    found = native.library(source)
    assert found is not None and found.seven() == 7


@here
def test_what_is_kept_can_be_changed_by_nobody_else(source: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert native.library(source) is not None
        (kept,) = made(tmp_path)
        assert kept.stat().st_mode & 0o777 == 0o700
        kept.chmod(0o722)
        first = kept.stat().st_ino
        native.library.cache_clear()
        assert native.library(source) is not None
        (kept,) = made(tmp_path)
        assert kept.stat().st_ino != first and kept.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


@here
def test_a_compiler_that_compiles_nothing_is_none(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{here_is} -mno-such-machine")
    assert native.compiler() is not None and native.compiled_by() == "none"


@here
def test_a_compiler_is_called_by_the_name_it_has(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As ccache does it: one program under the names of all compilers, and of no use under its own.
    many, called = source.with_name("many-9.1"), source.with_name("some-cc")
    many.write_text(f'#!/bin/sh\n[ "${{0##*/}}" = some-cc ] && exec {here_is} "$@"\nexit 1\n')
    many.chmod(0o755)
    called.symlink_to(many)
    monkeypatch.setenv("CC", str(called))
    found = native.library(source)
    assert found is not None and found.seven() == 7 and native.compiled_by() == "many-9.1"
