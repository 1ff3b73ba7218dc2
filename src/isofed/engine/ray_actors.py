"""Clients on several GPUs and machines: the same engine in each actor of a Ray cluster.

The data and the weights are put into Ray's object store once, and each machine fetches them once. An actor takes the
next few clients as soon as it is free, the longest first, and sends the sum of what it collected at the end of the
round. Sums are exact, so neither the number of actors nor who trained whom changes a bit. Messages hold plain values
and arrays; Ray itself writes them with pickle.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isofed import extras
from isofed.collect import Partial
from isofed.engine.choose import available_cores
from isofed.engine.plan import steps_of
from isofed.engine.portable import arrays, pack, tensors
from isofed.engine.ray_actor import Actor, versions
from isofed.engine.replica import Job, Outcome, Score
from isofed.engine.serial import States, chunks, failure
from isofed.engine.world import World
from isofed.errors import IsofedError, RunError, UserError
from isofed.layout import Tensors

PORTIONS = 2  # in which an actor would get its share of the work, if the first ones were not followed by smaller ones
START_SECONDS = 600  # that actors may take to start: a cluster may have to fetch machines first


class ActorDied(Exception):
    """An actor went away before it gave an answer."""


class Cluster:
    """Actors that outlive a run, on the cluster that ``RAY_ADDRESS`` names or on one started here.

    Args:
        actors: how many; one per GPU of the cluster if not given, or one per core where clients train on the CPU.
        gpu: whether each actor gets a GPU.
        at_most: actors that there is work for.
    """

    def __init__(self, actors: int | None, gpu: bool = False, at_most: int | None = None) -> None:
        self.ray = _ray()
        self.actors: list[Any] = []
        self._gpu, self._joined = gpu, self.ray.is_initialized()
        try:
            if not self._joined:
                _connect(self.ray, actors)
            there = int(self.ray.cluster_resources().get("GPU" if gpu else "CPU", 0))
            if there < (actors or 1):
                what = ("GPU" if gpu else "core") + "s" * (there != 1)
                raise UserError(f"the Ray cluster has {there} {what}, and actors={actors or 1} needs one for each")
            self._start(min(actors or there, at_most or there))
        except BaseException:
            self.close()
            raise

    def _start(self, count: int) -> None:
        make = self.ray.remote(num_cpus=1, num_gpus=int(self._gpu), max_restarts=0, max_task_retries=0)(Actor)
        self.actors = [make.remote() for _ in range(count)]
        calls = [actor.hello.remote() for actor in self.actors]
        ready, _ = self.ray.wait(calls, num_returns=count, timeout=START_SECONDS)
        if len(ready) < count:
            raise RunError(f"only {len(ready)} of {count} Ray actors could start; is the cluster busy with other work?")
        for call in calls:
            try:
                host, found = self.result(call)
            except ActorDied as error:
                raise RunError(f"a Ray actor could not start: {error}") from None
            for name, version in versions().items():
                if found[name] != version:
                    raise RunError(f"the machine {host} has {name} {found[name]}, and this one has {version}")

    def result(self, call: Any) -> Any:
        """Wait for an answer."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(call)
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise RunError(str(cause) if isinstance(cause, IsofedError) else f"a Ray actor {failure(cause)}") from cause
        except errors.RayError as error:
            raise ActorDied(_reason(error)) from None

    def bury(self, actor: Any) -> None:
        """Count on an actor no more; one that merely could not be reached must not go on by itself."""
        self.actors.remove(actor)
        self.ray.kill(actor)

    def share_out(self, todo: deque[Any], call: Callable[[Any, Any], Any]) -> Iterator[tuple[Any, Any, Any]]:
        """Let each actor take the next task when it is free; gives actor, task and result, or :class:`ActorDied`.

        Whoever reads may put a lost task back.
        """
        busy: dict[Any, tuple[Any, Any]] = {}
        while todo or busy:
            working = [actor for actor, _ in busy.values()]
            for actor in [a for a in self.actors if a not in working][: len(todo)]:
                task = todo.popleft()
                busy[call(actor, task)] = actor, task
            if not busy:
                raise RunError("no Ray actor is left, all of them died; a recorded run can be resumed")
            (ready,), _ = self.ray.wait(list(busy))
            actor, task = busy.pop(ready)
            try:
                result = self.result(ready)
            except ActorDied as error:
                self.bury(actor)
                result = error
            yield actor, task, result

    def close(self) -> None:
        """End the actors at once, and Ray too where it was started here."""
        for actor in self.actors:
            with suppress(Exception):  # Ray itself may be what went away
                self.ray.kill(actor)
        self.actors = []
        if not self._joined:
            with _quiet():
                self.ray.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RayActors:
    """The executor over the actors of a cluster."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        actors: int | None = None,
        shared: Cluster | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.world, self.device, self._shared, self._note = world, device, shared, note
        kind = torch.device(world.settings.device).type
        self.cluster = shared or Cluster(actors, gpu=kind == "cuda", at_most=len(world.clients))
        self.ray = self.cluster.ray
        self._at_once = 1  # clients that an actor trains side by side; known after the first ones
        self._put_last: tuple[Tensor, int, Any] | None = None
        try:
            self._set_up(kind)
        except BaseException:
            self.close()
            raise

    @property
    def shown(self) -> str:
        return f"ray:{len(self.cluster.actors)}"

    def _set_up(self, device: str) -> None:
        content, plain = pack(self.world)
        data, files = self.ray.put(arrays(content)), self.world.settings.code()
        calls = {actor: actor.set_up.remote(data, plain, files, device) for actor in self.cluster.actors}
        for actor, call in calls.items():
            try:
                self.cluster.result(call)
            except ActorDied:
                self.cluster.bury(actor)
                self._died()
        if not self.cluster.actors:
            raise RunError("no Ray actor could be set up: all of them died")

    def train(self, jobs: Sequence[Job], weights: Tensor, sent: Tensors, states: States) -> Iterator[Outcome | Partial]:
        cluster, s = self.cluster, self.world.settings
        begin = self.ray.put(list(jobs)), self._put(weights), self.ray.put(arrays(sent))
        for actor in cluster.actors:
            actor.begin.remote(*begin)

        def visit(actor: Any, places: list[int]) -> Any:
            return actor.train.remote(places, arrays([states(jobs[place].client) for place in places]))

        work = [steps_of(len(self.world.clients[job.client]), s) for job in jobs]
        todo = deque(portions(work, max(len(cluster.actors), 1), self._at_once))
        held: dict[Any, list[int]] = {}  # by an actor: places of clients whose results lie there
        died: Counter[int] = Counter()
        while todo or held:
            for actor, places, result in cluster.share_out(todo, visit):
                if not isinstance(result, ActorDied):
                    self._at_once = max(self._at_once, result)
                    held.setdefault(actor, []).extend(places)
                    yield Partial(len(places))
                    continue
                self._died()
                lost = held.pop(actor, [])
                died.update(places)
                yield Partial(-len(lost))
                # One by one: should a client be the cause, it takes no others with it.
                todo.extend([place] for place in [*lost, *places] if died[place] < 2)
                for place in places:
                    if died[place] == 2:
                        yield Outcome(jobs[place].client, problem="was left out: two Ray actors died during its visit")
            calls = {actor: actor.finish.remote() for actor in held}
            for actor, call in calls.items():
                places = held.pop(actor)
                try:
                    yield Partial(0, tensors(cluster.result(call), self.device))
                except ActorDied:
                    cluster.bury(actor)
                    self._died()
                    todo.extend([place] for place in places)
                    yield Partial(-len(places))

    def score(self, part: str, index: np.ndarray, weights: Tensor, state: Tensors | None = None) -> Score:
        own, given = self._put(weights), arrays(state)
        pieces = chunks(index)
        scores: dict[int, Score] = {}

        def judge(actor: Any, places: np.ndarray) -> Any:
            return actor.score.remote(own, part, [pieces[place] for place in places], given)

        for places, result in self._retried(np.array_split(np.arange(len(pieces)), self._count(pieces)), judge):
            scores |= dict(zip(places.tolist(), result, strict=True))
        return sum((scores[place] for place in range(len(pieces))), Score.none(len(self.world.dataset.classes)))

    def answer(
        self, exchange: str, jobs: Sequence[Job], weights: Tensor, sent: Tensors, states: States
    ) -> Iterator[Tensors]:
        own, given = self._put(weights), self.ray.put(arrays(sent))
        waiting: dict[int, Tensors] = {}
        due = 0

        def ask(actor: Any, places: range) -> Any:
            known = arrays([states(jobs[place].client) for place in places])
            return actor.answer.remote(exchange, [jobs[place] for place in places], own, given, known)

        size = max(1, min(self._at_once, len(jobs) // max(len(self.cluster.actors), 1)))
        groups = [range(i, min(i + size, len(jobs))) for i in range(0, len(jobs), size)]
        for places, result in self._retried(groups, ask):
            waiting |= dict(zip(places, tensors(result, self.device), strict=True))
            while due in waiting:
                yield waiting.pop(due)
                due += 1

    def close(self) -> None:
        """End what this executor has started."""
        if self._shared is None:
            self.cluster.close()

    def _retried(self, tasks: Sequence[Any], call: Callable[[Any, Any], Any]) -> Iterator[tuple[Any, Any]]:
        """Tasks that leave nothing behind at an actor: one that is lost is done again, once."""
        todo = deque((task, 0) for task in tasks)
        for _, (task, lost), result in self.cluster.share_out(todo, lambda actor, entry: call(actor, entry[0])):
            if not isinstance(result, ActorDied):
                yield task, result
                continue
            self._died()
            if lost:
                raise RunError("two Ray actors died of the same question")
            todo.append((task, 1))

    def _died(self) -> None:
        self._note(f"a Ray actor died and its work is done again; left: {len(self.cluster.actors)}")

    def _count(self, pieces: Sequence[Any]) -> int:
        return max(1, min(len(pieces), 2 * PORTIONS * len(self.cluster.actors)))

    def _put(self, weights: Tensor) -> Any:
        """Weights in the object store; those of the last call, which are judged and then trained, are there already."""
        last = self._put_last
        if last is None or last[0] is not weights or last[1] != weights._version:
            last = self._put_last = weights, weights._version, self.ray.put(arrays(weights))
        return last[2]


def portions(work: Sequence[int], actors: int, at_least: int = 1) -> list[list[int]]:
    """Places dealt out by expected work: the longest first, in portions that get smaller.

    So there are few messages, and at the end nobody waits long, even if one machine is much slower. ``at_least`` is how
    many clients an actor trains side by side.
    """
    order = sorted(range(len(work)), key=lambda place: (-work[place], place))
    at_least = max(1, min(at_least, len(order) // actors))
    made: list[list[int]] = []
    left, start = sum(work), 0
    while start < len(order):
        end, taken = start, 0
        while end < len(order) and (end - start < at_least or taken + work[order[end]] <= left / (PORTIONS * actors)):
            taken += work[order[end]]
            end += 1
        made.append(order[start:end])
        left, start = left - taken, end
    return made


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    extras.check("executor=ray", "Ray", "ray", "ray")
    with _quiet():
        return importlib.import_module("ray")


def _connect(ray: Any, actors: int | None) -> None:
    address = os.environ.get("RAY_ADDRESS")
    host, _, port = (address or "").rpartition(":")
    if port.isdecimal():  # or Ray itself would knock for minutes
        try:
            socket.create_connection((host.rpartition("/")[2], int(port)), timeout=10).close()
        except OSError:
            raise RunError(f"no Ray cluster answers at RAY_ADDRESS={address}") from None
    own = {} if address else {"num_cpus": max(actors or 1, available_cores()), "include_dashboard": False}
    path = {} if address else {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}  # actors find what we find
    try:
        with _quiet(), _restored(path):
            ray.init(address=address or "local", logging_level="ERROR", log_to_driver=False, **own)
    except (OSError, RuntimeError, ray.exceptions.RayError) as error:
        raise RunError(f"Ray could not start: it {failure(error)}") from error


@contextmanager
def _restored(environment: dict[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started meanwhile, and put them, and what Ray does to signals, back."""
    before = {name: os.environ.get(name) for name in environment}
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        if main:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray leaves files and processes to the garbage collector, and announces changes of later versions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
