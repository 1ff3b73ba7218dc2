"""What crosses the network: named arrays as raw bytes, and plain numbers and texts. Nothing is ever unpickled.

Each side knows the names, types and shapes it may be sent, from its own copy of the network and the method. A message
is compared with them first; only what fits is turned into tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from isofed.files import raw
from isofed.layout import Tensors

PROTOCOL = 1
_RAW = "isofed.raw"  # the bytes of a tensor in order, and nothing else
_ARRAYS, _FACTS = "arrays", "facts"
_DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64, "bool": torch.bool}
_LONGEST = 2000  # signs of a text that are read

Form = tuple[str, tuple[int, ...]]  # type and shape of a tensor
Forms = Mapping[str, Form]
Facts = dict[str, Any]


class BadMessage(ValueError):
    """A message that is not what was asked for; the text says in what, as the end of a sentence about its sender."""


def form(tensor: Tensor) -> Form:
    """Type and shape."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def forms(tensors: Tensors) -> dict[str, Form]:
    """Those of several tensors."""
    return {name: form(tensor) for name, tensor in tensors.items()}


def size(form: Form) -> int:
    """Bytes of a tensor."""
    dtype, shape = form
    return math.prod(shape) * _DTYPES[dtype].itemsize


def record(tensors: Tensors) -> ArrayRecord:
    """Tensors as they travel."""
    return ArrayRecord({name: _array(tensor) for name, tensor in tensors.items()})


def _array(tensor: Tensor) -> Array:
    dtype, shape = form(tensor)
    return Array(dtype, shape, _RAW, bytes(raw(tensor)))


def content(facts: Facts, *records: ArrayRecord) -> RecordDict:
    """The content of a message. A large record that several messages share is made once."""
    made = RecordDict({_FACTS: ConfigRecord({"isofed": PROTOCOL, **facts})})
    for number, one in enumerate(records):
        made[f"{_ARRAYS}.{number}"] = one
    return made


def facts(content: RecordDict) -> Facts:
    """The numbers and texts of a message."""
    found = content.get(_FACTS)
    if not isinstance(found, ConfigRecord) or found.get("isofed") != PROTOCOL:
        raise BadMessage("sent a message of another kind or version")
    return {k: v[:_LONGEST] if isinstance(v, str) else v for k, v in found.items()}


def tensors(content: RecordDict, expected: Forms, optional: Forms | None = None) -> Tensors:
    """The tensors of a message, if they are the expected ones."""
    arrays: dict[str, Array] = {}
    for key, one in content.items():
        if isinstance(one, ArrayRecord) and key.startswith(_ARRAYS):
            if twice := arrays.keys() & one.keys():
                raise BadMessage(f"sent '{min(twice)}' twice")
            arrays |= one
    known = {**(optional or {}), **expected}
    if missing := sorted(expected.keys() - arrays.keys()):
        raise BadMessage(f"sent no '{missing[0]}'")
    if more := sorted(arrays.keys() - known.keys()):
        raise BadMessage(f"sent '{more[0][:100]}', which nobody asked for")
    for name, array in arrays.items():
        _check(name, array, known[name])
    return {name: _tensor(array) for name, array in arrays.items()}


def _check(name: str, array: Array, wanted: Form) -> None:
    dtype, shape = wanted
    if array.dtype != dtype or tuple(array.shape) != shape:
        found = f"{array.dtype[:20]} {list(array.shape)[:8]}"
        raise BadMessage(f"sent '{name}' as {found}, where {dtype} {list(shape)} was expected")
    if array.stype != _RAW or len(array.data) != size(wanted):
        raise BadMessage(f"sent '{name}' as {len(array.data)} bytes, where {size(wanted)} were expected")


def _tensor(array: Array) -> Tensor:
    made = torch.empty(array.shape, dtype=_DTYPES[array.dtype])  # which is aligned, as the bytes of a message are not
    if made.numel():
        made.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(array.data, np.uint8)
    return made


def whole(facts: Facts, name: str, least: int = 0) -> int:
    """A whole number of a message."""
    value = facts.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**53:
        raise BadMessage(f"sent no proper '{name}'")
    return value


def number(facts: Facts, name: str) -> float:
    """A number of a message, which may be NaN."""
    value = facts.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise BadMessage(f"sent no proper '{name}'")
    return float(value)


def text(facts: Facts, name: str) -> str:
    """A text of a message, in signs that can be shown."""
    value = facts.get(name, "")
    if not isinstance(value, str):
        raise BadMessage(f"sent no proper '{name}'")
    return "".join(sign if sign.isprintable() else " " for sign in value)
