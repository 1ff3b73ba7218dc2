"""The work of a replica as CUDA graphs: captured where it recurs, and replayed with one launch.

Launching a kernel takes the host longer than a small kernel takes the GPU, and a training step is hundreds of them. A
graph records them once, with their addresses, and starts them all together. That is right only because nothing here
moves: a visit copies into the same tensors every time, and whatever a piece of work leaves for the next one lies in
the graphs' own memory. Where a tensor did move (a longer plan, a new message), its graphs are made again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isofed.engine.lane import Lane, OutOfMemory, generators, give_back_memory, starved, synchronize
from isofed.engine.step import LocalStep
from isofed.methods import Method

_ALONE = ("arrive", "prepare", "load", "update", "step", "leave", "score")  # work that reads no pass's results


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
        self._addresses: tuple[Any, ...] = ()
        self._values: tuple[Any, ...] = ()
        # What a method of one's own may have set in `begin`, such as a temperature; ours set nothing.
        own = not local.method.ours
        self._layers = [vars(module) for module in local.network.modules()] if own else []
        self._passed: Hashable = None  # the pass whose results the next piece reads
        self._capturing = False
        self._warm: set[Hashable] = set()
        self.cold = True  # the first work of each kind is done, not captured: libraries set themselves up by it

    def do(self, key: Hashable, work: Callable[[], None]) -> None:
        """Do the work, by replaying its graph where there is one or should be."""
        if self._capturing:
            work()
            return
        if not self._recurs(key):
            with nullcontext() if key in self._warm else self._no_draws():
                work()
            self._warm.add(key)
            return
        if _kind(key) == "passes":
            self._passed = key
        elif _kind(key) not in _ALONE:
            key = (key, self._passed)
        # Pictures are captured at once: what was captured before them would go on reading the old ones.
        if self._early(key) or (key not in self._warm and (self.cold or _kind(key) != "prepare")):
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

    def _early(self, key: Hashable) -> bool:
        """Whether what the work reads is not yet where replays leave it, so that a capture would read the old place.

        A name may come twice in a step, also in the first one, of which nothing is captured.
        """
        if _kind(key) == "passes":
            assert isinstance(key, tuple)
            return ("load", key[1]) not in self._made
        return _kind(key) not in _ALONE and self._passed not in self._made

    def arrived(self) -> None:
        """A visit's tensors are in their places: forget the graphs if one that they read is elsewhere now."""
        step = self._local.step
        addresses = tuple(
            (n, name, t.data_ptr(), t.dtype, t.shape, t.stride())
            for n, part in enumerate((step.state, step.sent, step.plan))
            for name, t in part.items()
        )
        if addresses != self._addresses:
            self._forget()
            self._addresses = addresses

    def begun(self) -> None:
        """Methods have begun a visit: forget the graphs if one has changed a number or a tensor of the network."""
        values = tuple(_seen(layer) for layer in self._layers)
        if values != self._values:
            self._forget()
            self._values = values

    def _forget(self) -> None:
        if self._made:
            self._made.clear()
            self._lane.forget()

    def has(self, size: int) -> bool:
        """Whether there are graphs for steps of this size."""
        return ("step", size) in self._made or ("load", size) in self._made

    def _capture(self, key: Hashable, work: Callable[[], None]) -> _Captured:
        # What one piece leaves in attributes (a batch, a gate, logits) the next one reads from there.
        holders = [vars(self._local.step), vars(self._local)]
        holders += [vars(module) for module in self._local.network.modules()]
        before = [dict(holder) for holder in holders]
        made = self._recorded(work, list(zip(holders, before, strict=True)))
        if _kind(key) in ("arrive", "step", "leave", "score") or not self._lane.records:
            return made  # nothing of a whole step is looked at afterwards
        for holder, old in zip(holders, before, strict=True):
            if new := {k: v for k, v in holder.items() if old.get(k) is not v and not callable(v)}:
                made.left.append((holder, new))
        if _kind(key) == "load":
            step = holders[0]
            made.left.append((step, {k: step[k] for k in ("inputs", "labels", "soft", "size") if k in step}))
        return made

    def _recorded(self, work: Callable[[], None], attributes: list[tuple[dict[str, Any], dict[str, Any]]]) -> _Captured:
        """Capture; a second time where memory was short, because nothing is given back while a capture goes on."""
        step, device = vars(self._local.step), self._local.run.device
        for last in (False, True):
            host = {name: step.pop(name) for name in ("position", "host")}  # a replay would not see them change
            self._capturing = True
            try:
                return _Captured(self._lane.record(work))
            except RuntimeError as error:
                if not starved(error):
                    raise Uncapturable(_why(error)) from error
                if last:
                    raise OutOfMemory(str(error)) from error
            finally:
                self._capturing = False
                step.update(host)
            for holder, old in attributes:
                holder.clear()
                holder.update(old)
            synchronize(device)
            give_back_memory(device)
        raise AssertionError("one of two attempts returns or raises")

    @contextmanager
    def _no_draws(self) -> Iterator[None]:
        """Refuse work that draws random numbers by itself: a replay would draw what was drawn at the capture."""
        here = generators(self._local.run.device)
        before, others = [g.get_state() for g in here], (random.getstate(), _numpy_state())
        yield
        same = all(torch.equal(g.get_state(), state) for g, state in zip(here, before, strict=True))
        if not same or others != (random.getstate(), _numpy_state()):
            raise Uncapturable("it draws random numbers by itself, such as nn.Dropout does, and not from the plan")


def _seen(layer: dict[str, Any]) -> tuple[Any, ...]:
    """The plain values and tensors among a layer's attributes, without those that steps set by themselves."""
    return tuple(
        (name, value.data_ptr() if isinstance(value, Tensor) else value)
        for name, value in layer.items()
        if isinstance(value, (int, float, str, Tensor)) and name not in ("key", "gate", "training")
    )


def _numpy_state() -> tuple[Any, ...]:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    return state["state"]["key"].tobytes(), state["state"]["pos"]


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
