"""All weights of a network in one vector, ordered so that what belongs together lies together.

Each tensor of a network has a policy: it is *shared* (sent and averaged), stays at *home* with its client, is
*fixed* (sent once, never trained) or is *reset* (trained, but starts afresh every round). The layout puts them
into one float32 vector in the order ::

    | home trained | reset trained | shared trained | shared statistics | home statistics | fixed |
    |<----------------- trained ------------------->|
                                   |<------------- shared ------------->|

so that "what the optimiser moves" and "what travels" are both single slices, and a step over the whole network
is one operation. Every tensor starts on a 64-byte boundary (an unaligned view can change the last bit of a
result), and convolution weights lie in channels-last order, which is what the fast kernels want. The gaps are
zeros and stay zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from isofed.errors import BadMethod, UserError, unknown
from isofed.traces import place_here
from isofed.words import kind_of

Tensors = dict[str, Tensor]
ALIGN = 16  # float32 values in 64 bytes


def copy_into(place: Tensor, value: object, what: str) -> None:
    """Give a tensor the values of another one, or say that ``what`` it is cannot become that."""
    if not isinstance(value, Tensor) or value.shape != place.shape:
        given = list(value.shape) if isinstance(value, Tensor) else kind_of(value)
        raise BadMethod(f"{what} is a tensor of shape {list(place.shape)}; it cannot become {given}{place_here()}")
    if value is not place:
        place.copy_(value.detach())


class Places(dict[str, Tensor]):
    """Named tensors that stay where they are, because others rely on it: assigning to a name copies into its tensor.

    >>> weight = torch.zeros(2)
    >>> places = Places({"weight": weight}, "tensor")
    >>> places["weight"] = torch.ones(2)
    >>> weight.tolist()
    [1.0, 1.0]
    """

    def __init__(self, tensors: Mapping[str, Tensor], what: str) -> None:
        super().__init__(tensors)
        self._what = what  # each of them is called in a message

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self:
            raise BadMethod(f"{self._strange(name)}{place_here()}")
        copy_into(self[name], value, f"the {self._what} '{name}'")

    def _strange(self, name: str) -> str:
        """What is said of a name that is not there."""
        return str(unknown(self._what, name, self))

    def update(self, *given: Any, **more: Tensor) -> None:
        for name, value in dict(*given, **more).items():
            self[name] = value

    def setdefault(self, name: str, value: Any = None) -> Tensor:
        if name not in self:
            self[name] = value
        return self[name]

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # copies are elsewhere, and nobody relies on them

    def __ior__(self, other: Any) -> Self:  # type: ignore[override, misc]
        self.update(other)
        return self


class Policy(StrEnum):
    """Where a tensor lives."""

    SHARED = "shared"
    HOME = "home"
    FIXED = "fixed"
    RESET = "reset"


def _policy(name: str, text: str) -> Policy:
    try:
        return Policy(text)
    except ValueError:
        raise UserError(f"the policy of '{name}' must be one of {', '.join(Policy)}, not '{text}'") from None


@dataclass(frozen=True)
class Entry:
    """One tensor's place in the vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    policy: Policy
    trained: bool

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    def view(self, flat: Tensor, base: int = 0) -> Tensor:
        """This tensor inside ``flat``, whose first element is element ``base`` of the layout."""
        piece = flat.narrow(0, self.offset - base, self.size)
        if len(self.shape) == 4:
            out, channels, height, width = self.shape
            return piece.view(out, height, width, channels).permute(0, 3, 1, 2)
        return piece.view(self.shape)


def constants(network: nn.Module) -> Tensors:
    """Buffers that are no floating-point numbers, such as indices: nobody trains or averages them."""
    return {name: buffer.clone() for name, buffer in network.named_buffers() if not buffer.is_floating_point()}


