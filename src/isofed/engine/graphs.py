"""The work of a replica as CUDA graphs: captured where it recurs, and replayed with one launch.

Launching a kernel takes the host longer than a small kernel takes the GPU, and a training step is hundreds of them. A
graph records them once, with their addresses, and starts them all together. That is right only because nothing here
moves: a visit copies into the same tensors every time, and whatever a piece of work leaves for the next one lies in
the graphs' own memory. Where a tensor did move (a longer plan, a new message), its graphs are made again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from isofed.engine.lane import Lane, OutOfMemory, generators
from isofed.engine.step import LocalStep
from isofed.methods import Method


class Uncapturable(Exception):
    """The work cannot be replayed; the message says what does not let it."""


@dataclass
class _Captured:
    replay: Callable[[], None]
    left: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)  # attributes that the work set


class Graphs:
    """Does work for a :class:`LocalStep` on one lane: ``local.do = graphs.do``.

    Args:
        local: whose work it is.
        lane: on which it is done, and nothing else at the same time.
        recurs: whether the work that a key stands for comes often enough to be worth a capture.
    """

    def __init__(self, local: LocalStep, lane: Lane, recurs: Callable[[Hashable], bool]) -> None:
        self._local, self._lane, self._recurs = local, lane, recurs
        self._made: dict[Hashable, _Captured] = {}
        self._addresses: tuple[int, ...] = ()
        self._passed: Hashable = None  # the pass whose results the next piece reads
        self._capturing = False
        self._warm: set[Hashable] = set()
        self.cold = True  # the first work of each kind is done, not captured: libraries set themselves up by it

    def do(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do the work, by replaying its graph where there is one or should be."""
        if self._capturing or not self._recurs(key):
            work()
            return
        if _kind(key) == "passes":
            self._passed = key
        elif _kind(key) not in ("prepare", "load", "update", "step", "score"):
            key = (key, self._passed)
        if self.cold and key not in self._warm:
            self._warm.add(key)
            with self._no_draws():
                work()
            return
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._capture(key, work)
        made.replay()
        for holder, values in made.left:
            holder.update(values)

    def arrived(self) -> None:
        """A visit has begun: forget the graphs if a tensor that they read is elsewhere now."""
        step = self._local.step
        addresses = tuple(t.data_ptr() for part in (step.state, step.sent, step.plan) for t in part.values())
        if addresses != self._addresses:
            if self._made:
                self._made.clear()
                self._lane.forget()
            self._addresses = addresses

    def has(self, size: int) -> bool:
        """Whether there are graphs for steps of this size."""
        return ("step", size) in self._made or ("load", size) in self._made

    def _capture(self, key: Hashable, work: Callable[[], None]) -> _Captured:
        # What one piece leaves in attributes (a batch, a gate, logits) the next one reads from there.
        holders = [vars(self._local.step), vars(self._local)]
        holders += [vars(module) for module in self._local.network.modules()]
        before = [dict(holder) for holder in holders]
        self._capturing = True
        try:
            made = _Captured(self._lane.record(work))
        except OutOfMemory:
            raise
        except RuntimeError as error:
            raise Uncapturable(_why(error)) from error
        finally:
            self._capturing = False
        if _kind(key) in ("step", "score") or not self._lane.records:
            return made  # nothing of a whole step is looked at afterwards
        for holder, old in zip(holders, before, strict=True):
            if new := {k: v for k, v in holder.items() if old.get(k) is not v and not callable(v)}:
                made.left.append((holder, new))
        if _kind(key) == "load":
            step = holders[0]
            made.left.append((step, {k: step[k] for k in ("inputs", "labels", "soft", "size") if k in step}))
        return made

    @contextmanager
    def _no_draws(self) -> Iterator[None]:
        """Refuse work that draws random numbers by itself: a replay would draw what was drawn at the capture."""
        here = generators(self._local.run.device)
        before = [g.get_state() for g in here]
        yield
        if not all(torch.equal(g.get_state(), state) for g, state in zip(here, before, strict=True)):
            raise Uncapturable("it draws random numbers by itself, such as nn.Dropout does, and not from the plan")


def _kind(key: Hashable) -> Hashable:
    return key[0] if isinstance(key, tuple) else key


def _why(error: BaseException) -> str:
    """Which method broke the rules, if one did, and what PyTorch says about it."""
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    place, at = "", error.__traceback__
    while at is not None:
        owner = at.tb_frame.f_locals.get("self")
        if isinstance(owner, Method):
            place = f"{type(owner).__name__}.{at.tb_frame.f_code.co_name}: "
        at = at.tb_next
    return f"{place}{said}"
