"""Inputs for parsers: valid ones, broken in ways that files and fingers break, and some made to hurt."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Change = Callable[[random.Random, bytes], bytes]

# What parsers stumble over: ends of ranges, other types, structure, encodings.
TOKENS = (
    *(b"0", b"-1", b"1e309", b"-1e-400", b"nan", b"inf", b"-.inf", b"1_0", b"0x1F", b"0o7", b"9" * 30, b"9" * 5000),
    *(b"null", b"none", b"~", b"true", b"[]", b"{}", b"[[]]", b'""', b"''", b"\0", b"\r\n", b"\t", b"\n", b" " * 50),
    *(b":", b"+", b",", b"=", b"#", b"- ", b"? ", b"|", b">", b"&a ", b"*a", b"{", b"[", b'"', b"'", b"<<: ", b"...\n"),
    *(b"!!binary ", b"!!python/object:os.system ", b"!!set ", b"!!omap ", b"!!timestamp ", b"%YAML 9.9\n---\n"),
    *(b"2001-13-45", b"12:30:99", b"../", b"/dev/null", b"~root", b"a.py:B", b".py:", b"\xff\xfe", b"\xed\xa0\x80"),
    *("ﷺ".encode(), "٣".encode(), "²".encode(), b"fedprox:mu=", b"fedavg+", b"gaussian:", b"every:", b"group:"),
    *(b"dirichlet:", b"step:every=", b"synthetic:samples="),
)


def _flip(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data)) if data else 0
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice(TOKENS) + data[at:]


def _replace(rng: random.Random, data: bytes) -> bytes:
    start = rng.randint(0, len(data))
    return data[:start] + rng.choice(TOKENS) + data[min(len(data), start + rng.randint(0, 12)) :]


def _drop(rng: random.Random, data: bytes) -> bytes:
    start = rng.randint(0, len(data))
    return data[:start] + data[min(len(data), start + rng.randint(1, 40)) :]


def _cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randint(0, len(data))]


def _repeat(rng: random.Random, data: bytes) -> bytes:
    start = rng.randint(0, len(data))
    piece = data[start : start + rng.randint(1, 40)]
    return data[:start] + piece * rng.choice([2, 3, 50]) + data[start:]


def _swap_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    rng.shuffle(lines)
    return b"".join(lines)


def _nest(rng: random.Random, data: bytes) -> bytes:
    """Deeper than a parser that calls itself can go."""
    start, end = rng.choice([(b"[", b"]"), (b"{a: ", b"}"), (b'{"a":', b"}"), (b"- ", b"")])
    depth = rng.choice([5, 50, 2000])
    at = rng.randint(0, len(data))
    return data[:at] + start * depth + end * depth + data[at:]


def _laugh(rng: random.Random, data: bytes) -> bytes:
    """A few lines that stand for billions."""
    lines = [b"x0: &x0 [1, 1]"] + [
        b"x%d: &x%d [%s]" % (i, i, b", ".join([b"*x%d" % (i - 1)] * 9)) for i in range(1, 12)
    ]
    return b"\n".join(lines) + b"\nmethod: *x11\n" + data


CHANGES: Sequence[Change] = (*(_flip, _flip, _insert, _insert, _replace, _replace, _drop, _cut, _repeat, _swap_lines),)
RARE: Sequence[Change] = (_nest, _laugh)


def broken(
    rng: random.Random, data: bytes, changes: Sequence[Change] = CHANGES, rare: Sequence[Change] = RARE
) -> bytes:
    """One to six changes; now and then one that is made to hurt."""
    for _ in range(rng.choice([1, 1, 2, 3, 6])):
        data = rng.choice(changes)(rng, data)
    return rng.choice(rare)(rng, data) if rare and rng.random() < 0.02 else data


def anything(rng: random.Random, most: int = 200) -> bytes:
    """Bytes without any sense."""
    return rng.randbytes(rng.randint(0, most))
