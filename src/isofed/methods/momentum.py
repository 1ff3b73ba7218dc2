"""What methods that measure local progress need to know about the local optimiser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isofed.errors import UserError
from isofed.functional import normalising_steps
from isofed.methods.base import Visit

if TYPE_CHECKING:
    from isofed.config import Settings


def refuse_persistent(name: str, settings: Settings) -> None:
    """For methods whose formula assumes that local momentum starts at zero in every visit."""
    if settings.persistent_momentum and settings.momentum:
        raise UserError(f"'{name}' measures progress from a momentum of zero; set persistent_momentum=false with it")


def progress(visit: Visit) -> float:
    """How many plain SGD steps the client's optimiser was worth: its answer to a constant unit gradient."""
    run = visit.run
    return normalising_steps(visit.steps, run.momentum, nesterov=run.nesterov, proximal=visit.lr * visit.pull)
