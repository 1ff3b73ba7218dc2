"""Gaussian noise on clipped updates: differential privacy for whole clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from isofed.errors import UserError
from isofed.methods.base import Method, Round, Visit
from isofed.methods.clip_update import ClipUpdate, clipped
from isofed.spec import described, number

if TYPE_CHECKING:
    from isofed.config import Settings


@dataclass(frozen=True)
class Gaussian(Method):
    """Noise on clipped updates, so that no single client can be made out.

    Each update is shortened to ``norm`` (``none``: that of ``clip_update`` in the composition, or 1 without it).
    ``at=server`` adds normal noise of standard deviation ``noise`` times that norm to the sum of a round's updates and
    divides by the number of clients that were drawn, whether or not they answered. ``at=client`` adds it to each
    update before that leaves its client. Every client counts the same. The record says which (epsilon, ``delta``) the
    rounds so far amount to. ``draws=seed`` makes a simulation repeatable; against whoever knows the seed only
    ``draws=system`` protects.
    """

    noise: float = number(1.0, "standard deviation of the noise, in clipping norms", above=0)
    norm: float | None = number(None, "the clipping norm C; none takes that of clip_update, or 1 without it", above=0)
    at: Literal["server", "client"] = described(
        "server", "who adds the noise: the server to the sum, or each client to its own update"
    )
    delta: float = number(
        1e-5,
        "the delta for which epsilon is recorded; must be well below one over the number of clients",
        above=0,
        below=1,
    )
    draws: Literal["seed", "system"] = described(
        "seed", "where the noise comes from: the run's seed, or the operating system"
    )

    leaves: ClassVar[dict[str, str]] = {"combine": "at=client"}
    uniform: ClassVar[bool] = True
    guards: ClassVar[frozenset[str]] = frozenset({"extras", "answers", "statistics", "losses"})
    paper: ClassVar[str] = "McMahan et al. 2018, Learning differentially private recurrent language models"

    @property
    def owns(self) -> frozenset[str]:
        # A combination other than the mean has no bound on what one client changes, so at the server noise needs it.
        return frozenset({"noise", "combine"} if self.at == "server" else {"noise"})

    @property
    def bound(self) -> float | None:
        return self.norm

    def check(self, settings: Settings) -> None:
        clips = [m for _, m in settings.method.parts if isinstance(m, ClipUpdate)]
        if self.at == "client" and any(m.at == "server" for m in clips):
            raise UserError(
                "gaussian:at=client adds its noise at the client, so updates must be clipped there before it; "
                f"write clip_update:norm={clips[0].norm:g},at=client"
            )
        for key, value in (("keep_clients", settings.keep_clients), ("diagnose", settings.diagnose)):
            if value != "none":
                raise UserError(f"{key}={value} asks clients for their models, which gaussian is there to hide")

    def upload(self, visit: Visit) -> None:
        if self.at == "client":
            bound = _known(visit.bound)
            noise = visit.normal("gaussian", self.draws == "system")
            visit.update = (clipped(visit.update, bound).double() + self.noise * bound * noise).to(visit.update.dtype)

    def receive(self, update: Tensor, bound: float | None) -> Tensor:
        return clipped(update, _known(bound)) if self.at == "server" else update

    def aggregate(self, round: Round) -> None:
        if self.at == "server":
            noise = round.normal("gaussian", self.draws == "system")
            total = round.update * round.clients + self.noise * _known(round.bound) * noise
            round.update = total / round.asked


def _known(bound: float | None) -> float:
    assert bound is not None  # a composition with noise always has one
    return bound
