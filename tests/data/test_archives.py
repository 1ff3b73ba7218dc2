"""Unpacking archives: whole ones, and every way one can be broken or hostile."""

from __future__ import annotations

import errno
import gzip
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from isofed.data import archives
from isofed.data.archives import unpack
from isofed.errors import RunError
from tests.data.archive_tools import a_zip_link, file, special, tar_of, zip_of


def test_archives_are_unpacked_whole(tmp_path: Path) -> None:
    setuid = file("set/sub/program")
    setuid[0].mode = 0o6777
    for name, content in (
        ("a.tar.gz", tar_of(special("set", tarfile.DIRTYPE), file("set/a.bin"), file("./set/sub/b.bin"), setuid)),
        ("a.zip", zip_of(("set/", b""), ("set/a.bin", b"content"), ("set/sub/b.bin", b"content"))),
    ):
        (tmp_path / name).write_bytes(content)
        folder = tmp_path / name.replace(".", "-") / "set"
        folder.parent.mkdir()
        unpack(tmp_path / name, folder, most=10_000)
        assert {p.name for p in folder.rglob("*.bin")} == {"a.bin", "b.bin"}
        assert (folder / "sub" / "b.bin").read_bytes() == b"content"
        assert os.listdir(folder.parent) == ["set"]
        for path in folder.rglob("*"):
            assert not path.stat().st_mode & (stat.S_ISUID | stat.S_ISGID)


HOSTILE = {
    "up": (tar_of(file("set/a"), file("set/../../out")), "leads out of its folder"),
    "absolute": (tar_of(file("set/a"), file("/tmp/isofed-out")), "leads out of its folder"),
    "backslash": (tar_of(file("set/a"), file("..\\out")), "leads out of its folder"),
    "drive": (tar_of(file("C:out")), "leads out of its folder"),
    "symlink": (tar_of(special("set/link", tarfile.SYMTYPE, "../.."), file("set/link/out")), "link or a device"),
    "link inside": (tar_of(file("set/a"), special("set/link", tarfile.SYMTYPE, "a")), "link or a device"),
    "hard link": (tar_of(special("set/link", tarfile.LNKTYPE, "/etc/passwd")), "link or a device"),
    "device": (tar_of(special("set/device", tarfile.CHRTYPE)), "link or a device"),
    "pipe": (tar_of(special("set/pipe", tarfile.FIFOTYPE)), "link or a device"),
    "twice": (tar_of(file("set/a"), file("set/a")), "twice"),
    "bomb": (tar_of(file("set/a", bytes(2_000_000))), "more than the 1 MB"),
    "many small": (tar_of(*(file(f"set/{i}", bytes(100_000)) for i in range(20))), "more than the 1 MB"),
    "many": (tar_of(*(file(f"set/{i}", b"") for i in range(60))), "more than 50 files"),
    "elsewhere": (tar_of(file("other/a")), "does not hold the folder 'set'"),
    "a file": (tar_of(file("set")), "does not hold the folder 'set'"),
    "cut": (tar_of(file("set/a", os.urandom(100_000)))[:50_000], "is damaged"),
    "nothing": (b"", "is damaged"),
    "text": (b"<html>sign in first</html>", "is damaged"),
    "no tar": (gzip.compress(b"something else" * 100), "is damaged"),
    "zip up": (zip_of(("set/a", b""), ("set/../../out", b"")), "leads out of its folder"),
    "zip absolute": (zip_of(("/tmp/isofed-out", b"")), "leads out of its folder"),
    "zip link": (zip_of(a_zip_link("set/link", b"../.."), ("set/link/out", b"")), "link or a device"),
    "zip bomb": (zip_of(("set/a", bytes(2_000_000))), "more than the 1 MB"),
    "zip many small": (zip_of(*((f"set/{i}", bytes(100_000)) for i in range(20))), "more than the 1 MB"),
    "zip lies": (
        zip_of(("set/a", bytes(2_000_000))).replace((2_000_000).to_bytes(4, "little"), (10).to_bytes(4, "little")),
        "is damaged",
    ),
    "zip elsewhere": (zip_of(("other/a", b"")), "does not hold the folder 'set'"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_or_broken_archive_leaves_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MOST_MEMBERS", 50)
    content, why = HOSTILE[name]
    inside = tmp_path / "one" / "two"
    inside.mkdir(parents=True)
    (inside / "archive").write_bytes(content)
    with pytest.raises(RunError, match=why):
        unpack(inside / "archive", inside / "set", most=1_000_000)
    assert os.listdir(inside) == ["archive"] and os.listdir(tmp_path) == ["one"]
    assert os.listdir(tmp_path / "one") == ["two"] and not Path("/tmp/isofed-out").exists()


def test_a_header_that_claims_gigabytes_costs_no_memory(tmp_path: Path) -> None:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 8_000_000_000
    zeros = header.tobuf(tarfile.GNU_FORMAT) + bytes(64_000_000)
    (tmp_path / "archive").write_bytes(gzip.compress(zeros, 1))
    with pytest.raises(RunError, match=r"is not unpacked: it holds more than|is damaged"):
        unpack(tmp_path / "archive", tmp_path / "set", most=1_000_000)
    assert os.listdir(tmp_path) == ["archive"]


def test_a_disk_that_is_full_while_unpacking_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "archive").write_bytes(tar_of(file("set/a")))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(RunError, match="cannot write .*set: the disk or the quota is full"):
        unpack(tmp_path / "archive", tmp_path / "set", most=1_000_000)
    assert os.listdir(tmp_path) == ["archive"]
