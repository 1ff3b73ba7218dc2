"""Clients side by side in long-lived worker processes, one thread each.

Weights and data lie in shared memory; only a line of text goes through a pipe for each visit. A worker takes the next
visit as soon as it is free, the longest first; while there is plenty to do, its next one lies ready before that.
Workers are ordinary child processes that import nothing from the caller's script, and they can be handed from run to
run (``Pool``), so a comparison starts them once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isofed.engine.mailbox import AHEAD, Inbox, Letter, Outbox, shared_folder
from isofed.engine.plan import steps_of
from isofed.engine.portable import pack
from isofed.engine.replica import Job, Outcome, Score, one_thread
from isofed.engine.serial import States, chunks
from isofed.engine.world import World
from isofed.errors import BadMethod, RunError
from isofed.layout import Tensors
from isofed.traces import Elsewhere

# The C library gives large blocks back to the system at every step, and each must then be cleared again for the next:
# a few percent of the time. These keep them, in pages of two megabytes where the system has such, which saves two more;
# other C libraries do not know the names and ignore them.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
_KEEP_MEMORY |= {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class WorkerDied(Exception):
    """The process went away in the middle of a request."""


class _Process:
    """One worker process and the two mailboxes that belong to it."""

    def __init__(self, folder: Any, number: int) -> None:
        self.folder, self.number = folder, number
        self.outbox, self.inbox = Outbox(folder, f"parent-{number}", turns=AHEAD), Inbox()
        self.set_up: dict[str, Any] | None = None  # the last set-up, to be repeated after a restart
        self._asked: deque[dict[str, Any]] = deque()  # requests without a reply so far
        self.unwanted = False
        self._start()

    def _start(self) -> None:
        # The worker finds what this process finds, and nothing that merely lies in the present folder.
        path = os.pathsep.join(p for p in sys.path if p)
        environment = _KEEP_MEMORY | os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "isofed.engine.worker", str(self.folder), str(self.number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal is for this process, which then stops its workers
            text=True,
            encoding="utf-8",
        )

    def send(self, request: dict[str, Any]) -> None:
        """Put a request into the pipe, behind those that are there."""
        self._asked.append(request)
        self._write(request)

    def receive(self) -> dict[str, Any]:
        """The reply to the oldest request; if the process dies of it, start another one and try once more."""
        for tries_left in (1, 0):
            line = self._line()
            if line:
                reply: dict[str, Any] = json.loads(line)
                self._asked.popleft()
                return reply
            how = _how(self.process.wait())
            if self.unwanted or not tries_left:
                break
            self._restart()
        self._asked.popleft()
        if self._asked and not self.unwanted:
            self._restart()  # the requests behind it are none the worse
        raise WorkerDied(how)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for the reply."""
        self.send(request)
        return self.receive()

    def _restart(self) -> None:
        """Start another process in the place of one that died, and give it the same requests."""
        self.close()
        self.inbox = Inbox()
        self._start()
        if self.set_up is not None and self._asked[0]["do"] != "set-up":
            self._write(self.set_up)
            self._line()  # if it dies of this already, it does not answer the next request either
        for request in self._asked:
            self._write(request)

    def _write(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # that it is dead shows when there is no reply
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()

    def _line(self) -> str:
        """A whole line of the process, or nothing where it died."""
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            line = self.process.stdout.readline()
            return line if line.endswith("\n") else ""
        return ""

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:  # still busy with a visit that nobody wants any more
            self.process.kill()
            self.process.wait()


def _how(code: int) -> str:
    return f"its worker process was killed (signal {-code})" if code < 0 else f"its worker process ended (code {code})"


class Pool:
    """Worker processes that outlive a run."""

    def __init__(self, count: int) -> None:
        self.folder = shared_folder()
        self.processes = [_Process(self.folder, n) for n in range(count)]
        self.shared = Outbox(self.folder, "shared")
        self.data = Outbox(self.folder, "data")

    def each(self, task: Callable[[_Process], None]) -> None:
        """Run a task on every worker at once."""
        errors: list[BaseException] = []

        def guarded(process: _Process) -> None:
            try:
                task(process)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(p,), daemon=True) for p in self.processes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def kill(self) -> None:
        """Stop all work at once; the pool is of no use afterwards."""
        for process in self.processes:
            process.unwanted = True
            process.process.kill()

    def close(self) -> None:
        for process in self.processes:
            process.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Workers:
    """The executor over a pool of worker processes."""

    def __init__(self, world: World, pool: Pool) -> None:
        self.world, self.pool = world, pool
        request = _set_up(world, pool)

        def set_up(process: _Process) -> None:
            try:
                reply = process.ask(request)
            except WorkerDied as error:
                raise RunError(f"a worker process could not start ({error}); use executor=serial to see why") from None
            if "error" in reply:
                said = f"a worker process could not be set up: it {reply['error']}"
                raise RunError(said) from Elsewhere.of(reply["trace"])
            process.set_up = request

        pool.each(set_up)

    @property
    def shown(self) -> str:
        return f"workers:{len(self.pool.processes)}"

    def train(self, jobs: Sequence[Job], weights: Tensor, sent: Tensors, states: States) -> Iterator[Outcome]:
        letter = self._post(weights, sent)

        def request(process: _Process, job: Job) -> dict[str, Any]:
            return _request("train", letter, process, states(job.client), job=dataclasses.asdict(job))

        def read(process: _Process, job: Job) -> Outcome:
            try:
                reply = process.receive()
            except WorkerDied as error:
                return Outcome(job.client, problem=str(error))
            _stop_at_bad_method(reply)
            if "error" in reply:
                return Outcome(job.client, problem=reply["error"], trace=reply["trace"])
            return _outcome(job.client, reply, process.inbox)

        yield from self._share_out(self._sized(jobs), request, read)

    def score(self, part: str, index: np.ndarray, weights: Tensor, state: Tensors | None = None) -> Score:
        letter = self.pool.shared.post({"weights": weights})
        pieces = list(enumerate(chunks(index)))

        def request(process: _Process, piece: tuple[int, np.ndarray]) -> dict[str, Any]:
            return _request("score", letter, process, state, part=part, index=piece[1].tolist())

        def read(process: _Process, piece: tuple[int, np.ndarray]) -> tuple[int, Score]:
            reply = self._answered(process, "an evaluation")
            correct, seen = np.array(reply["correct"]), np.array(reply["seen"])
            return piece[0], Score(correct, seen, float.fromhex(reply["loss"]))

        found = self._share_out([(len(samples), (n, samples)) for n, samples in pieces], request, read)
        scores = [score for _, score in sorted(found, key=lambda pair: pair[0])]
        return sum(scores, Score.none(len(self.world.dataset.classes)))

    def answer(
        self, exchange: str, jobs: Sequence[Job], weights: Tensor, sent: Tensors, states: States
    ) -> Iterator[Tensors]:
        letter = self._post(weights, sent)

        def request(process: _Process, job: Job) -> dict[str, Any]:
            extra = {"exchange": exchange, "job": dataclasses.asdict(job)}
            return _request("answer", letter, process, states(job.client), **extra)

        def read(process: _Process, job: Job) -> tuple[int, Tensors]:
            reply = self._answered(process, f"client {job.client} has no answer to '{exchange}': it")
            return job.client, {k: v.clone() for k, v in process.inbox.read(reply["letter"]).items()}

        waiting: dict[int, Tensors] = {}
        order = [job.client for job in jobs]
        for client, tensors in self._share_out([(1, job) for job in jobs], request, read):
            waiting[client] = tensors
            while order and order[0] in waiting:
                yield waiting.pop(order.pop(0))

    def _sized(self, jobs: Sequence[Job]) -> list[tuple[int, Job]]:
        """Jobs with their numbers of steps, the longest first."""
        sized = [(steps_of(len(self.world.clients[job.client]), self.world.settings), job) for job in jobs]
        return sorted(sized, key=lambda pair: (-pair[0], pair[1].client))

    def _post(self, weights: Tensor, sent: Tensors) -> Letter:
        return self.pool.shared.post({"weights": weights} | {f"sent/{k}": v for k, v in sent.items()})

    @staticmethod
    def _answered(process: _Process, what: str) -> dict[str, Any]:
        try:
            reply = process.receive()
        except WorkerDied as error:
            raise RunError(f"{what} was lost: {error}") from None
        _stop_at_bad_method(reply)
        if "error" in reply:
            raise RunError(f"{what} {reply['error']}") from Elsewhere.of(reply["trace"])
        return reply

    def _share_out(
        self,
        tasks: Sequence[tuple[int, Any]],
        request: Callable[[_Process, Any], dict[str, Any]],
        read: Callable[[_Process, Any], Any],
    ) -> Iterator[Any]:
        """Let each worker take the next task when it is free, or a little before; give results as they come."""
        processes = self.pool.processes[: len(tasks)]
        todo = _Tasks(tasks, len(processes))
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def serve(process: _Process) -> None:
            asked: deque[tuple[int, Any]] = deque()
            while True:
                while len(asked) < AHEAD and (taken := todo.take(sum(size for size, _ in asked))):
                    try:
                        process.send(request(process, taken[1]))
                    except BaseException as error:
                        done.put((None, error))
                    else:
                        asked.append(taken)
                if not asked:
                    return
                try:
                    done.put((read(process, asked[0][1]), None))
                except BaseException as error:
                    done.put((None, error))
                asked.popleft()

        threads = [threading.Thread(target=serve, args=(process,), daemon=True) for process in processes]
        for thread in threads:
            thread.start()
        try:
            with one_thread(torch.device("cpu")):  # whoever uses the results has no core for itself, either
                for _ in tasks:
                    result, error = done.get()
                    if error is not None:
                        raise error
                    yield result
        except KeyboardInterrupt:
            self.pool.kill()
            raise
        finally:
            todo.clear()  # left early: nobody may start what nobody will read
            for thread in threads:
                thread.join()


