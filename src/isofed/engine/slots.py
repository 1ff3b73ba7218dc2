"""Many clients side by side on a GPU: several replicas, each with a stream and graphs of its own.

One training step of a small network leaves most of a GPU idle. Here S replicas work through a round's clients, the
longest first. A step is one launch of a captured graph (:mod:`isofed.engine.graphs`), so a single host thread keeps
all streams fed; nothing is copied through the host between clients, and nobody waits: an outcome is handed on when
the GPU has made it, on which the federation adds it to its exact sums on the device.

What a client's visit computes does not depend on S, on who else trains at the same time, or on the order of arrival.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from heapq import nsmallest

import numpy as np
import torch
from torch import Tensor

from isofed.engine.graphs import Uncapturable
from isofed.engine.lane import free_memory, give_back_memory, numbered, starved, synchronize
from isofed.engine.plan import batch_sizes, steps_of
from isofed.engine.replica import Job, Outcome, Replica, Score, all_pictures
from isofed.engine.serial import States, failure
from isofed.engine.slot import Arriving, Slot
from isofed.engine.world import World
from isofed.errors import BadMethod, RunError
from isofed.layout import Tensors
from isofed.traces import Elsewhere

MOST = 32  # slots
GAIN = 1.05  # how much faster twice the slots must be to try even more,
CLEAR = 1.02  # and to be kept where they are there: a short measurement is that uncertain
SHARE = 0.1  # of the run's expected time may be spent on making slots
RECURS = 40  # steps of a size that a slot makes in a run from which on a graph of that size pays
ROOM = 0.9  # of the free memory that slots may fill
PAUSE = 2e-5  # seconds, when all streams are full
PROBES = 16  # clients that are tried until one has a step to measure
SHORT = 32  # steps of the longest visit up to which whole visits are measured: the host's work for one counts then

_NO_MEMORY = (
    "the GPU has not enough free memory to train a single client; "
    "use a smaller batch_size or network, or precision=bf16"
)
_NO_MEMORY_TO_JUDGE = "the GPU has not enough free memory to evaluate the network; use a smaller network"


class Slots:
    """The executor for a GPU."""

    def __init__(self, world: World, device: torch.device, note: Callable[[str], None] = lambda text: None) -> None:
        self.world, self.device, self._note = world, numbered(device), note
        self._pictures = all_pictures(world, self.device)
        samples = [len(c) for c in world.clients]
        self._clients = Counter(samples)  # how many there are of each size: far fewer than clients
        self._steps = {n: steps_of(n, world.settings) for n in self._clients}
        self._sizes = {n: batch_sizes(n, world.settings) for n in self._clients}
        # Whose visit is tried first: the longest, so that no plan of a later one needs more room.
        self._probes = nsmallest(PROBES, range(len(samples)), lambda c: (-self._steps[samples[c]], -samples[c], c))
        self.slots: list[Slot] = []
        self._ready = False
        self._size = 0  # of the steps to measure with
        self._visit: tuple[Job, Tensor, Tensors] | None = None  # a whole one to measure with, if it is short
        self._starved: Job | None = None  # whose visit ran out of memory in the only slot

    @property
    def shown(self) -> str:
        return f"slots:{len(self.slots)}"

    def train(self, jobs: Sequence[Job], weights: Tensor, sent: Tensors, states: States) -> Iterator[Outcome]:
        if not self._ready and jobs:
            self._make_slots(jobs[0], weights, sent)
        waiting = sorted(jobs, key=lambda job: (-self._steps[self._samples(job)], job.client))
        arriving: list[Arriving] = []
        try:
            while waiting or arriving or any(slot.job for slot in self.slots):
                moved = False
                for slot in list(self.slots):
                    if slot not in self.slots:  # given up a moment ago
                        continue
                    if not slot.has_room() or not (slot.job or waiting):
                        continue
                    moved = True
                    job = slot.job or waiting.pop(self._next_for(slot, waiting))
                    trouble, why, trace = None, "", ""
                    try:
                        if slot.graphs is None:
                            yield slot.eagerly(job, weights, sent, states(job.client))
                            continue
                        if slot.job is None:
                            slot.begin(job, weights, sent, states(job.client))
                        if slot.advance():
                            arriving.append(slot.finish())
                    except Exception as error:
                        why, trace = failure(error), traceback.format_exc()
                        trouble = error.with_traceback(None)  # which would keep the slot's memory
                    if trouble is None:
                        continue
                    if isinstance(trouble, Uncapturable):
                        waiting[:0] = [job, *(s.job for s in self.slots if s is not slot and s.job)]
                        self._give_up(slot, trouble)
                    elif starved(trouble):
                        waiting.insert(0, job)
                        self._lower(slot, job)
                    elif isinstance(trouble, BadMethod):
                        raise trouble from Elsewhere.of(trace)
                    else:
                        slot.leave()
                        yield Outcome(job.client, problem=why, trace=trace)
                for done in [a for a in arriving if a.here()]:
                    arriving.remove(done)
                    moved = True
                    yield done.take()
                if not moved:
                    time.sleep(PAUSE)
        finally:
            for slot in self.slots:
                slot.leave()
            synchronize(self.device)

    def score(self, part: str, index: np.ndarray, weights: Tensor, state: Tensors | None = None) -> Score:
        while True:
            try:
                with self._first() as replica:
                    replica.load(weights, state)
                    return replica.score(part, index)
            except (Uncapturable, RuntimeError) as error:
                if not isinstance(error, Uncapturable) and not starved(error):
                    raise
            self._make_room_to_judge()  # here, because an error keeps alive what its pass has made

    def answer(
        self, exchange: str, jobs: Sequence[Job], weights: Tensor, sent: Tensors, states: States
    ) -> Iterator[Tensors]:
        for job in jobs:
            try:
                with self._first() as replica:
                    answer = replica.answer(exchange, job, weights, sent, states(job.client))
            except BadMethod:
                raise
            except Exception as error:
                raise RunError(f"client {job.client} has no answer to '{exchange}': it {failure(error)}") from error
            yield answer

    def close(self) -> None:
        """Give the memory back."""
        self.slots.clear()
        self._pictures.clear()
        give_back_memory(self.device)

    @contextmanager
    def _first(self) -> Iterator[Replica]:
        """A replica that is free, on its stream."""
        if not self.slots:
            self.slots.append(Slot(self.world, self.device, self._pictures))
        lane = self.slots[0].lane
        lane.follow()
        with lane.use():
            yield self.slots[0].replica
        lane.lead()

    def _samples(self, job: Job) -> int:
        return len(self.world.clients[job.client])

    def _next_for(self, slot: Slot, waiting: list[Job]) -> int:
        """The longest visit; of the next few rather one for whose batch sizes this slot has its graphs already."""
        few = waiting[: len(self.slots)]
        return next((i for i, job in enumerate(few) if slot.knows(self._sizes[self._samples(job)])), 0)

    def _lower(self, slot: Slot, job: Job) -> None:
        """Give up a slot for which there is no memory."""
        slot.leave()
        synchronize(self.device)
        if len(self.slots) == 1:
            if job == self._starved:
                raise RunError(_NO_MEMORY)
            self._starved = job  # once more, without what slots before it may have left behind
            give_back_memory(self.device)
            return
        self._drop(slot)

    def _drop(self, slot: Slot) -> None:
        synchronize(self.device)
        self._remove([slot])
        self._note(f"the GPU ran out of memory: going on with {_slots(len(self.slots))}")

    def _remove(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self.slots.remove(slot)
            slot.release()
            del slot.replica  # a name that is left for the slot would keep its memory
        give_back_memory(self.device)

    def _make_room_to_judge(self) -> None:
        slot = self.slots[0]
        if slot.graphs is not None and not slot.judges_eagerly:
            slot.judges_eagerly = True
            synchronize(self.device)
            give_back_memory(self.device)
        elif len(self.slots) > 1:
            self._drop(self.slots[-1])
        else:
            raise RunError(_NO_MEMORY_TO_JUDGE)

    def _give_up(self, slot: Slot, error: Uncapturable) -> None:
        """Go on without graphs: one replica, since what is not captured may draw from generators that all share."""
        synchronize(self.device)
        self._note(f"a step of '{self.world.settings.method.shown()}' cannot be captured ({error}), so it runs eagerly")
        for one in [slot, *self.slots]:
            one.leave()
        slot.release()
        self.slots = [slot]

    def _make_slots(self, job: Job, weights: Tensor, sent: Tensors) -> None:
        """Make as many slots as pay: twice as many again, while that is faster and there is memory."""
        self._ready, self.slots = True, []
        settings = self.world.settings
        visits = max(1, int(len(self.world.clients) * settings.participation + 1e-9))
        most = min(settings.slots or MOST, visits)
        steps = settings.rounds * settings.participation * sum(k * self._steps[n] for n, k in self._clients.items())
        began, before, speed = time.perf_counter(), free_memory(self.device), 0.0
        while self._add(job, weights, sent, most) and len(self.slots) < most:
            cost = time.perf_counter() - began
            if len(self.slots) == 1:
                size = before - free_memory(self.device)
            if settings.slots is None and not self._size:
                break
            if settings.slots is None and len(self.slots).bit_count() == 1:
                faster = self._speed()
                more = len(self.slots)
                # What the first one takes says nothing: in a fresh process libraries load and kernels are compiled.
                pays = more == 1 or more * cost <= SHARE * steps / faster
                if faster < GAIN * speed:
                    self._share_evenly(visits, more=faster > CLEAR * speed)
                if faster < GAIN * speed or not pays:
                    break
                if ROOM * free_memory(self.device) < more * size:
                    break
                speed = faster
            began = time.perf_counter()
        self._visit = None

    def _share_evenly(self, visits: int, more: bool) -> None:
        """Keep as many slots as share a round most evenly: half of those there are would be as fast, all at work."""
        most = len(self.slots)
        keep = min(range((most + 1) // 2, most + 1), key=lambda n: (-(-visits // n) * n, -n if more else n))
        self._remove(self.slots[keep:])

    def _add(self, job: Job, weights: Tensor, sent: Tensors, most: int) -> bool:
        """Make a slot and capture its step; whether another one may be tried."""
        slot: Slot | None = None
        try:
            slot = Slot(self.world, self.device, self._pictures)
            slot.capture(self._recurring(most))
            if self._try(slot, job, weights, sent):
                slot.again(self._size)  # is done, so that libraries set themselves up
                slot.again(self._size)  # is captured
            slot.lane.wait()
            slot.warm()
            slot.leave()
        except Uncapturable as error:
            assert slot is not None
            self._give_up(slot, error)
            return False
        except RuntimeError as error:
            if not starved(error):
                raise
            slot = None
            error.__traceback__ = None
            give_back_memory(self.device)
            if not self.slots:
                raise RunError(_NO_MEMORY) from None
            if self.world.settings.slots is not None:
                self._note(f"the GPU has memory for {_slots(len(self.slots))} only")
            return False
        self.slots.append(slot)
        give_back_memory(self.device, garbage=False)  # what the first step took
        return True

    def _try(self, slot: Slot, job: Job, weights: Tensor, sent: Tensors) -> bool:
        """Begin a visit that has steps to try; the first client with whom that works is taken for the other slots."""
        while self._probes:
            probe = replace(job, client=self._probes[0])
            try:
                sizes = slot.begin(probe, weights, sent, None).sizes
            except Exception as error:
                if starved(error) or isinstance(error, Uncapturable):
                    raise
                sizes = ()  # it will fail again in its own visit, and be an event there
            if sizes:
                self._size = max(sizes)
                # Somebody's own method may count its visits, and is not to see any that are none.
                short = self.world.settings.method.ours and len(sizes) <= SHORT
                self._visit = (probe, weights, sent) if short else None
                return True
            slot.leave()
            self._probes.pop(0)
        return False

    def _speed(self) -> float:
        """Steps a second of all slots together, from a short measurement."""
        if self._visit is not None:
            try:
                return self._speed_of_visits(*self._visit)
            except Exception:  # it will fail again in its own visit, and be an event there
                self._visit = None
                for slot in self.slots:
                    slot.leave()
        rate = 0.0
        for steps in (2, 24):
            synchronize(self.device)
            began = time.perf_counter()
            for _ in range(steps):
                for slot in self.slots:
                    slot.again(self._size)
            synchronize(self.device)
            rate = steps * len(self.slots) / (time.perf_counter() - began)
        return rate

    def _speed_of_visits(self, probe: Job, weights: Tensor, sent: Tensors) -> float:
        rate = 0.0
        for times in (3, 4, 4):  # arrival and departure are done, then captured, then replayed
            synchronize(self.device)
            began, steps = time.perf_counter(), 0
            for _ in range(times):
                for slot in self.slots:
                    steps += slot.begin(probe, weights, sent, None).steps
                    while not slot.advance():
                        pass
                    slot.finish()
            synchronize(self.device)
            rate = max(rate, steps / (time.perf_counter() - began))
        return rate

    def _recurring(self, slots: int) -> frozenset[int]:
        """The batch sizes that come often enough to be captured in each slot."""
        s, found = self.world.settings, Counter[int]()
        for samples, clients in self._clients.items():
            for size, times in self._sizes[samples].items():
                found[size] += clients * times
        often = {n for n, times in found.items() if times * s.rounds * s.participation / slots >= RECURS}
        return frozenset(often | {max(found, key=lambda n: (found[n], n), default=s.batch_size)})


def _slots(count: int) -> str:
    return "one slot" if count == 1 else f"{count} slots"
