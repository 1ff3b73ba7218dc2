"""What methods that measure local progress need to know about the local optimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from isofed.errors import UserError

if TYPE_CHECKING:
    from isofed.config import Settings


def refuse_persistent(name: str) -> Callable[[Any, Settings], None]:
    """A ``check`` for methods whose formula assumes that local momentum starts at zero in every visit."""

    def check(self: Any, settings: Settings) -> None:
        if settings.persistent_momentum and settings.momentum:
            raise UserError(f"'{name}' measures progress from a momentum of zero; set persistent_momentum=false with it")

    return check