@dataclass(frozen=True)
class Layout:
    """The order of a network's tensors and the slices that matter."""

    entries: tuple[Entry, ...]
    total: int
    trained: slice
    shared: slice  # shared trained, then shared statistics
    shared_trained: slice
    reset: slice
    home_trained: slice
    home_statistics: slice

    @classmethod
    def of(cls, network: nn.Module, policies: Mapping[str, Policy] | None = None) -> Layout:
        """Lay out a network's floating-point tensors. Its constants are left where they are."""
        policies = {name: _policy(name, policy) for name, policy in (policies or {}).items()}
        parameters = dict(network.named_parameters())
        tensors = parameters | {n: b for n, b in network.named_buffers() if b.is_floating_point()}
        unknown = sorted(set(policies) - set(tensors))
        if unknown:
            raise UserError(f"a method gives a policy to '{unknown[0]}', which this network does not have")

        def group(name: str) -> int:
            policy = policies.get(name, Policy.SHARED)
            if policy is Policy.FIXED or (name in parameters and not parameters[name].requires_grad):
                return 5
            if name in parameters:
                return {Policy.HOME: 0, Policy.RESET: 1, Policy.SHARED: 2}[policy]
            return {Policy.SHARED: 3, Policy.HOME: 4, Policy.RESET: 5}[policy]

        entries, starts, offset = [], [], 0
        for wanted in range(6):
            starts.append(offset)
            for name, tensor in tensors.items():
                if group(name) == wanted:
                    policy = Policy.FIXED if wanted == 5 else policies.get(name, Policy.SHARED)
                    entries.append(Entry(name, tuple(tensor.shape), offset, policy, wanted < 3))
                    offset += -(-tensor.numel() // ALIGN) * ALIGN
        home, reset, shared, statistics, home_statistics, fixed = starts
        if statistics == 0:
            raise UserError("nothing is left to train: every tensor of the network is fixed")
        return cls(
            entries=tuple(entries),
            total=offset,
            trained=slice(0, statistics),
            shared=slice(shared, home_statistics),
            shared_trained=slice(shared, statistics),
            reset=slice(reset, shared),
            home_trained=slice(home, reset),
            home_statistics=slice(home_statistics, fixed),
        )

    def count(self, policy: Policy) -> int:
        """How many numbers (gaps not counted) are under a policy."""
        return self._counts[policy]

    @cached_property
    def _counts(self) -> dict[Policy, int]:
        return {policy: sum(e.size for e in self.entries if e.policy is policy) for policy in Policy}

    def numbers(self, vector: Tensor) -> int:
        """How many numbers a tensor holds; of a vector with the form of this layout the gaps are not counted."""
        for part in (self.shared_trained, self.trained, slice(0, self.total)):
            if vector.dim() == 1 and len(vector) == part.stop - part.start:
                return sum(e.size for e in self.entries if part.start <= e.offset < part.stop)
        return vector.numel()

    def views(self, flat: Tensor, part: slice | None = None) -> Tensors:
        """The named tensors inside ``flat``, which holds the whole layout or the given part of it."""
        part = part or slice(0, self.total)
        return {e.name: e.view(flat, part.start) for e in self.entries if part.start <= e.offset < part.stop}

    def named(self, vector: Tensor) -> Places:
        """The tensors inside a vector over the trained weights, over those of them that travel, or over everything.

        Which of the three it is, its length tells.
        """
        for part in (self.trained, self.shared_trained, slice(0, self.total)):
            if vector.dim() == 1 and len(vector) == part.stop - part.start:
                return Places(self.views(vector, part), "tensor")
        raise UserError(
            f"a tensor of the shape {list(vector.shape)} is no vector of this network: one of its trained weights has "
            f"{self.trained.stop} numbers, gaps between the tensors included; take run.zeros() and fill it by name"
        )

    def pack(self, network: nn.Module, device: torch.device | str = "cpu") -> Tensor:
        """A new vector with the network's present values."""
        flat = torch.zeros(self.total, device=device)
        values = dict(network.named_parameters()) | dict(network.named_buffers())
        with torch.no_grad():
            for name, view in self.views(flat).items():
                view.copy_(values[name])
        return flat

    def bind(self, network: nn.Module, flat: Tensor) -> None:
        """Make the network's tensors views of ``flat``: writing one writes the other."""
        values = dict(network.named_parameters()) | dict(network.named_buffers())
        for entry in self.entries:
            values[entry.name].data = entry.view(flat)
            if isinstance(values[entry.name], nn.Parameter):
                values[entry.name].requires_grad_(entry.trained)
