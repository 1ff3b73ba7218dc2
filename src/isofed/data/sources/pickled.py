"""Reads the pickles that CIFAR is published as, without running anything in them.

A pickle is a program for a small machine with a stack, which may import and call what it likes. This is that machine
without import and without call: dictionaries, lists, tuples, texts, bytes and whole numbers, and the few names NumPy
writes for an array of bytes, which stand for nothing but themselves here. All else in a file is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from isofed.data.sources.published import MOST_BYTES, Bytes, unreadable
from isofed.errors import UserError

MOST_STEPS = 10_000_000  # CIFAR-100 takes 0.3 million; a step can cost far more memory than its byte in the file


class _Name(Enum):
    """The names a file may use; each is a mark on the stack, never the thing of that name."""

    ARRAY_MAKER = "_reconstruct"
    ARRAY = "ndarray"
    DTYPE = "dtype"
    ENCODE = "encode"  # how Python 3 writes bytes into a pickle that Python 2 can read


_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _Name.ARRAY_MAKER,
    ("numpy._core.multiarray", "_reconstruct"): _Name.ARRAY_MAKER,
    ("numpy", "ndarray"): _Name.ARRAY,
    ("numpy", "dtype"): _Name.DTYPE,
    ("_codecs", "encode"): _Name.ENCODE,
}


@dataclass(eq=False)
class _Array:
    """An array of bytes, first announced and later filled, as pickles do."""

    values: Bytes | None = None


class _Uint8:
    """The one type an array may have."""


class _Refused(Exception):
    """Something a data file has no need of; carries the rest of the sentence."""


_DAMAGED = "is not a complete pickle: unpack the data set again"


def read(path: Path) -> dict[str, Any]:
    """The dictionary in a file: its keys as text, arrays of uint8 as arrays, texts of Python 2 as bytes."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise UserError(f"'{path}' has {size:,} bytes: isofed reads at most {MOST_BYTES:,} from one such file")
        machine = _Machine(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        found = machine.run()
    except _Refused as refused:
        raise UserError(f"'{path}' {refused}") from None
    except (IndexError, KeyError, UnicodeError):
        raise UserError(f"'{path}' {_DAMAGED}") from None
    if not isinstance(found, dict):
        raise UserError(f"'{path}' holds no dictionary, which the files of this data set do: unpack it again")
    return {text(key): value.values if isinstance(value, _Array) else value for key, value in found.items()}


def text(value: Any) -> str:
    """A text of Python 2 (bytes) or of Python 3."""
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


class _Machine:
    """The stack, the marks in it, the memo, and the place in the file."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.place = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks under each open mark
        self.memo: dict[int, Any] = {}
        self.encoded = 0

    def run(self) -> Any:
        for _ in range(MOST_STEPS):
            code = self.data[self.place]
            self.place += 1
            if code in _VALUES:
                value = _VALUES[code](self)  # first, because it may put another stack in place
                self.stack.append(value)
            elif code in _ACTIONS:
                _ACTIONS[code](self)
            elif code == ord("."):
                if len(self.stack) != 1 or self.below:
                    raise _Refused(_DAMAGED)
                return self.stack[0]
            else:
                raise _Refused(
                    f"is not a pickle isofed reads: it has the code {code:#04x} at byte {self.place - 1}, and only "
                    "dictionaries, lists, texts, whole numbers and arrays of uint8 are read; nothing in it was run"
                )
        raise _Refused(f"takes more than {MOST_STEPS:,} steps to read, far more than any file of this data set")

    # What is in the file

    def take(self, count: int) -> bytes:
        end = self.place + count
        if end > len(self.data):
            raise _Refused(
                f"ends too early: it has {len(self.data):,} bytes and says that {count:,} follow byte {self.place:,}"
            )
        taken, self.place = self.data[self.place : end], end
        return taken

    def number(self, count: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(count), "little", signed=signed)

    def line(self) -> str:
        end = self.data.index(b"\n", self.place) if b"\n" in self.data[self.place : self.place + 256] else -1
        if end < 0:
            raise _Refused(_DAMAGED)
        return self.take(end + 1 - self.place)[:-1].decode()

    # What is on the stack

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise _Refused(_DAMAGED)
        taken = self.stack[-count:]
        del self.stack[-count:]
        return taken

    def to_mark(self) -> list[Any]:
        taken, self.stack = self.stack, self.below.pop()
        return taken

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def remember(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def extend(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise _Refused(_DAMAGED)
        self.stack[-1].extend(items)

    def update(self, items: list[Any]) -> None:
        # Only keys whose hash is quick: nested tuples can be made to take for ever.
        if not isinstance(self.stack[-1], dict) or len(items) % 2 or not {*map(type, items[::2])} <= {str, bytes, int}:
            raise _Refused(_DAMAGED)
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    # What would be imports and calls

    def name(self, module: Any, name: Any) -> _Name:
        known = _NAMES.get((module, name)) if isinstance(module, str) and isinstance(name, str) else None
        if known is None:
            shown = ascii(f"{module}.{name}"[:80]) if isinstance(module, str) and isinstance(name, str) else "a thing"
            raise _Refused(
                f"asks for {shown}, which data have no need of and which could do harm: nothing in it was run; "
                "get the data set from its publisher"
            )
        return known

    def reduce(self) -> Any:
        what, given = self.pop(2)
        if isinstance(given, tuple):
            if what is _Name.ARRAY_MAKER and given[:1] == (_Name.ARRAY,):
                return _Array()
            if what is _Name.DTYPE and given[:1] in (("u1",), (b"u1",), ("|u1",), (b"|u1",)):
                return _Uint8()
            if what is _Name.ENCODE and len(given) == 2 and isinstance(given[0], str) and given[1] == "latin1":
                self.encoded += len(given[0])
                if self.encoded <= len(self.data):  # more only by taking one text again and again
                    return given[0].encode("latin-1")
        raise _Refused("holds an object isofed does not read: its arrays must be of uint8; nothing in it was run")

    def build(self) -> None:
        (state,) = self.pop(1)
        thing = self.stack[-1]
        if isinstance(thing, _Uint8):
            return  # the state of a type is its byte order, which single bytes do not have
        if not isinstance(thing, _Array) or not isinstance(state, tuple) or len(state) != 5:
            raise _Refused("holds an object isofed does not read: nothing in it was run")
        _, shape, kind, by_column, raw = state
        sizes = shape if isinstance(shape, tuple) and {*map(type, shape)} == {int} and len(shape) <= 4 else ()
        if not sizes or min(sizes) < 1 or not isinstance(kind, _Uint8) or not isinstance(raw, bytes):
            raise _Refused("holds an array isofed does not read: it must be of uint8 and not empty")
        if math.prod(sizes) != len(raw):
            raise _Refused(f"has an array that says it is {list(sizes)} but has {len(raw):,} bytes: they must match")
        thing.values = np.frombuffer(raw, np.uint8).reshape(sizes, order="F" if by_column is True else "C")


# Steps that leave a value on the stack.
_VALUES: dict[int, Callable[[_Machine], Any]] = {
    ord("K"): lambda m: m.number(1),
    ord("M"): lambda m: m.number(2),
    ord("J"): lambda m: m.number(4, signed=True),
    0x8A: lambda m: m.number(m.number(1), signed=True),
    ord("N"): lambda m: None,
    0x88: lambda m: True,
    0x89: lambda m: False,
    ord("U"): lambda m: m.take(m.number(1)),  # texts of Python 2
    ord("T"): lambda m: m.take(m.number(4)),
    ord("C"): lambda m: m.take(m.number(1)),  # bytes of Python 3
    ord("B"): lambda m: m.take(m.number(4)),
    0x8C: lambda m: m.take(m.number(1)).decode("utf-8"),
    ord("X"): lambda m: m.take(m.number(4)).decode("utf-8"),
    ord("}"): lambda m: {},
    ord("]"): lambda m: [],
    ord(")"): lambda m: (),
    ord("t"): lambda m: tuple(m.to_mark()),
    0x85: lambda m: tuple(m.pop(1)),
    0x86: lambda m: tuple(m.pop(2)),
    0x87: lambda m: tuple(m.pop(3)),
    ord("h"): lambda m: m.memo[m.number(1)],
    ord("j"): lambda m: m.memo[m.number(4)],
    ord("c"): lambda m: m.name(m.line(), m.line()),
    0x93: lambda m: m.name(*m.pop(2)),
    ord("R"): lambda m: m.reduce(),
}
# Steps that change what is there.
_ACTIONS: dict[int, Callable[[_Machine], Any]] = {
    0x80: lambda m: m.take(1),  # the number of the protocol: an unknown step says more
    0x95: lambda m: m.take(8),  # the size of what follows, only a hint
    ord("("): lambda m: m.mark(),
    ord("q"): lambda m: m.remember(m.number(1)),
    ord("r"): lambda m: m.remember(m.number(4)),
    0x94: lambda m: m.remember(len(m.memo)),
    ord("a"): lambda m: m.extend(m.pop(1)),
    ord("e"): lambda m: m.extend(m.to_mark()),
    ord("s"): lambda m: m.update(m.pop(2)),
    ord("u"): lambda m: m.update(m.to_mark()),
    ord("b"): lambda m: m.build(),
}
