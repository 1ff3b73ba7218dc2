"""CUDA graphs as they would behave, on a processor.

The engine's own lane for processors does recorded work anew each time, so it cannot show what a graph gets wrong: a
replay repeats the operations of the recording on the very same memory, and sees nothing of what has moved since. This
lane writes down every operation with its tensors, undoes what it did, and replays it into the same places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isofed.engine.lane import Lane

READS = ("_local_scalar_dense", "nonzero")  # of what only the device knows
SILENT = "batch_norm"  # writes statistics without saying so
UNDEFINED = ("aten.empty", "aten.new_empty")  # a replay has nothing to put there


class Replaying(Lane):
    """Records operations and repeats them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.records = True

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        taken = _Recording()
        try:
            with taken:
                work()
        finally:
            for storage, before in taken.before.values():
                storage.copy_(before)
        done = [one for one in taken.operations if one.changes]

        def replay() -> None:
            with torch.no_grad():
                for one in done:
                    made = _tensors(one.function(*one.args, **one.kwargs))
                    for place, target in one.fresh:
                        target.detach().copy_(made[place])

        return replay


class _Operation(NamedTuple):
    function: Any
    args: Any
    kwargs: Any
    fresh: list[tuple[int, Tensor]]  # results with memory of their own, with their places among the results
    changes: bool  # it is more than a view


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self.before: dict[int, tuple[Any, Any]] = {}  # what was written over, as it had been

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
        if any(word in name for word in READS):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        arguments = [*zip(func._schema.arguments, args, strict=False)]
        arguments += [(one, kwargs[one.name]) for one in func._schema.arguments if one.name in kwargs]
        written = [t for one, value in arguments if _writes(one) for t in _tensors(value)]
        given = _tensors((args, kwargs))
        for tensor in given if SILENT in name else written:
            storage = tensor.untyped_storage()
            if storage.data_ptr() and storage.data_ptr() not in self.before:
                self.before[storage.data_ptr()] = (storage, storage.clone())
        out = func(*args, **kwargs)
        known = {t.untyped_storage().data_ptr() for t in given}
        own = [(i, t) for i, t in enumerate(_tensors(out)) if t.untyped_storage().data_ptr() not in known]
        changes = (bool(own) or bool(written) or SILENT in name) and not name.startswith(UNDEFINED)
        self.operations.append(_Operation(func, args, kwargs, [(i, t) for i, t in own if t.numel()], changes))
        return out


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
