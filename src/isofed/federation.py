"""The round, written once: sample, send, train, collect, aggregate, evaluate, record."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isofed.config import Settings, keep_rule, lr_at
from isofed.config import settings as make_settings
from isofed.data import Dataset
from isofed.draws import generator
from isofed.engine.exact import ExactSum
from isofed.engine.plan import steps_of
from isofed.engine.replica import Job, Outcome
from isofed.engine.serial import Executor, Serial
from isofed.engine.workers import Pool, Workers
from isofed.engine.world import World
from isofed.errors import RunError, UserError
from isofed.evaluation import Judge
from isofed.layout import Layout, Policy, Tensors
from isofed.methods import Round, Run
from isofed.methods.compose import portable
from isofed.progress import Watcher
from isofed.records import RunFolder, environment
from isofed.result import Result

WORTH_WORKERS = 5000  # local steps in a run from which on starting worker processes pays
CHECKPOINT_SHARE = 0.05  # at most this part of the time goes into checkpoints


class Federation:
    """A federated run: settings in, a trained model and its record out.

    Settings are those of :class:`isofed.config.Settings`, by name. With ``out`` the run is recorded in that folder and
    can be resumed; without it nothing is written.

    >>> run = Federation(data="synthetic:samples=200,test=50", model="mlp", clients=2, partition="iid", rounds=1)
    >>> run.fit().rounds
    1

    Args:
        out: the run folder to make.
        dataset: data of your own, instead of those that ``data`` names.
        pool: worker processes to use, when several runs share them.
        settings: everything else.
    """

    def __init__(
        self,
        *,
        out: str | Path | None = None,
        dataset: Dataset | None = None,
        pool: Pool | None = None,
        **settings: Any,
    ) -> None:
        self._prepare(make_settings(settings), dataset, pool)
        fingerprint = self.world.dataset.fingerprint
        self.folder = (
            RunFolder.create(out, self.settings.to_dict(), environment(str(self.device), fingerprint)) if out else None
        )

    @classmethod
    def resume(
        cls, path: str | Path, *, dataset: Dataset | None = None, pool: Pool | None = None, **changes: Any
    ) -> Federation:
        """Take up a run where its folder ends. Only how it is computed may change: executor, workers, device."""
        allowed = {"executor", "workers", "device"}
        if set(changes) - allowed:
            key = sorted(set(changes) - allowed)[0]
            raise UserError(f"'{key}' cannot change when a run is resumed, only {', '.join(sorted(allowed))} can")
        folder = RunFolder.open(path)
        run = cls.__new__(cls)
        run._prepare(make_settings(folder.config | changes), dataset, pool)
        run.folder = folder
        recorded = folder.environment.get("data")
        if recorded != run.world.dataset.fingerprint:
            raise UserError(f"the data of the run {path} have changed since it was started, so it cannot go on")
        return run

    def _prepare(self, settings: Settings, dataset: Dataset | None, pool: Pool | None) -> None:
        self.settings = settings
        self.device = _device(settings.device)
        self.world = World.create(settings, dataset)
        self._pool = pool
        network = self.world.network()
        self.layout = Layout.of(network, settings.method.share(network))
        self.weights = self.layout.pack(network, self.device)
        self.context = Run(
            len(self.world.dataset.classes),
            len(self.world.clients),
            settings.rounds,
            settings.momentum,
            settings.nesterov,
            self.layout,
            self.device,
        )
        self.server = settings.method.server_state(self.context)
        self.states: dict[int, Tensors] = {}  # what clients remember, as of the last committed round
        self.visited: set[int] = set()
        self.round = 0
        self.history: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._saved, self._save_cost, self._save_time = 0, 0.0, 0.0

    # The run

    def fit(self, watcher: Watcher | None = None) -> Result:
        """Run all rounds that are still missing, and give the result."""
        watch = watcher or Watcher()
        with self.folder.lock() if self.folder else nullcontext():
            if self.folder and (done := self.folder.result()) is not None:
                return Result.from_dict(done, self.folder.metrics(), self.folder.path)
            self._take_up(watch)
            watch.start(self)
            with self._executor() as executor, _exact_arithmetic(self.settings):
                judge = Judge(self.world, executor)
                try:
                    while self.round < self.settings.rounds and not self._reached():
                        self._one_round(executor, judge, watch)
                    result = self._finish(executor, judge)
                finally:
                    self._checkpoint(force=True)
        watch.end(result)
        return result

    def _take_up(self, watch: Watcher) -> None:
        """Go back to the newest checkpoint of the folder, if there is one."""
        if self.folder is None:
            return
        checkpoint = self.folder.latest()
        self.folder.rewind(checkpoint.round if checkpoint else 0)
        if checkpoint is None:
            return
        if checkpoint.note:
            self._note(checkpoint.note, watch)
        made_with = self.folder.environment
        here = environment(str(self.device), self.world.dataset.fingerprint)
        changed = [k for k in ("isofed", "torch", "numpy") if made_with.get(k) != here[k]]
        if changed:
            self._note(f"resumed with another {', '.join(changed)}: the last bits of the result may differ", watch)
        tensors = {k: v.to(self.device) for k, v in checkpoint.tensors.items()}
        if tensors["weights"].shape != self.weights.shape:
            raise RunError(f"the checkpoint in {self.folder.path} belongs to another network; start a new run")
        self.weights.copy_(tensors["weights"])
        for key, value in tensors.items():
            kind, _, rest = key.partition("/")
            if kind == "server":
                self.server[rest] = value
            elif kind == "client":
                client, _, name = rest.partition("/")
                self.states.setdefault(int(client), {})[name] = value
        self.visited = set(checkpoint.info["visited"])
        self.round = self._saved = checkpoint.round
        self.history = self.folder.metrics()

    def _one_round(self, executor: Executor, judge: Judge, watch: Watcher) -> None:
        s, method, number = self.settings, self.settings.method, self.round + 1
        began = time.perf_counter()
        jobs, events = self._sample(number)
        sent = method.send(self.server)
        collected = _Collected(self, jobs)
        for done, outcome in enumerate(executor.train(jobs, self.weights, sent, self.states.get), 1):
            if outcome.problem:
                events.append({"client": outcome.client, "event": outcome.problem})
            else:
                collected.add(outcome)
            watch.client(done, len(jobs))
        if not collected.clients:
            why = f": client {events[0]['client']} {events[0]['event']}" if events else ""
            kept = f" The state after round {self.round} is kept in {self.folder.path}." if self.folder else ""
            raise RunError(f"round {number} has no client left to average{why}.{kept}")
        self._aggregate(number, collected)
        line: dict[str, Any] = {"round": number, "lr": lr_at(s, number), **collected.line(sent)}
        line["seconds"] = time.perf_counter() - began
        if number % s.evaluate_every == 0 or number == s.rounds:
            began = time.perf_counter()
            line |= judge.judge(self.judged(), self.states.get)
            line["evaluate_seconds"] = time.perf_counter() - began
        line["events"] = events
        self._record(line, collected)
        watch.round(line)

    def _sample(self, number: int) -> tuple[list[Job], list[dict[str, Any]]]:
        """The clients of a round; those without data are left out, and that is recorded."""
        s, count = self.settings, len(self.world.clients)
        rng = generator(s.seed, "clients", number)
        chosen = np.sort(rng.choice(count, max(1, int(count * s.participation + 1e-9)), replace=False))
        events = [{"client": int(c), "event": "has no data"} for c in chosen if not len(self.world.clients[c])]
        rule = keep_rule(s.keep_clients, "keep_clients")
        keep = rule is not None and (number == s.rounds if rule == 0 else number % rule == 0)
        fractions, lr = self.world.fractions(), lr_at(s, number)
        jobs = [
            Job(number, int(c), lr, float(fractions[c]), keep and self.folder is not None)
            for c in chosen
            if len(self.world.clients[c])
        ]
        return jobs, events

    def _aggregate(self, number: int, collected: _Collected) -> None:
        """Combine, let the methods' server step act, and commit: weights and client states change together."""
        part, method = self.layout.shared_trained, self.settings.method
        weights = self.weights[part].double()
        round = Round(
            number,
            collected.update(),
            weights,
            {k: v.mean() for k, v in collected.means.items()},
            {k: v.sum() for k, v in collected.sums.items()},
            self.server,
            collected.clients,
            len(self.world.clients),
            float(self.world.fractions()[sorted(collected.states)].sum()),
        )
        method.aggregate(round)
        moved = (weights + round.update).float()
        if not torch.isfinite(moved).all():
            kept = f" The state after round {self.round} is kept in {self.folder.path}." if self.folder else ""
            raise RunError(
                f"the server step of round {number} gave NaN or infinity; use a smaller learning rate.{kept}"
            )
        self.weights[part].copy_(moved)
        if collected.statistics.weight:
            self.weights[part.stop : self.layout.shared.stop].copy_(collected.statistics.mean())
        self.states |= collected.states
        self.visited |= set(collected.states)
        self.round = number

    def judged(self) -> Tensor:
        """The weights that are evaluated and kept as the model, in the order of the layout."""
        own = self.settings.method.evaluated(self.server)
        if own is None:
            return self.weights
        judged = self.weights.clone()
        judged[self.layout.shared_trained] = own.float()
        return judged

    def _reached(self) -> bool:
        s = self.settings
        return bool(
            s.stop_at_target
            and s.target is not None
            and any((line.get("accuracy") or 0) >= s.target for line in self.history)
        )

    # Records

    def _record(self, line: dict[str, Any], collected: _Collected) -> None:
        self.history.append(line)
        if self.folder is None:
            return
        self.folder.append(line)
        every = keep_rule(self.settings.keep, "keep")
        info = {"round": self.round, "method": str(self.settings.method)}
        if every and self.round % every == 0:
            self.folder.keep(self.round, self._named(self.judged()), info)
        for client, model in collected.models.items():
            self.folder.keep(self.round, self._named(model), info | {"client": client}, client=client)
        self._checkpoint()

    def _named(self, flat: Tensor) -> Tensors:
        return self.layout.views(flat)

    def _checkpoint(self, force: bool = False) -> None:
        """Save the state, unless saving would take more than its share of the time."""
        now = time.monotonic()
        early = now - self._save_time < self._save_cost / CHECKPOINT_SHARE
        if self.folder is None or self._saved == self.round or (early and not force):
            return
        tensors = {"weights": self.weights} | {f"server/{k}": v for k, v in self.server.items()}
        for client, state in self.states.items():
            tensors |= {f"client/{client}/{k}": v for k, v in state.items()}
        self.folder.checkpoint(self.round, tensors, {"visited": sorted(self.visited)})
        self._saved, self._save_time = self.round, time.monotonic()
        self._save_cost = self._save_time - now

    def _note(self, text: str, watch: Watcher) -> None:
        self.notes.append(text)
        watch.note(text)

    # The end

    def _finish(self, executor: Executor, judge: Judge) -> Result:
        exchanges = [self._exchange(name, executor, judge) for name, _ in self.settings.method.exchanges]
        tested = {}
        if self.settings.validation and self.settings.final_test:
            tested = judge.judge(self.judged(), self.states.get, part="test")
        result = Result.of(self.settings, self.history, exchanges, tested, self.notes)
        if self.folder:
            self._checkpoint(force=True)
            model = {k: v.clone() for k, v in self._named(self.judged()).items()}
            info = {"method": str(self.settings.method), "model": self.settings.model, "round": self.round}
            home = self._home_tensors()
            self.folder.finish(model | home, info, result.to_dict())
            result.folder = self.folder.path
        result.weights = {k: v.clone() for k, v in self._named(self.judged()).items()}
        return result

    def _home_tensors(self) -> Tensors:
        """The tensors that stayed with the clients, named ``client/3/stage1.1.weight``."""
        layout = self.layout
        named: Tensors = {}
        for client, state in sorted(self.states.items()):
            if "isofed.home" in state:
                trained, statistics = state["isofed.home"].split(
                    [layout.home_trained.stop - layout.home_trained.start,
                     layout.home_statistics.stop - layout.home_statistics.start]
                )  # fmt: skip
                views = layout.views(trained, layout.home_trained) | layout.views(statistics, layout.home_statistics)
                named |= {f"client/{client}/{k}": v for k, v in views.items()}
        return named

    def _exchange(self, name: str, executor: Executor, judge: Judge) -> dict[str, Any]:
        """Ask all clients one more question and let its method use the summed answers."""
        method = next(m for n, m in self.settings.method.exchanges if n == name)
        fractions, lr = self.world.fractions(), lr_at(self.settings, self.settings.rounds)
        jobs = [
            Job(self.settings.rounds + 1, c, lr, float(fractions[c]))
            for c, samples in enumerate(self.world.clients)
            if len(samples)
        ]
        total: Tensors = {}
        size = 0
        for answer in executor.answer(name, jobs, self.judged(), self.states.get):  # in a fixed order, so plain sums do
            for key, value in answer.items():
                total[key] = total[key] + value if key in total else value.clone()
                size += value.numel() * 4
        judged = self.judged().clone()
        method.finish(name, total, self.layout.views(judged))
        self.weights = judged
        return {"exchange": name, "bytes_up": size, **judge.judge(judged, self.states.get)}

    @contextmanager
    def _executor(self) -> Iterator[Executor]:
        s, kind = self.settings, self.settings.executor
        if kind == "auto":
            steps = s.rounds * sum(steps_of(len(c), s) for c in self.world.clients) * s.participation
            # Worker processes take seconds to start: not worth it for a small run, unless they are there already.
            worth = self._pool is not None or s.workers is not None or steps > WORTH_WORKERS
            kind = "workers" if worth and len(self.world.clients) > 1 and may_use_workers(s) else "serial"
        if kind == "serial":
            executor: Executor = Serial(self.world, self.device)
        else:
            if not portable(s.method):
                raise UserError(
                    f"the method '{s.method}' is a class of this session, which a worker process cannot import; "
                    "put it into a file and name it as file.py:Class, or use executor=serial"
                )
            pool = self._pool or Pool(min(s.workers or available_cores(), len(self.world.clients)))
            try:
                executor = Workers(self.world, pool, owns_pool=self._pool is None)
            except BaseException:
                if self._pool is None:
                    pool.close()
                raise
        try:
            yield executor
        finally:
            executor.close()


