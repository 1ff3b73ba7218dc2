"""Learning rates that change from round to round."""

from __future__ import annotations

import math
from typing import Any

from isofed import spec
from isofed.errors import UserError

FORMS = "constant, cosine, step:every=N,factor=F or step:at=A/B,factor=F"


def factor_at(text: str, round: int, rounds: int) -> float:
    """What the learning rate is multiplied with in a round, counted from 1."""
    choice = spec.parse_one(text, "lr_schedule")
    options = {k: v for k, v in choice.options}
    if len(options) < len(choice.options):
        raise UserError(f"lr_schedule '{text}' gives an option twice")
    if choice.name == "constant" and not options:
        return 1.0
    if choice.name == "cosine" and not options:
        return (1 + math.cos(math.pi * (round - 1) / rounds)) / 2
    if choice.name == "step" and options.keys() in ({"every", "factor"}, {"at", "factor"}):
        factor = spec.convert(options["factor"], float, "factor of lr_schedule")
        if factor > 0:
            return float(factor ** _steps(options, round - 1, rounds))
    raise UserError(f"lr_schedule must be {FORMS}, not '{text}'")


def _steps(options: dict[str, Any], done: int, rounds: int) -> int:
    """How often the factor counts after so many rounds."""
    if "every" in options:
        every = spec.convert(options["every"], int, "every of lr_schedule")
        if every < 1:
            raise UserError(f"every of lr_schedule must be at least 1, not {every}")
        return done // every
    # 0.55 of 100 rounds are 55.000000000000007 of them.
    return sum(done >= (place if place >= 1 else place * rounds - 1e-9) for place in _places(options["at"]))


def _places(text: Any) -> list[float]:
    places = [spec.convert(part, float, "at of lr_schedule") for part in str(text).split("/")]
    if any(not 0 < place < math.inf or (place > 1 and place % 1) for place in places):
        raise UserError(f"at of lr_schedule must be rounds, or shares of them like 0.5/0.75, not '{text}'")
    return places


def looks_ahead(text: str) -> bool:
    """Whether the learning rate of a round depends on how many there will be."""
    choice = spec.parse_one(text, "lr_schedule")
    at = dict(choice.options).get("at")
    return choice.name == "cosine" or (at is not None and min(_places(at)) < 1)
