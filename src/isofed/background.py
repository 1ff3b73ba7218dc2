"""A thread that works beside the training.

Ctrl-C and SIGTERM can come between any two steps of Python, also inside what Python's own executors do with their
locks; one would stay locked, and the process hang where it should save its last round. So there is a queue here, and a
lock, that are single steps.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Background:
    """Does one thing after another; what it has not come to when the process ends is not done."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def do(self, work: Callable[[], object]) -> None:
        """Have it done, in its turn."""
        self._queue.put(work)

    def settle(self) -> None:
        """Wait for all that was given before."""
        done = threading.Lock()
        done.acquire()
        self._queue.put(done.release)
        done.acquire()

    def _run(self) -> None:
        while True:
            work = self._queue.get()
            try:
                work()
            except Exception:
                _log.exception("%s could not do its work", threading.current_thread().name)
            del work  # and with it what it holds: the next may be long in coming
