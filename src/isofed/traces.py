"""Where an error comes from: in a sentence, and as the traceback that ``--debug`` shows."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterable
from types import FrameType

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_INSTALLED = tuple(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


class Elsewhere(Exception):
    """A traceback of another moment or another process, as text: the cause of an error that is raised here.

    The exception itself would keep the tensors of its frames alive, and cannot travel between processes.
    """

    @classmethod
    def of(cls, trace: str) -> Elsewhere | None:
        """The cause, if there is a traceback to show."""
        return cls(f"\n\n{trace}") if trace else None


def place_of(error: BaseException) -> str:
    """Where in a user's own code an error comes from, as in `` (mine.py, line 12, in Mine.loss)``; perhaps nowhere."""
    return _nearest(reversed(list(traceback.walk_tb(error.__traceback__))))


def place_here() -> str:
    """The same of the call that is being made."""
    return _nearest(traceback.walk_stack(None))


def _nearest(frames: Iterable[tuple[FrameType, int]]) -> str:
    for frame, line in frames:
        code = frame.f_code
        if not code.co_filename.startswith((_OWN, "<frozen", *_INSTALLED)):
            name = code.co_qualname.rsplit("<locals>.", 1)[-1]
            return f" ({os.path.basename(code.co_filename)}, line {line}, in {name})"
    return ""
