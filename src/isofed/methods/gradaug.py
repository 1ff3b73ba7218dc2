"""GradAug: sub-networks on resized pictures learn from the whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from isofed.errors import UserError
from isofed.functional.teaching import distance_from_teacher
from isofed.methods.base import Draws, Method, Run, Step, Visit
from isofed.models.base import Network, Output, statistics_kept
from isofed.models.beside import beside_forward, extents, first_rows, lies_beside
from isofed.models.fused import available
from isofed.models.narrow import narrow_forward, narrows
from isofed.models.resize import resized
from isofed.models.slim import Cut, channels, check_slimmable, full_channels, runs_at, slim_channels, slim_forward
from isofed.models.tiles import GROUPS
from isofed.spec import described, number

_ROOM = 2**16  # pixels of a batch, above which a GPU has enough to do with one network after the other


@dataclass(frozen=True)
class GradAug(Method):
    """Slimmed sub-networks on resized pictures learn from the whole.

    Adds mu times the sum over n sub-networks of KL(softmax F(x) || softmax F_w(resized x)). One sub-network has the
    width ``lower``, the others are drawn between it and 1; with ``widths=drawn`` all are, as in the paper. Each sees
    the batch at a size drawn from ``sizes`` (``auto``: the full side, 7/8, 6/8 and 5/8 of it; ``none``: no resizing; or
    such as 32/28/24/20). Channels are rounded to a multiple of ``multiple``: 8 in FedAlign's code, 1 in the original.
    """

    n: int = number(2, "sub-networks in a step", at_least=1)
    lower: float = number(0.8, "the smallest width", above=0, at_most=1)
    mu: float = number(1.75, "weight of their losses; 0 is FedAvg", at_least=0)
    sizes: str = described(
        "auto",
        "sides of the pictures: auto is the full side, 7/8, 6/8 and 5/8 of it (of 224: 224, 192, 160, 128); "
        "none does not resize; or such as 32/28/24/20",
    )
    multiple: int = number(8, "channels are rounded to a multiple of this", at_least=1)
    widths: Literal["lowest", "drawn"] = described(
        "lowest", "lowest: one sub-network has the smallest width, the others are drawn; drawn: all are"
    )

    needs: ClassVar[tuple[str, ...]] = ("linear head",)
    host: ClassVar[tuple[str, ...]] = ("gradaug.width", "gradaug.size")
    _passes_first: ClassVar[bool] = True
    paper: ClassVar[str] = "Yang et al. 2020, GradAug: a new regularization method for deep neural networks"

    def sides(self, shape: tuple[int, int, int]) -> tuple[tuple[int, int], ...]:
        """The picture sizes to choose from."""
        _, height, width = shape
        if self.sizes == "none":
            return ((height, width),)
        if self.sizes == "auto":
            # Of 224 these would be odd sizes for a network that halves five times; the papers take multiples of 32.
            shares = [1, 6 / 7, 5 / 7, 4 / 7] if height == width == 224 else [1, 7 / 8, 6 / 8, 5 / 8]
            return tuple((max(1, round(height * s)), max(1, round(width * s))) for s in shares)
        try:
            sides = [int(side) for side in self.sizes.split("/")]
        except ValueError:
            sides = []
        if not sides or min(sides) < 1:
            raise UserError(f"sizes of method 'gradaug' must be auto, none or like 32/28/24/20, not '{self.sizes}'")
        return tuple((side, side) for side in sides)

    def build(self, network: Network, classes: int, rng: np.random.Generator) -> None:
        check_slimmable(network, "gradaug")
        for height, width in self.sides(network.shape or (1, 1, 1)):
            if not runs_at(network, self.lower, (height, width), self.multiple):
                raise UserError(
                    f"this network does not run on pictures of {height}x{width}, to which gradaug would resize them; "
                    "use gradaug:sizes=none, or other sizes"
                )

    def plan(self, visit: Visit, rng: np.random.Generator) -> Draws:
        widths = rng.uniform(self.lower, 1.0, (visit.steps, self.n))
        if self.widths == "lowest":
            widths[:, 0] = self.lower
        sides = np.array(self.sides(visit.run.shape))
        chosen = rng.integers(len(sides), size=(visit.steps, self.n))
        widths = -np.sort(-widths)
        run, network = visit.run, visit.network
        if self._joins(run, network):  # the whole network comes first
            where = np.array([extents(network, side) for side in (run.shape[1:], *sides.tolist())])
            counts = self._counts(network, np.insert(widths, 0, 1.0, axis=1))
            return {"gradaug.channels": counts, "gradaug.places": where[np.insert(chosen + 1, 0, 0, axis=1)]}
        draws = {"gradaug.width": widths, "gradaug.size": sides[chosen]}
        return draws | ({"gradaug.channels": self._counts(network, widths)} if self._narrows(run, network) else {})

    def _counts(self, network: Network, widths: np.ndarray) -> np.ndarray:
        """How many channels are left at some widths, of each number that there is at the full one."""
        full = full_channels(network)
        counts = [channels(count, width, self.multiple) for width in widths.flat for count in full]
        return np.array(counts).reshape(*widths.shape, len(full))

    def around(self, step: Step, inner: Callable[[], None]) -> None:
        joins = self.mu > 0 and self._joins(step.run, step.network)
        if joins and inner == step.passes:
            with self._together(step):
                inner()
            return
        inner()
        if joins:
            step.piece("gradaug", partial(self._beside, step))
        elif self.mu:
            self._one_by_one(step)

    @contextmanager
    def _together(self, step: Step) -> Iterator[None]:
        """Passes in this block are those of the sub-networks as well."""
        step.wider = _Together(self, step)
        try:
            yield
        finally:
            step.wider = None

    def _one_by_one(self, step: Step) -> None:
        widths, sizes = step.known("gradaug.width"), step.known("gradaug.size")
        by_zeros = self._narrows(step.run, step.network)
        for n, (width, (high, wide)) in enumerate(zip(widths.tolist(), sizes.tolist(), strict=True)):
            if by_zeros:
                step.piece(f"gradaug/{n}/{high}x{wide}", partial(self._narrow, step, n, (high, wide)))
            else:
                # Widths are drawn from a continuum, but few differ once channels are counted.
                counts = "-".join(map(str, slim_channels(step.network, width, self.multiple)))
                step.piece(f"gradaug/{counts}/{high}x{wide}", partial(self._slim, step, width, (high, wide)))

    def _narrows(self, run: Run, network: Network) -> bool:
        """Whether sub-networks are the whole one with zeros; otherwise, and always on a processor, they are smaller."""
        return run.device.type == "cuda" and narrows(network)

    def _joins(self, run: Run, network: Network) -> bool:
        """Whether the whole network and all of these are one pass.

        A method of somebody's own may let layers do something else in the whole network's pass, or change in place what
        that has given: then they are not.
        """
        return self._has_kernels(run) and run.ours and self._fit(run) and lies_beside(network)

    def _has_kernels(self, run: Run) -> bool:
        return run.device.type == "cuda" and available()

    def _fit(self, run: Run) -> bool:
        """Whether pictures of all sizes find room on sheets as large as the whole ones, and these on a GPU."""
        _, height, width = run.shape
        room = run.batch_size * height * width <= _ROOM and 1 + self.n <= GROUPS
        return room and all(h <= height and w <= width for h, w in self.sides(run.shape))

    def _beside(self, step: Step) -> None:
        """The sub-networks in a pass of their own, where others are around that of the whole network."""
        counts, places = step.draw("gradaug.channels")[1:], step.draw("gradaug.places")[1:]
        with step.autocast():
            logits = beside_forward(step.network, step.inputs, counts, places, whole=False).logits
        step.add_gradient(self.distance(step, logits))

    def _narrow(self, step: Step, n: int, size: tuple[int, int]) -> None:
        counts = step.draw("gradaug.channels")[n]
        with step.autocast():
            logits = narrow_forward(step.network, resized(step.inputs, size), counts).logits
        step.add_gradient(self.distance(step, logits))

    def _slim(self, step: Step, width: float, size: tuple[int, int]) -> None:
        inputs = resized(step.inputs, size)
        # Running statistics belong to the whole network on whole pictures, also where a draw comes to its full width.
        kept = statistics_kept(step.network) if width >= 1 else nullcontext()
        cuts: list[Cut] = []
        with step.autocast(), kept:
            logits = slim_forward(step.network, inputs, width, self.multiple, cuts).logits
        step.add_gradient(self.distance(step, logits), cuts)

    def distance(self, step: Step, logits: Tensor) -> Tensor:
        """From the whole network's answer to this batch."""
        return distance_from_teacher(logits, step.logits, self.mu)


class _Together:
    """The whole network and its sub-networks in one pass."""

    def __init__(self, method: GradAug, step: Step) -> None:
        self._method, self._step = method, step
        self._logits: Tensor | None = None  # of the sub-networks

    def forward(self, inputs: Tensor) -> Output:
        step = self._step
        counts, places = step.draw("gradaug.channels"), step.draw("gradaug.places")
        output = beside_forward(step.network, inputs, counts, places, whole=True)
        own, self._logits = first_rows(output, len(inputs))
        return own

    def loss(self, step: Step) -> Tensor:
        assert self._logits is not None
        logits, self._logits = self._logits, None  # which would keep the pass's graph alive
        return self._method.distance(step, logits)
