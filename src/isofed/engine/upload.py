"""Host arrays into tensors that keep their addresses, without waiting for the device."""

from __future__ import annotations

import numpy as np
import torch

from isofed.layout import Tensors

_ALIGN = 64
_BUFFERS = 2  # one is filled while the device may still read the other


class Upload:
    """Copies arrays into named tensors of a device.

    To a GPU they go through page-locked memory, which it reads by itself, so that the work queued before need not be
    done first. Two pieces of that memory take turns, and one is used again only when its last copy is over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = [torch.empty(0, dtype=torch.uint8)] * _BUFFERS
        self._read: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._turn = 0

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
            self._through_locked_memory(targets, arrays)
        else:
            for name, array in arrays.items():
                targets[name][: len(array)].copy_(torch.from_numpy(array))

    def _through_locked_memory(self, targets: Tensors, arrays: dict[str, np.ndarray]) -> None:
        self._turn = (self._turn + 1) % _BUFFERS
        read = self._read[self._turn]
        if read is not None:
            read.synchronize()
        room = sum(-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays.values())
        if len(self._memory[self._turn]) < room:
            self._memory[self._turn] = torch.empty(2 * room, dtype=torch.uint8, pin_memory=True)
        memory, offset = self._memory[self._turn], 0
        for name, array in arrays.items():
            if not array.nbytes:
                continue
            locked = memory[offset : offset + array.nbytes].view(targets[name].dtype).view(array.shape)
            locked.copy_(torch.from_numpy(array))
            targets[name][: len(array)].copy_(locked, non_blocking=True)
            offset += -(-array.nbytes // _ALIGN) * _ALIGN
        self._read[self._turn] = event = read or torch.cuda.Event()
        event.record()
