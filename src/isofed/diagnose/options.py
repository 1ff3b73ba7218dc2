"""What ``isofed diagnose`` can measure, and how closely."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from isofed import spec
from isofed.errors import UserError, unknown

SECTIONS = ("labels", "cost", "calibration", "spectra", "alignment", "curvature", "landscape", "tsne")
_LEAST = {"samples": 4, "points": 2}  # a t-SNE wants four


@dataclass(frozen=True)
class Options:
    """What to measure, and how closely."""

    only: tuple[str, ...] = ()
    samples: int = 512  # of the data, at most
    probes: int = 64  # of the Hessian, at most, for its trace and its diagonal
    points: int = 21  # of the landscape, in each direction
    clients: int = 5  # whose curvature and features are looked at, where their models were kept
    device: str | None = None
    root: str | None = None  # where the data lie, if not where they did

    @classmethod
    def of(cls, values: Mapping[str, str]) -> Options:
        """From ``key=value`` words."""
        made = cls()
        names = [f.name for f in fields(cls)]
        for key, text in values.items():
            if key not in names:
                raise unknown("option of diagnose", key, names)
            if key == "device":
                made = replace(made, device=text)
            elif key == "root":
                made = replace(made, root=text)
            elif key == "only":
                chosen = tuple(word.strip() for word in text.split(",") if word.strip())
                for word in chosen:
                    if word not in SECTIONS:
                        raise unknown("diagnostic", word, SECTIONS)
                made = replace(made, only=chosen)
            else:
                number = spec.convert(text, int, key)
                if number < (least := _LEAST.get(key, 1)):
                    raise UserError(f"{key}={text} is too few: at least {least}")
                made = replace(made, **{key: number})
        return made

    @property
    def sections(self) -> list[str]:
        return [name for name in SECTIONS if not self.only or name in self.only]