class _Collected:
    """What has come back in a round, summed so that the order of the clients does not matter."""

    def __init__(self, federation: Federation, jobs: list[Job]) -> None:
        self._world, self._layout = federation.world, federation.layout
        self._gathers = federation.settings.method.gathers
        self._asked, self._visited = jobs, federation.visited
        self._expected = sum(self._world.weight(j.client) for j in jobs) or 1.0
        self._mean = ExactSum(self._expected)
        self.statistics = ExactSum(self._expected)
        self.means: dict[str, ExactSum] = {}
        self.sums: dict[str, ExactSum] = {}
        self.states: dict[int, Tensors] = {}
        self.models: dict[int, Tensor] = {}
        self._updates: dict[int, Tensor] = {}
        self._loss = ExactSum(self._expected)
        self.clients = self._steps = self._samples = self._skipped = 0
        self._up = 0

    def add(self, outcome: Outcome) -> None:
        weight = self._world.weight(outcome.client)
        if self._gathers:
            self._updates[outcome.client] = outcome.update
        else:
            self._mean.add(outcome.update, weight)
        if outcome.statistics.numel():
            self.statistics.add(outcome.statistics, weight)
        for key, value in outcome.mean.items():
            self.means.setdefault(key, ExactSum(self._expected)).add(value, weight)
        for key, value in outcome.sum.items():
            self.sums.setdefault(key, ExactSum(len(self._asked))).add(value)
        if outcome.model is not None:
            self.models[outcome.client] = outcome.model
        self.states[outcome.client] = outcome.state
        if outcome.steps:
            self._loss.add(torch.tensor([outcome.loss]), weight)
        self.clients += 1
        self._steps += outcome.steps
        self._samples += outcome.samples
        self._skipped += outcome.skipped
        self._up += 4 * self._layout.count(Policy.SHARED) + self._size(outcome.mean) + self._size(outcome.sum)

    def update(self) -> Tensor:
        """The combined update, by the weighted mean or by the method that owns the combination."""
        if not self._gathers:
            return self._mean.mean()
        order = sorted(self._updates)
        weights = torch.tensor([self._world.weight(c) for c in order], dtype=torch.float64)
        updates = torch.stack([self._updates[c] for c in order])
        return self._world.settings.method.combine(updates, weights.to(updates.device)).double()

    def _size(self, tensors: Tensors) -> int:
        """Bytes on the wire; a vector over the shared weights travels without the gaps of the layout."""
        part = self._layout.shared_trained
        gaps = (
            part.stop
            - part.start
            - sum(e.size for e in self._layout.entries if e.trained and e.policy is Policy.SHARED)
        )
        return sum(
            (t.numel() - (gaps if t.numel() == part.stop - part.start else 0)) * min(t.element_size(), 4)
            for t in tensors.values()
        )

    def line(self, sent: Tensors) -> dict[str, Any]:
        """The part of a round's record that is about training."""
        pooled = self._world.settings.method.pooled
        shared, fixed = self._layout.count(Policy.SHARED), self._layout.count(Policy.FIXED)
        new = sum(1 for job in self._asked if job.client not in self._visited)
        down = 4 * (shared * len(self._asked) + fixed * new) + self._size(sent) * len(self._asked)
        return {
            "clients": self.clients,
            "local_loss": float(self._loss.mean()) if self._loss.weight else None,
            "steps": self._steps,
            "samples": self._samples,
            "skipped_batches": self._skipped,
            "bytes_up": 0 if pooled else self._up,
            "bytes_down": 0 if pooled else down,
        }


def may_use_workers(s: Settings) -> bool:
    """Whether clients of such a run could train in several processes of this machine."""
    if s.executor != "auto":
        return s.executor == "workers"
    return s.device == "cpu" and (s.workers or available_cores()) > 1 and portable(s.method)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UserError(f"there is no device '{text}'; use cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={text} needs a GPU that PyTorch can use, and there is none here; use device=cpu")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device={text} is not supported; use cpu or cuda")
    return device


@contextmanager
def _exact_arithmetic(s: Settings) -> Iterator[None]:
    """Switch on what precision and determinism ask of the GPU kernels, for the time of a run."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    matmul.allow_tf32 = cudnn.allow_tf32 = s.precision != "fp32"
    cudnn.deterministic, cudnn.benchmark = s.deterministic, False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before
