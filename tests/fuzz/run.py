"""Feed generated inputs to every parser: ``python -m tests.fuzz.run``, or ``make fuzz``.

The same seed makes the same inputs. What fails is kept in ``tests/fuzz/found``, where the ordinary tests take it up.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from isofed.errors import IsofedError
from tests.fuzz.targets import Target, every

FOUND = Path(__file__).resolve().parent / "found"
SECONDS = 5  # that one input may take
MEMORY = 2**30  # bytes that a process may grow by; the largest input has a few hundred thousand


class TooSlow(Exception):
    """An input kept its parser busy for too long."""


def problem(target: Target, data: bytes) -> str | None:
    """How taking an input failed, if it did."""
    try:
        with limited():
            target.take(data)
    except IsofedError as error:
        text = str(error)
        return f"an error message of {len(text)} characters" if len(text) > 2000 or not text.strip() else None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}, line {where.lineno})"
    return None


@contextmanager
def limited() -> Iterator[None]:
    """End what takes too long, by the clock of the process, which a busy machine does not move."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def inputs(name: str, target: Target, count: int, seed: int) -> Iterator[bytes]:
    """So many inputs; each depends on its number and the seed alone."""
    for number in range(count):
        yield target.make(random.Random(f"{seed}/{name}/{number}"))


def fuzz(name: str, target: Target, count: int, seed: int) -> int:
    """Try so many inputs, keep those that fail, one for each way of failing, and say how it goes."""
    seen: set[str] = set()
    failed, began = 0, time.monotonic()
    for number, data in enumerate(inputs(name, target, count, seed), 1):
        if why := problem(target, data):
            failed += 1
            kind = why.partition(":")[0] + why.rpartition("(")[2]
            if kind not in seen:
                seen.add(kind)
                FOUND.mkdir(exist_ok=True)
                kept = FOUND / f"{name.replace(' ', '-')}-{hashlib.blake2b(data, digest_size=6).hexdigest()}"
                kept.write_bytes(data)
                print(f"{name}: {why}; kept as {kept.name}", flush=True)
        if number % max(count // 10, 1) == 0:
            print(f"{name}: {number} of {count}, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help="method, configuration, 'run folder', checkpoint, table, message"
    )
    parser.add_argument("--inputs", type=int, default=100_000, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="isofed-fuzz-", dir=memory if memory.is_dir() else None) as folder:
        targets = every(Path(folder))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
        chosen = arguments.targets or list(targets)
        failed = sum(fuzz(name, targets[name], arguments.inputs, arguments.seed) for name in chosen)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
