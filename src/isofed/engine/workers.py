"""Clients side by side in long-lived worker processes, one thread each.

Weights and data lie in shared memory; only a line of text goes through a pipe for each visit. A worker takes the next
visit as soon as it is free, the longest first. Workers are ordinary child processes that import nothing from the
caller's script, and they can be handed from run to run (``Pool``), so a comparison starts them once.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isofed.engine.mailbox import Inbox, Letter, Outbox, shared_folder
from isofed.engine.plan import steps_of
from isofed.engine.replica import Job, Outcome, Score
from isofed.engine.serial import States, chunks
from isofed.engine.world import World
from isofed.errors import RunError
from isofed.layout import Tensors

# The C library gives large blocks back to the system at every step, and each must then be cleared again for the next:
# a few percent of the time. These keep them; other C libraries do not know the names and ignore them.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}


class WorkerDied(Exception):
    """The process went away in the middle of a request."""


class _Process:
    """One worker process and the two mailboxes that belong to it."""

    def __init__(self, folder: Any, number: int) -> None:
        self.folder, self.number = folder, number
        self.outbox, self.inbox = Outbox(folder, f"parent-{number}"), Inbox()
        self.set_up: dict[str, Any] | None = None  # the last set-up, to be repeated after a restart
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

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for the reply."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except (BrokenPipeError, OSError):
            line = ""
        if not line.endswith("\n"):
            raise WorkerDied(_how(self.process.wait()))
        if request["do"] == "set-up":
            self.set_up = request
        reply: dict[str, Any] = json.loads(line)
        return reply

    def ask_again(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request; if the process dies of it, start another one and try once more."""
        try:
            return self.ask(request)
        except WorkerDied:
            if self.unwanted:
                raise
            self.close()
            self.inbox = Inbox()
            self._start()
            if self.set_up is not None and request["do"] != "set-up":
                self.ask(self.set_up)
            return self.ask(request)

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
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
                reply = process.ask_again(dict(request))
            except WorkerDied as error:
                raise RunError(f"a worker process could not start ({error}); use executor=serial to see why") from None
            if "error" in reply:
                raise RunError(f"a worker process could not be set up: it {reply['error']}")

        pool.each(set_up)

    def train(self, jobs: Sequence[Job], weights: Tensor, sent: Tensors, states: States) -> Iterator[Outcome]:
        letter = self._post(weights, sent)
        sizes = {job.client: steps_of(len(self.world.clients[job.client]), self.world.settings) for job in jobs}
        longest_first = sorted(jobs, key=lambda job: (-sizes[job.client], job.client))

        def visit(process: _Process, job: Job) -> Outcome:
            request = _request("train", letter, process, states(job.client), job=dataclasses.asdict(job))
            try:
                reply = process.ask_again(request)
            except WorkerDied as error:
                return Outcome(job.client, problem=str(error))
            if "error" in reply:
                return Outcome(job.client, problem=reply["error"])
            return _outcome(job.client, reply, process.inbox)

        yield from self._share_out(longest_first, visit)

    def score(self, part: str, index: np.ndarray, weights: Tensor, state: Tensors | None = None) -> Score:
        letter = self.pool.shared.post({"weights": weights})
        pieces = list(enumerate(chunks(index)))

        def judge(process: _Process, piece: tuple[int, np.ndarray]) -> tuple[int, Score]:
            request = _request("score", letter, process, state, part=part, index=piece[1].tolist())
            reply = self._answered(process, request, "an evaluation")
            correct, seen = np.array(reply["correct"]), np.array(reply["seen"])
            return piece[0], Score(correct, seen, float.fromhex(reply["loss"]))

        scores = [score for _, score in sorted(self._share_out(pieces, judge), key=lambda pair: pair[0])]
        return sum(scores, Score.none(len(self.world.dataset.classes)))

    def answer(
        self, exchange: str, jobs: Sequence[Job], weights: Tensor, sent: Tensors, states: States
    ) -> Iterator[Tensors]:
        letter = self._post(weights, sent)

        def ask(process: _Process, job: Job) -> tuple[int, Tensors]:
            extra = {"exchange": exchange, "job": dataclasses.asdict(job)}
            request = _request("answer", letter, process, states(job.client), **extra)
            reply = self._answered(process, request, f"client {job.client} has no answer to '{exchange}': it")
            return job.client, {k: v.clone() for k, v in process.inbox.read(reply["letter"]).items()}

        waiting: dict[int, Tensors] = {}
        order = [job.client for job in jobs]
        for client, tensors in self._share_out(list(jobs), ask):
            waiting[client] = tensors
            while order and order[0] in waiting:
                yield waiting.pop(order.pop(0))

    def _post(self, weights: Tensor, sent: Tensors) -> Letter:
        return self.pool.shared.post({"weights": weights} | {f"sent/{k}": v for k, v in sent.items()})

    @staticmethod
    def _answered(process: _Process, request: dict[str, Any], what: str) -> dict[str, Any]:
        try:
            reply = process.ask_again(request)
        except WorkerDied as error:
            raise RunError(f"{what} was lost: {error}") from None
        if "error" in reply:
            raise RunError(f"{what} {reply['error']}")
        return reply

    def _share_out(self, tasks: Sequence[Any], do: Callable[[_Process, Any], Any]) -> Iterator[Any]:
        """Let each worker take the next task when it is free; give results as they come."""
        todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for task in tasks:
            todo.put(task)

        def serve(process: _Process) -> None:
            while True:
                try:
                    task = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put((do(process, task), None))
                except BaseException as error:
                    done.put((None, error))

        threads = [threading.Thread(target=serve, args=(p,), daemon=True) for p in self.pool.processes[: len(tasks)]]
        for thread in threads:
            thread.start()
        try:
            for _ in tasks:
                result, error = done.get()
                if error is not None:
                    raise error
                yield result
        except KeyboardInterrupt:
            self.pool.kill()
            raise
        finally:
            while not todo.empty():  # left early: nobody may start what nobody will read
                todo.get_nowait()
            for thread in threads:
                thread.join()


def _set_up(world: World, pool: Pool) -> dict[str, Any]:
    """What a worker needs to build the same world; the data go into shared memory once, however many runs follow."""
    tensors: Tensors = {}
    for name, part in world.parts.items():
        tensors |= {f"{name}.images": part.images, f"{name}.labels": part.labels}
        if part.domains is not None:
            tensors[f"{name}.domains"] = part.domains
    tensors["clients"] = torch.from_numpy(np.concatenate(world.clients))
    dataset = world.dataset
    return {
        "do": "set-up",
        "data": pool.data.post(tensors),
        "settings": world.settings.to_dict(),
        "parts": list(world.parts),
        "name": dataset.name,
        "classes": dataset.classes,
        "domains": dataset.domains,
        "mean": dataset.mean,
        "std": dataset.std,
        "cuts": np.cumsum([len(c) for c in world.clients])[:-1].tolist(),
    }


def _request(kind: str, shared: Any, process: _Process, state: Tensors | None, **more: Any) -> dict[str, Any]:
    return {"do": kind, "shared": shared, "state": process.outbox.post(state) if state else None, **more}


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
