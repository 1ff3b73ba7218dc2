"""FFC: the head refitted in closed form on all clients' features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from isofed.functional import calibration_sums, solve_calibration, unit
from isofed.layout import Tensors
from isofed.methods.base import Final, Method, Visit
from isofed.methods.refit import head_of, seen_by_head
from isofed.spec import described, number


def ffc_sums(visit: Visit, normalise: bool) -> Tensors:
    """A client's V and U."""
    z, labels = seen_by_head(visit)
    V, U = calibration_sums(unit(z.double()) if normalise else z, labels, visit.run.classes)
    return {"ffc.V": V, "ffc.U": U}


def ffc_solve(total: Tensors, final: Final, ridge: float) -> None:
    """Put the solution into the head, and report how well determined it is."""
    solved = solve_calibration(total["ffc.V"], total["ffc.U"], ridge)
    weight, bias = head_of(final.weights)
    weight.copy_(solved.weight)
    if bias is not None:
        bias.zero_()
    final.report["condition"] = solved.condition


@dataclass(frozen=True)
class FFC(Method):
    """The head refitted in closed form on all clients' features.

    After the last round every client sends V = sum of z z' and U = sum of z onehot' over its samples, with z the global
    model's features; the head becomes (V + r I)^-1 U, the least-squares classifier of the pooled samples, whoever
    holds them. ``ridge`` is r relative to the mean eigenvalue of V; 0 takes the pseudo-inverse. ``normalise`` scales
    z to length 1 first, as SphereFed does; the head has no bias, so predictions do not depend on the length of z.
    """

    normalise: bool = described(True, "scale features to length 1 before they are summed")
    ridge: float = number(1e-6, "r, relative to the mean eigenvalue of V; 0 takes the pseudo-inverse", at_least=0)

    owns: ClassVar[frozenset[str]] = frozenset({"final"})
    exchanges: ClassVar[tuple[str, ...]] = ("ffc",)
    needs: ClassVar[tuple[str, ...]] = ("features", "linear head")
    paper: ClassVar[str] = "Dong et al. 2022, SphereFed: hyperspherical federated learning"

    def answer(self, exchange: str, visit: Visit) -> Tensors:
        return ffc_sums(visit, self.normalise)

    def finish(self, exchange: str, total: Tensors, final: Final) -> None:
        ffc_solve(total, final, self.ridge)
