"""What the robust combinations share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# What clients send beside their updates is summed plainly, where one of them alone can move it at will.
GUARDS = frozenset({"extras", "answers"})
_AT_ONCE = 2**22  # numbers, whatever the number of clients: what is made on the way stays small


def column_blocks(updates: Tensor) -> Iterator[slice]:
    """Parts of the columns that are worked on together."""
    size = max(1, _AT_ONCE // max(len(updates), 1))
    return (slice(start, start + size) for start in range(0, updates.shape[1], size))


def by_columns(updates: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
    """One float64 vector [n] from updates [clients, n], by a function that treats each column by itself."""
    made = torch.empty(updates.shape[1], dtype=torch.float64, device=updates.device)
    for columns in column_blocks(updates):
        made[columns] = combine(updates[:, columns])
    return made
