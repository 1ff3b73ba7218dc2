"""The two ways a command can end badly, and the helper that suggests a name.

A :class:`UserError` is a mistake in what was asked for (exit code 2); a :class:`RunError` is work that
could not be carried on (exit code 1). Both carry one sentence for a person; neither shows a traceback
unless ``--debug`` is given.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import takewhile

_LISTED_BY = {
    "setting": "isofed settings",
    "method": "isofed methods",
    "model": "isofed models",
    "data set": "isofed data",
    "data set, file or folder": "isofed data",
}
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


class NotFinite(RunError, ValueError):
    """What is to be measured holds a NaN or an infinity, so that there is no number to give.

    What could be measured all the same is its ``rest``.
    """

    def __init__(self, message: str, rest: object = None) -> None:
        super().__init__(message)
        self.rest = rest


class BadMethod(RunError):
    """A method's code breaks a rule of the place where it acts: it would do so at every client, so the run ends."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that does not exist, with the nearest existing one; without one, with all there are.

    >>> str(unknown("method", "fedprx", ["fedavg", "fedprox"]))
    "there is no method 'fedprx': did you mean 'fedprox'? `isofed methods` lists all"
    >>> str(unknown("option", "my", ["mu"]))
    "there is no option 'my'. Known: mu"
    """
    names = sorted(known)
    typed = name[:100].lower()
    near = difflib.get_close_matches(typed, names, n=5, cutoff=0.6)
    if not near:
        return UserError(f"there is no {kind} '{name}'. Known: {', '.join(names)}")
    best = difflib.SequenceMatcher(None, near[0], typed).ratio()
    # Of those that are equally near, the one that begins like it: resnet20 rather than resnet32 for resnet21.
    equal = [n for n in near if difflib.SequenceMatcher(None, n, typed).ratio() == best]
    nearest = max(equal, key=lambda n: _beginning(n, typed))
    rest = f"`{_LISTED_BY[kind]}` lists all" if kind in _LISTED_BY else f"Known: {', '.join(names)}"
    return UserError(f"there is no {kind} '{name}': did you mean '{nearest}'? {rest}")


def _beginning(one: str, other: str) -> int:
    """How many characters two texts have in common at their start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
