"""Triton, in which a few kernels for GPUs are written, or nothing where it is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    tl: Any
    triton: Any
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None

__all__ = ["tl", "triton"]
