"""The updates of a round's clients, all of them, for methods that must see each one.

A mean needs one sum, however many clients there are; a median needs every update at once. They lie in one block, a row
for each client that was asked: on the device where they were made while the block is small, otherwise in a temporary
file, which the system keeps in memory as far as there is some.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, MutableMapping, Sequence

import numpy as np
import torch
from torch import Tensor

from isofed.errors import RunError

ROOM = 2**30  # bytes of a block that stays in memory


class Gathered(MutableMapping[int, Tensor]):
    """Vectors by client, in the rows of one block."""

    def __init__(self, clients: Sequence[int]) -> None:
        self._asked = sorted(clients)
        self._place = {client: place for place, client in enumerate(self._asked)}
        self._block: Tensor | None = None
        self._here: set[int] = set()

    def __setitem__(self, client: int, update: Tensor) -> None:
        if self._block is None:
            self._block = _block(len(self._asked), update)
        self._block[self._place[client]] = update
        self._here.add(client)

    def __getitem__(self, client: int) -> Tensor:
        if self._block is None or client not in self._here:
            raise KeyError(client)
        return self._block[self._place[client]]

    def __delitem__(self, client: int) -> None:
        self._here.remove(client)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._here))

    def __len__(self) -> int:
        return len(self._here)

    def rows(self) -> Tensor:
        """All that are here [clients, n], in ascending order of the clients; nothing more can be added then."""
        if self._block is None:
            raise ValueError("the updates of nobody")
        for place, client in enumerate(self):
            if place != self._place[client]:  # close the gaps of those that did not answer, without another block
                self._block[place] = self._block[self._place[client]]
        self._asked = list(self)
        self._place = {client: place for place, client in enumerate(self._asked)}
        return self._block[: len(self)]


def _block(rows: int, like: Tensor) -> Tensor:
    shape = rows, len(like)
    if rows * like.numel() * like.element_size() <= ROOM or like.dtype != torch.float32:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    try:
        with tempfile.TemporaryFile(prefix="isofed-") as file:  # which stays as long as it is mapped
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, rows * len(like) * 4)  # or a full disk would kill the process
            return torch.from_numpy(np.memmap(file, dtype=np.float32, mode="w+", shape=shape))
    except OSError as error:
        raise RunError(
            f"no room for the updates of {rows} clients ({rows * len(like) * 4 / 1e9:.1f} GB) in "
            f"{tempfile.gettempdir()} ({error.strerror}); set TMPDIR to a folder with more, or lower participation"
        ) from None
