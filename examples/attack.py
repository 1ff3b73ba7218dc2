"""Malicious clients, as a method: isofed run method=fedavg+examples/attack.py:Attack data=digits"""

from dataclasses import dataclass
from typing import Literal

from isofed import Method
from isofed.methods import Visit
from isofed.spec import number


@dataclass(frozen=True)
class Attack(Method):
    """The first clients train like the others and then send something else.

    ``kind=sign`` turns their updates round, ``kind=random`` sends normal noise as long as the update; either is made
    ``scale`` times longer. They agree on nothing, and do not know what the others send.
    """

    kind: Literal["sign", "random"] = "sign"
    clients: int = number(2, at_least=0)
    scale: float = number(5.0, above=0)

    def upload(self, visit: Visit) -> None:
        if visit.client >= self.clients:
            return
        length = visit.update.norm()
        if self.kind == "random":
            noise = visit.normal("attack", False).to(visit.update.dtype)
            visit.update = noise * (self.scale * length / noise.norm())
        else:
            visit.update = -self.scale * visit.update
