"""What a client remembers, while it is here: named tensors at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from isofed.errors import BadMethod
from isofed.layout import Places
from isofed.traces import place_here


class ClientState(Places):
    """The tensors that methods declare in ``client_state``. Assigning to a name copies into its tensor.

    A captured step knows addresses only, so a tensor that took another's place would not be seen by it.

    >>> state = ClientState({"mine.x": torch.zeros(2)}, torch.device("cpu"))
    >>> x = state["mine.x"]
    >>> state["mine.x"] = torch.ones(2)
    >>> x.tolist()
    [1.0, 1.0]
    """

    def __init__(self, declared: Mapping[str, Tensor], device: torch.device) -> None:
        # A copy: what a method gives may be a tensor that it uses elsewhere.
        copies = {name: value.detach().to(device, copy=True) for name, value in declared.items()}
        super().__init__(copies, "client state")

    def _strange(self, name: str) -> str:
        known = f"; it declares {', '.join(self)}" if self else ""
        return (
            f"a method puts '{name}' into a client's state, which client_state does not declare{known}: "
            "what is remembered must be there from the start"
        )

    def _stays(self, *_: Any) -> NoReturn:
        said = "a method takes a name out of a client's state; fill its tensor with zeros instead"
        raise BadMethod(f"{said}{place_here()}")

    __delitem__ = pop = popitem = clear = _stays
