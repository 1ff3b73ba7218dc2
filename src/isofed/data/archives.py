"""Unpack .tar.gz and .zip files from somebody else: files and folders only, inside one folder, up to a size."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from isofed.errors import RunError
from isofed.files import write_error

MOST_MEMBERS = 2_000_000
_CHUNK = 1 << 20


class _Hostile(Exception):
    """A member that no honest archive has."""


def unpack(archive: Path, folder: Path, most: int) -> None:
    """Unpack the folder of the same name out of an archive, so that it appears whole or not at all.

    Links, devices, absolute names, names with ``..`` and anything beyond ``most`` bytes are refused. Since no link is
    ever made and nothing is overwritten, no name can lead out of the folder by way of another.
    """
    beside = folder.parent / f".{folder.name}.tmp"
    shutil.rmtree(beside, ignore_errors=True)  # of a process that was killed
    try:
        beside.mkdir()
        with _explained(archive):
            if zipfile.is_zipfile(archive):
                _unzip(archive, beside, _Budget(most))
            else:
                _untar(archive, beside, _Budget(most))
        if not (beside / folder.name).is_dir():
            raise RunError(f"{archive} does not hold the folder '{folder.name}' that was expected: nothing was kept")
        if hasattr(os, "sync"):
            os.sync()  # one call rather than one for each of a hundred thousand files
        os.rename(beside / folder.name, folder)
    except OSError as error:
        raise write_error(folder, error) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def _explained(archive: Path) -> Iterator[None]:
    try:
        yield
    except _Hostile as error:
        raise RunError(f"{archive} is not unpacked: {error}") from None
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        gzip.BadGzipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        UnicodeError,
    ) as error:
        raise RunError(f"{archive} is damaged ({error}): delete it and get it again") from None


class _Budget:
    """Bytes and members that may still come."""

    def __init__(self, most: int) -> None:
        self.most = self.left = most
        self.members = MOST_MEMBERS

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise _Hostile(f"it holds more than the {self.most / 1e6:,.0f} MB that it may")

    def member(self) -> None:
        self.members -= 1
        if self.members < 0:
            raise _Hostile(f"it holds more than {MOST_MEMBERS:,} files")


class _Counted(io.RawIOBase):
    """A stream that stops at a limit: long headers, too, are read into memory."""

    def __init__(self, stream: gzip.GzipFile, budget: _Budget) -> None:
        self._stream, self._budget = stream, budget

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._budget.spend(len(data))
        return data


def _target(name: str, folder: Path) -> Path:
    """Where a member goes."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or ":" in name:
        raise _Hostile(f"it holds the name {name!r}, which leads out of its folder")
    return folder.joinpath(*path.parts)


def _untar(archive: Path, folder: Path, budget: _Budget) -> None:
    # The whole stream counts, with its headers and padding: at most 1.5 KB a file more than the files themselves.
    whole = _Budget(budget.most + 16 * 1024 * 1024)
    with (
        gzip.open(archive) as stream,
        tarfile.open(fileobj=_Counted(stream, whole), mode="r|") as tar,
    ):
        for member in tar:
            budget.member()
            target = _target(member.name, folder)
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
            elif member.isreg():
                content = tar.extractfile(member)
                assert content is not None
                _write(content, target, member.size, member.name, budget)
            else:
                raise _Hostile(f"'{member.name}' in it is a link or a device, neither a file nor a folder")


def _unzip(archive: Path, folder: Path, budget: _Budget) -> None:
    with zipfile.ZipFile(archive) as file:
        for member in file.infolist():
            budget.member()
            target = _target(member.filename, folder)
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _Hostile(f"'{member.filename}' in it is a link or a device, neither a file nor a folder")
            if member.flag_bits & 1:
                raise _Hostile("it is encrypted")
            if member.is_dir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            with file.open(member) as content:
                _write(content, target, member.file_size, member.filename, budget)


def _write(content: IO[bytes], target: Path, size: int, name: str, budget: _Budget) -> None:
    """Copy one file; what it says about its size is not trusted."""
    if size > budget.left:
        budget.spend(size)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        out: Any = target.open("xb")
    except FileExistsError:
        raise _Hostile(f"it holds '{name}' twice") from None
    with out:
        while chunk := content.read(_CHUNK):
            budget.spend(len(chunk))
            out.write(chunk)
