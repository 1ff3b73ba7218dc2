"""What crosses the border of a process: a world, and tensors, as plain values and arrays of bytes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isofed.config import settings
from isofed.data.base import Dataset, Part
from isofed.engine.world import World
from isofed.layout import Tensors


def pack(world: World) -> tuple[Tensors, dict[str, Any]]:
    """The data of a world, and in plain values the rest of what another process needs to build it again."""
    tensors: Tensors = {}
    for name, part in world.parts.items():
        tensors |= {f"{name}.images": part.images, f"{name}.labels": part.labels}
        if part.domains is not None:
            tensors[f"{name}.domains"] = part.domains
    tensors["clients"] = torch.from_numpy(np.concatenate(world.clients))
    dataset = world.dataset
    return tensors, {
        "settings": world.settings.to_dict(),
        "parts": list(world.parts),
        "name": dataset.name,
        "classes": dataset.classes,
        "domains": dataset.domains,
        "mean": dataset.mean,
        "std": dataset.std,
        "cuts": np.cumsum([len(c) for c in world.clients])[:-1].tolist(),
    }


def unpack(tensors: Tensors, plain: Mapping[str, Any]) -> World:
    """The same world, on the tensors as they are."""
    parts = {
        name: Part(tensors[f"{name}.images"], tensors[f"{name}.labels"], tensors.get(f"{name}.domains"))
        for name in plain["parts"]
    }
    names = {"classes": tuple(plain["classes"]), "domains": tuple(plain["domains"])}
    mean, std = tuple(plain["mean"]), tuple(plain["std"])
    dataset = Dataset(plain["name"], train=parts["train"], test=parts["test"], mean=mean, std=std, **names)
    clients = np.split(tensors["clients"].numpy(), plain["cuts"])
    return World(settings(plain["settings"]), dataset, parts, clients)


class Bytes(NamedTuple):
    """A tensor of any type as bytes; NumPy does not have all of PyTorch's types."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def arrays(value: Any) -> Any:
    """The same structure of dicts, lists and tuples, with each tensor as :class:`Bytes`."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().view(-1)
        return Bytes(str(value.dtype).removeprefix("torch."), tuple(value.shape), flat.view(torch.uint8).numpy())
    return _each(value, arrays)


def tensors(value: Any, device: torch.device | None = None) -> Any:
    """The opposite of :func:`arrays`: views of memory that may be read-only, or copies on a device."""
    if isinstance(value, Bytes):
        dtype = getattr(torch, value.dtype)
        if not value.data.size:
            return torch.empty(value.shape, dtype=dtype, device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about memory that cannot be written: nobody writes there
            raw = torch.from_numpy(value.data)
        tensor = raw.view(dtype).view(value.shape)
        return tensor if device is None else torch.empty_like(tensor, device=device).copy_(tensor)
    return _each(value, lambda inner: tensors(inner, device))


def _each(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {k: change(v) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(change, value))
    return value
