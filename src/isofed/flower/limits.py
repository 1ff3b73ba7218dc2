"""A bound on what an answer may bring into the server's memory, checked before any of it is fetched.

Flower moves a message as a tree of objects, each in one request, whose length the server's process bounds
(:class:`isofed.flower.link.Bounded`). Which objects there are is known before they are fetched. So an answer of more
objects than a proper one could have is not fetched at all, and counts as no answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.serverapp import Grid

from isofed.flower.wire import Forms, size

PIECE = FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
_OTHERS = 32  # objects of a message besides its arrays, with room to spare


def objects(forms: Forms) -> int:
    """How many objects a message with these arrays has at most: each array, and its pieces."""
    return _OTHERS + sum(2 + size(form) // PIECE for form in forms.values())


def limit(grid: Grid, most: Callable[[], int], note: Callable[[str], None]) -> None:
    """Let a grid fetch no answer of more than ``most()`` objects."""
    client: Any = getattr(grid, "_runtime_client", None)
    if client is None:  # not one that fetches from elsewhere
        return
    pull = client.PullMessages

    def bounded(request: Any) -> Any:
        found = pull(request)
        kept = [
            (message, tree)
            for message, tree in zip(found.messages_list, found.message_object_trees, strict=True)
            if _count(tree, most()) <= most()
        ]
        if len(kept) < len(found.messages_list):
            note(f"an answer of more than {most()} pieces was not fetched")
            del found.messages_list[:], found.message_object_trees[:]
            found.messages_list.extend(message for message, _ in kept)
            found.message_object_trees.extend(tree for _, tree in kept)
        return found

    client.PullMessages = bounded


def _count(tree: Any, most: int) -> int:
    """Objects of a tree, counted no further than one beyond the limit."""
    seen, todo = 0, [tree]
    while todo and seen <= most:
        seen += 1
        todo += todo.pop().children
    return seen
