"""Products of small matrices on a processor, many at once.

They are NumPy's: its OpenBLAS has kernels for small matrices that use AVX-512 on a processor of any maker and copy
nothing. PyTorch has MKL, which does not use it on processors of other makers than its own, and oneDNN, which takes one
matrix at a time and 20 microseconds to begin: 36 products of 490x32 and 32x64 took one core of an AMD EPYC 0.7 ms here,
and 1.2 and 1.5 ms there.
"""

from __future__ import annotations

import math
import os
import threading
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALL = 10**6  # multiplications up to which a product is one of these; they run in one thread


def available() -> bool:
    """Whether this processor and this NumPy have such products; ``ISOFED_FUSED=0`` switches them off."""
    return os.environ.get("ISOFED_FUSED", "1") != "0" and _is_here()


@cache
def _is_here() -> bool:
    built: Any = np.show_config(mode="dicts")
    blas = str(built.get("Build Dependencies", {}).get("blas", {}).get("name", ""))
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and "openblas" in blas.lower()


class _Rooms(threading.local):
    """Memory for what is needed only until the next step: the system has to clear what is new."""

    def __init__(self) -> None:
        self.here: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        if name not in self.here or len(self.here[name]) < size:
            self.here[name] = torch.empty(size)
        return self.here[name][:size].view(shape)


room = _Rooms()


@cache
def pieces(length: int, most: int) -> int:
    """Into how many equal pieces, as few as possible, something has to be cut for none to be longer than that."""
    return next(n for n in range(max(1, -(-length // max(1, most))), length + 1) if length % n == 0)


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Products of matrices, which are the last two axes."""
    np.matmul(a.numpy(), b.numpy(), out=out.numpy())


def along(matrix: Tensor, x: Tensor, out: Tensor) -> None:
    """The same with one matrix, in small products."""
    n = pieces(x.shape[-1], SMALL // matrix.numel())
    if n > 1:
        x, out = (t.unflatten(-1, (n, -1)).transpose(-3, -2) for t in (x, out))
    multiply(matrix, x, out)
