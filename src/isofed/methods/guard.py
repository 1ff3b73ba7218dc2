"""What must not go around a method that looks at, or hides, what each client sends.

A median protects the model only if nothing else that clients send reaches it, and noise hides a client only if every
number that it sends is inside the noised vector. Such a method lists in ``guards`` what it must not be composed with:

- ``"extras"``: what methods put into ``visit.mean`` and ``visit.sum``, which is summed as it is;
- ``"answers"``: to questions after the last round, which are summed as they are;
- ``"statistics"``: running statistics of batch norm, which are averaged as they are;
- ``"losses"``: the mean of the clients' training losses, which is left out of the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from isofed.errors import UserError
from isofed.layout import Policy
from isofed.models.base import Network

if TYPE_CHECKING:
    from isofed.methods.base import Method, Visit

Parts = Iterable[tuple[str, "Method"]]
GUARDED = ("extras", "answers", "statistics", "losses")


def check_parts(parts: Parts) -> None:
    """Refuse a composition whose parts say that they send more than a guard sees."""
    for name, method in parts:
        guard = _guard(parts, "extras")
        if guard and method.extras:
            raise UserError(
                f"'{name}' sends '{method.extras[0]}' beside its update, which '{guard}' would not see; "
                f"'{guard}' composes with methods that send their update alone"
            )
        guard = _guard(parts, "answers")
        if guard and method.exchanges:
            without = method.leaves.get("final")
            raise UserError(
                f"'{name}' asks the clients a question after the last round, whose answers '{guard}' would not see; "
                + (f"use {name}:{without}" if without else f"'{guard}' composes with methods that ask none")
            )


def check_statistics(parts: Parts, network: Network, policies: Mapping[str, Policy]) -> None:
    """Refuse shared running statistics where a guard would not see them."""
    guard = _guard(parts, "statistics")
    if not guard:
        return
    for name, buffer in network.named_buffers():
        if buffer.is_floating_point() and policies.get(name, Policy.SHARED) is Policy.SHARED:
            raise UserError(
                f"clients would send the running statistics of batch norm ('{name}') beside their updates, which "
                f"'{guard}' would not see; use norm=group:2 or norm=none, or keep them at home with fedbn"
            )


def check_extras(parts: Parts, visit: Visit) -> None:
    """Stop what a method sends without having said so, before it leaves the client."""
    sent = sorted(visit.mean.keys() | visit.sum.keys())
    guard = _guard(parts, "extras") if sent else None
    if guard:
        raise UserError(f"a method sends '{sent[0]}' beside its update, which '{guard}' would not see")


def _guard(parts: Parts, what: str) -> str | None:
    return next((name for name, method in parts if what in method.guards), None)
