"""Host arrays into tensors that keep their addresses, without waiting for the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from isofed.layout import Tensors

_ALIGN = 64


class Upload:
    """Copies arrays into named tensors of a device.

    To a GPU they go through page-locked memory, which it reads by itself, so that the work queued before need not be
    done first. Two pieces of that memory take turns, and one is used again only when its last copy is over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turns = [_Locked(device), _Locked(device)]

    def __call__(self, targets: Tensors, arrays: dict[str, np.ndarray]) -> None:
        """Put arrays into the tensors of the same names.

        A tensor may have more rows than are given, and then keeps its other rows; one that is missing, too short or
        of another form is made anew.
        """
        for name, array in arrays.items():
            have, want = targets.get(name), torch.from_numpy(array)
            same = have is not None and have.dtype == want.dtype and have.shape[1:] == want.shape[1:]
            if have is None or not same or len(have) < len(want):
                targets[name] = torch.empty(want.shape, dtype=want.dtype, device=self._device)
        if self._device.type == "cuda":
            self._turns.reverse()
            self._turns[0].send(targets, arrays)
        else:
            for name, array in arrays.items():
                targets[name][: len(array)].copy_(torch.from_numpy(array))


class _Locked:
    """A piece of page-locked memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._read: torch.cuda.Event | None = None
        # Visits are alike: the same array of the same form goes from the same place to the same tensor.
        self._ways: dict[tuple[object, ...], tuple[np.ndarray, Tensor, Tensor]] = {}

    def send(self, targets: Tensors, arrays: dict[str, np.ndarray]) -> None:
        if self._read is not None:
            self._read.synchronize()
        room = sum(-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays.values())
        if len(self._memory) < room:
            self._memory = torch.empty(2 * room, dtype=torch.uint8, pin_memory=True)
            self._ways.clear()
        offset = 0
        for name, array in arrays.items():
            if array.nbytes:
                here, locked, there = self._way(name, array, targets[name], offset)
                here[...] = array
                there.copy_(locked, non_blocking=True)
                offset += -(-array.nbytes // _ALIGN) * _ALIGN
        self._read = self._read or torch.cuda.Event()
        self._read.record(torch.cuda.current_stream(self._device))

    def _way(self, name: str, array: np.ndarray, target: Tensor, offset: int) -> tuple[np.ndarray, Tensor, Tensor]:
        key = (name, offset, array.shape, array.dtype, target.data_ptr(), target.shape)
        found = self._ways.get(key)
        if found is None:
            if len(self._ways) > 256:  # clients of many sizes
                self._ways.clear()
            locked = self._memory[offset : offset + array.nbytes].view(target.dtype).view(array.shape)
            found = self._ways[key] = (locked.numpy(), locked, target[: len(array)])
        return found
