"""The two ways a command can end badly, and the helper that suggests a name.

A :class:`UserError` is a mistake in what was asked for (exit code 2); a :class:`RunError` is work that
could not be carried on (exit code 1). Both carry one sentence for a person; neither shows a traceback
unless ``--debug`` is given.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 2000  # characters of a message: what was typed or read may be of any length


class IsofedError(Exception):
    """Base of the errors that are shown as one sentence."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        if len(message) > _LONGEST:  # what is wrong stands at its start, what would be right at its end
            message = f"{message[: _LONGEST // 2]} … {message[-_LONGEST // 3 :]}"
        super().__init__(message)


class UserError(IsofedError, ValueError):
    """What was asked for cannot be done; the message says what is wrong and what would be right."""

    exit_code = 2


class RunError(IsofedError, RuntimeError):
    """The work started and could not go on; the message says what is kept and how to continue."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that does not exist, with the nearest existing one.

    >>> str(unknown("method", "fedprx", ["fedavg", "fedprox"]))
    "there is no method 'fedprx': did you mean 'fedprox'? Known: fedavg, fedprox"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name[:100].lower(), names, n=1, cutoff=0.6)
    hint = f": did you mean '{near[0]}'?" if near else "."
    return UserError(f"there is no {kind} '{name}'{hint} Known: {', '.join(names)}")