class _Tasks:
    """What is still to be done, and how much of it there is."""

    def __init__(self, tasks: Sequence[tuple[int, Any]], takers: int) -> None:
        self._tasks, self._takers = deque((max(size, 1), task) for size, task in tasks), takers
        self._left = sum(size for size, _ in self._tasks)
        self._lock = threading.Lock()

    def take(self, busy: int) -> tuple[int, Any] | None:
        """The next task, for a worker that has ``busy`` steps before it.

        Who is busy gets one only if the rest is enough for all others until they are done with theirs as well: nobody
        shall be idle in the end while a task waits behind another.
        """
        with self._lock:
            if not self._tasks:
                return None
            size = self._tasks[0][0]
            if busy and self._left - size < (self._takers - 1) * (busy + size):
                return None
            self._left -= size
            return self._tasks.popleft()

    def clear(self) -> None:
        with self._lock:
            self._tasks.clear()


def _set_up(world: World, pool: Pool) -> dict[str, Any]:
    """What a worker needs to build the same world; the data go into shared memory once, however many runs follow."""
    tensors, plain = pack(world)
    return {"do": "set-up", "data": pool.data.post(tensors), **plain}


def _request(kind: str, shared: Any, process: _Process, state: Tensors | None, **more: Any) -> dict[str, Any]:
    return {"do": kind, "shared": shared, "state": process.outbox.post(state) if state else None, **more}


def _stop_at_bad_method(reply: dict[str, Any]) -> None:
    """A rule that a method breaks in a worker ends the run, as it does here."""
    if "bad method" in reply:
        raise BadMethod(reply["bad method"]) from Elsewhere.of(reply["trace"])


def _outcome(client: int, reply: dict[str, Any], inbox: Inbox) -> Outcome:
    """Copy a worker's answer out of its mailbox, so that it can go on."""
    tensors = {k: v.clone() for k, v in inbox.read(reply.pop("letter")).items()}

    def under(prefix: str) -> Tensors:
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    return Outcome(
        client,
        tensors["update"],
        tensors["statistics"],
        under("mean/"),
        under("sum/"),
        under("state/"),
        tensors.get("model"),
        loss=float.fromhex(reply.pop("loss")),
        **reply,
    )
