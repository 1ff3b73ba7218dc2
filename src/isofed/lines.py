"""A file of JSON lines that grows while a run goes on, and survives being cut off at any byte."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from isofed.errors import RunError
from isofed.files import DamagedFile, plain, write_atomic, write_error


class Lines:
    """A file of JSON lines, one for a round, that grows; a half-written last line is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._whole = False  # whether this object has seen to it that the file ends with a whole line

    def append(self, line: dict[str, Any]) -> None:
        """Add one line; a NaN or an infinity is written as null, which any JSON reader takes."""
        text = json.dumps(plain(line), allow_nan=False) + "\n"
        if not self._whole:
            whole, _ = self._read()
            self._cut(sum(len(raw) for raw, _ in whole))
            self._whole = True
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("ab") as file:
                file.write(text.encode())
        except OSError as error:
            with suppress(OSError, RunError):  # a full disk takes half a line
                self._cut(size)
            raise write_error(self.path, error) from error

    def read(self) -> list[dict[str, Any]]:
        """What the whole lines say."""
        return [line for _, line in self._read()[0]]

    def rewind(self, round: int) -> None:
        """Drop the lines of later rounds, and a half-written last one."""
        whole, half = self._read()
        kept = [raw for raw, line in whole if (line.get("round") or 0) <= round]
        if half or len(kept) < len(whole):
            write_atomic(self.path, b"".join(kept))

    def sync(self) -> None:
        """See to it that the lines survive a power cut."""
        if self.path.exists():
            try:
                with self.path.open("r+b") as file:
                    os.fsync(file.fileno())
            except OSError as error:
                raise write_error(self.path, error) from error

    def _read(self) -> tuple[list[tuple[bytes, dict[str, Any]]], bool]:
        """The whole lines with what they say, and whether a half-written one follows."""
        try:
            raws = self.path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return [], False
        except OSError as error:
            raise RunError(f"cannot read {self.path}: {error.strerror}") from error
        whole: list[tuple[bytes, dict[str, Any]]] = []
        for number, raw in enumerate(raws, 1):
            line = None
            with suppress(ValueError, RecursionError):
                line = json.loads(raw) if raw.endswith(b"\n") else None
            if isinstance(line, dict):
                whole.append((raw, line))
            elif number == len(raws):
                return whole, True
            else:
                raise DamagedFile(f"line {number} of {self.path} is damaged: mend it or delete that line")
        return whole, False

    def _cut(self, size: int) -> None:
        """Shorten the file to ``size`` bytes, if it is longer."""
        if self.path.exists() and self.path.stat().st_size > size:
            try:
                os.truncate(self.path, size)
            except OSError as error:
                raise write_error(self.path, error) from error
