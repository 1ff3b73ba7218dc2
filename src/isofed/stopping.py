"""How a command is stopped before its end: by Ctrl-C, by a signal, or because nobody reads its output any more."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class NobodyReads(KeyboardInterrupt):
    """Whoever read the output has had enough, as with ``| head``: work ends as if it was interrupted."""


@contextmanager
def terminated() -> Iterator[None]:
    """A polite request to end is heard like Ctrl-C: what was done is saved, and the next call goes on.

    Schedulers send SIGTERM, a terminal that is closed SIGHUP. What is ignored, as by nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt  # not SIGINT again, which a shell lets programs in the background ignore

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heard = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in heard:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)


@contextmanager
def interruptible(kept: str = "") -> Iterator[None]:
    """Whatever stops the work, it is said that it was stopped, and what of it is kept."""
    try:
        yield
    except KeyboardInterrupt as why:
        gone = "Nobody reads the output any more." if isinstance(why, NobodyReads) else ""
        raise KeyboardInterrupt(" ".join(filter(None, [gone, kept]))) from None


def resumable(command: str) -> str:
    """What is kept of work that goes on where it was stopped."""
    return f"Nothing that was finished is lost; to go on: {command}"
