"""The worker process: ``python -m isofed.engine.worker``, started and spoken to by :mod:`isofed.engine.workers`.

It reads one JSON request per line and answers each with one JSON line; tensors travel through mailboxes. The next
request may lie in the pipe while it works, so that it need not wait for its parent; an answer stays where it is until
the next but one. It computes on one thread, and leaves when its parent closes the pipe or dies.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isofed.engine.mailbox import AHEAD, Inbox, Outbox
from isofed.engine.portable import unpack
from isofed.engine.replica import Job, Replica
from isofed.engine.serial import failure
from isofed.errors import BadMethod
from isofed.layout import Tensors


class Worker:
    """Answers the requests of the parent, one at a time."""

    def __init__(self, folder: Path, number: int) -> None:
        self.outbox = Outbox(folder, f"worker-{number}-{os.getpid()}", turns=AHEAD)
        self.shared, self.own, self.data = Inbox(), Inbox(), Inbox()
        self.replica: Replica | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        kind = request.pop("do")
        if kind == "set-up":
            self.replica = None
            gc.unfreeze()  # what the run before has left
            self.replica = Replica(unpack(self.data.read(request["data"]), request), torch.device("cpu"))
            gc.collect()
            gc.freeze()  # all that is here stays: no garbage collection between two steps need look through it
            return {}
        assert self.replica is not None
        shared = self.shared.read(request["shared"])
        weights = shared.pop("weights")
        sent = {k.removeprefix("sent/"): v for k, v in shared.items()}
        state = self.own.read(request["state"]) if request["state"] else None
        if kind == "train":
            return self._train(Job(**request["job"]), weights, sent, state)
        if kind == "score":
            self.replica.load(weights, state)
            score = self.replica.score(request["part"], np.array(request["index"], dtype=np.int64))
            return {"correct": score.correct.tolist(), "seen": score.seen.tolist(), "loss": score.loss.hex()}
        answer = self.replica.answer(request["exchange"], Job(**request["job"]), weights, sent, state)
        return {"letter": self.outbox.post(answer)}

    def _train(self, job: Job, weights: torch.Tensor, sent: Tensors, state: Tensors | None) -> dict[str, Any]:
        assert self.replica is not None
        outcome = self.replica.visit(job, weights, sent, state)
        tensors = {"update": outcome.update, "statistics": outcome.statistics}
        tensors |= {f"mean/{k}": v for k, v in outcome.mean.items()}
        tensors |= {f"sum/{k}": v for k, v in outcome.sum.items()}
        tensors |= {f"state/{k}": v for k, v in outcome.state.items()}
        if outcome.model is not None:
            tensors["model"] = outcome.model
        plain = ("steps", "samples", "skipped", "seconds", "problem", "largest")
        return {k: getattr(outcome, k) for k in plain} | {
            "loss": outcome.loss.hex(),
            "letter": self.outbox.post(tensors),
        }


def _leave_with_parent(folder: Path, parent: int) -> None:
    """End the process soon after its parent is gone, even in the middle of a long visit."""
    while os.getppid() == parent:
        time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Serve requests until the parent is gone."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a user's method prints must not end up between the replies
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    threading.Thread(target=_leave_with_parent, args=(folder, os.getppid()), daemon=True).start()
    worker = Worker(folder, int(sys.argv[2]))
    for line in sys.stdin:
        try:
            reply = worker.answer(json.loads(line))
        except Exception as error:
            reply = {"error": failure(error), "trace": traceback.format_exc()}
            if isinstance(error, BadMethod):
                reply["bad method"] = str(error)
        try:
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
        except BrokenPipeError:
            break
    # A parent that closed the pipe in an orderly way removes the folder itself; after a kill nobody else would.
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
