"""The round, written once: sample, send, train, collect, aggregate, evaluate, record."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from isofed import tracking
from isofed.collect import Collected
from isofed.config import Settings, keep_rule, lr_at
from isofed.config import settings as make_settings
from isofed.data import Dataset
from isofed.data.base import check_dataset
from isofed.draws import draw_clients, drawn
from isofed.engine.choose import device_of, exact_arithmetic, executor_for
from isofed.engine.exact import fits
from isofed.engine.replica import Job, one_thread
from isofed.engine.serial import Executor
from isofed.engine.workers import Pool
from isofed.engine.world import GIVEN, World, check_given
from isofed.errors import RunError
from isofed.evaluation import Judge
from isofed.layout import Layout, Policy, Tensors, constants
from isofed.memory import PeakMemory
from isofed.methods import Round
from isofed.noise import normal_at
from isofed.privacy import Account
from isofed.progress import Watcher
from isofed.questions import Questions
from isofed.recorder import Recorder
from isofed.records import RunFolder, environment
from isofed.result import Result, advised, rounds_to
from isofed.resuming import check_changes, check_config, check_data, check_files, check_rounds, moved
from isofed.store import Remembered
from isofed.traces import Elsewhere

if TYPE_CHECKING:
    from isofed.engine.ray_actors import Cluster

CHECKPOINT_SHARE = 0.05  # at most this part of the time goes into checkpoints


@dataclass(frozen=True)
class State:
    """Everything that a round changes. It is replaced as a whole, so an interruption leaves a whole one behind."""

    round: int
    weights: Tensor  # the server's, whole layout
    server: Tensors
    clients: Remembered  # what the clients visited so far remember


class Federation:
    """A federated run: settings in, a trained model and its record out.

    Settings are those of :class:`isofed.config.Settings`, by name. With ``out`` the run is recorded in that folder and
    can be resumed; without it nothing is written.

    >>> run = Federation(data="synthetic:samples=200,test=50", model="mlp", clients=2, partition="iid", rounds=1)
    >>> run.fit().rounds
    1

    Args:
        out: the run folder to make.
        dataset: data of your own; where ``data`` is given as well, it must name the same.
        pool: worker processes, or a cluster of Ray actors, to use when several runs share them.
        settings: everything else.
    """

    at_sites: ClassVar[bool] = False  # whether the clients' data lie elsewhere

    def __init__(
        self,
        *,
        out: str | Path | None = None,
        dataset: Dataset | None = None,
        pool: Pool | Cluster | None = None,
        **settings: Any,
    ) -> None:
        check_dataset(dataset)
        if dataset is not None and "data" not in settings:
            settings["data"] = f"{GIVEN}:{dataset.name}"
        checked = make_settings(settings)
        check_given(checked, dataset)
        self._begin(checked, dataset, pool, out)

    @classmethod
    def on(
        cls, dataset: Dataset, settings: Settings, *, pool: Pool | Cluster | None = None, out: str | Path | None = None
    ) -> Federation:
        """The run of settings on data that the caller has loaded for them."""
        run = cls.__new__(cls)
        run._begin(settings, dataset, pool, out)
        return run

    @classmethod
    def resume(
        cls, path: str | Path, *, dataset: Dataset | None = None, pool: Pool | Cluster | None = None, **changes: Any
    ) -> Federation:
        """Take up a run where its folder ends.

        Only how it is computed may change (executor, device and the like), where the data lie (root) and, where no
        learning rate depends on that, how many rounds it has: a finished run with more of them goes on, and becomes
        what it would have been with all from the start.
        """
        check_changes(path, changes)
        folder = RunFolder.open(path)
        run, root = cls.__new__(cls), changes.pop("root", None)
        run._prepare(make_settings((folder.config if run.at_sites else moved(folder, root)) | changes), dataset, pool)
        before = folder.config.get("rounds", run.settings.rounds)
        check_rounds(path, run.settings, before, len(folder.metrics()))
        run.folder, run._other_rounds = folder, run.settings.rounds != before
        tracking.check(run.settings.track, recorded=True)
        check_files(folder, run.settings)
        check_data(folder, run.world, "go on")
        return run

    def _begin(
        self, settings: Settings, dataset: Dataset | None, pool: Pool | Cluster | None, out: str | Path | None
    ) -> None:
        self._prepare(settings, dataset, pool)
        tracking.check(settings.track, out is not None)
        made_with = environment(str(self.device), self.world.fingerprint) | {"files": settings.files()}
        self.folder = RunFolder.create(out, settings.to_dict(), made_with) if out else None

    def _prepare(self, settings: Settings, dataset: Dataset | None, pool: Pool | Cluster | None) -> None:
        self.settings = settings
        self.device = device_of(settings.device)
        self.world = self._make_world(settings, dataset)
        self._account = Account.of(settings, len(self.world.clients))
        self._pool = pool
        network = self.world.network()
        self.layout = Layout.of(network, settings.method.share(network))
        self._constants = constants(network)
        context = self.world.context(self.layout, self.device)
        settings.method.client_state(context)  # if it is none, that is said before a folder is made
        weights = self.layout.pack(network, self.device)
        nothing = Remembered.nothing(len(self.world.clients), device=self.device)
        self.state = State(0, weights, settings.method.server_state(context), nothing)
        self.history: list[dict[str, Any]] = []
        self.diagnostics: list[dict[str, Any]] = []  # of the rounds that were diagnosed
        every = keep_rule(settings.diagnose, "diagnose")
        self._recorder = Recorder(self.world, self.layout, self.device, every) if every else None
        self.notes: list[str] = []
        self._other_rounds = False  # than the folder's configuration says
        self._saved, self._save_cost, self._save_time = 0, 0.0, 0.0

    def _make_world(self, settings: Settings, dataset: Dataset | None) -> World:
        return World.create(settings, dataset).checked()

    def _make_executor(self, watch: Watcher) -> AbstractContextManager[Executor]:
        return executor_for(self.world, self.device, self._pool, lambda text: self._note(text, watch))

    @property
    def round(self) -> int:
        """Rounds that are done."""
        return self.state.round

    def fit(self, watcher: Watcher | None = None) -> Result:
        """Run all rounds that are still missing, and give the result."""
        watch = watcher or Watcher()
        with self.folder.lock() if self.folder else nullcontext(), ExitStack() as open:
            if self.folder and not self._other_rounds and (done := self.folder.result()) is not None:
                return Result.from_dict(done, self.folder.metrics(), self.folder.path, self.folder.model())
            self._take_up(watch)
            if self.folder and self._other_rounds:  # and nothing speaks against it
                self.folder.change_rounds(self.settings.rounds)
                self._other_rounds = False
            if self.folder and self.round < self.settings.rounds:
                self.folder.forget_diagnosis()
            watch = open.enter_context(tracking.tracked(self, watch))
            watch.start(self)
            memory = PeakMemory(self.device)
            with exact_arithmetic(self.settings), self._make_executor(watch) as executor:
                judge = Judge(self.world, executor)
                try:
                    while self.round < self.settings.rounds and not self._reached():
                        self._one_round(executor, judge, watch)
                    result = self._finish(executor, judge, memory)
                except BaseException:
                    with suppress(RunError):  # what stopped the run is the better message
                        self._checkpoint(force=True)
                    raise
        watch.end(result)
        return result

    def _take_up(self, watch: Watcher) -> None:
        """Go back to the newest checkpoint of the folder; without one this object goes on from what it has."""
        if self.folder is None:
            return
        checkpoint = self.folder.latest()
        place = len(self.world.clients), self.folder.states, self.device
        if checkpoint is None:
            if (done := len(self.folder.metrics())) > max(1, self.round) and not self.round:
                self._note(f"the checkpoints of the {done} rounds that are recorded are gone: it begins again", watch)
            self.folder.rewind(self.round)
            if not self.round:
                self.state = replace(self.state, clients=Remembered.nothing(*place))
            return
        check_config(self.folder, self.settings, checkpoint.info.get("settings", {}))
        if checkpoint.note:
            self._note(checkpoint.note, watch)
        made_with = self.folder.environment
        here = environment(str(self.device), self.world.fingerprint)
        changed = [k for k in ("isofed", "torch", "numpy", "compiler") if made_with.get(k) != here[k]]
        if changed:
            self._note(f"resumed with another {', '.join(changed)}: the last bits of the result may differ", watch)
        saved = checkpoint.tensors
        if "clients/table" not in saved:
            raise RunError(f"the checkpoint in {self.folder.path} is of an older version of isofed; start a new run")
        if not _alike(saved.get("weights"), self.state.weights):
            raise RunError(f"the checkpoint in {self.folder.path} belongs to another network; start a new run")
        server = {k: v.to(self.device) for k, v in under("server/", saved).items()}
        if any(k not in server or server[k].shape != v.shape for k, v in self.state.server.items()):
            raise RunError(f"the checkpoint in {self.folder.path} belongs to another method; start a new run")
        clients = Remembered.restored(under("clients/", saved), *place)
        self.folder.rewind(checkpoint.round)
        self.state = State(checkpoint.round, saved["weights"].to(self.device), server, clients)
        self._saved, self.history = checkpoint.round, self.folder.metrics()
        if lost := sorted(set(range(1, checkpoint.round + 1)) - {line["round"] for line in self.history}):
            which = f"{lost[0]}" if len(lost) == 1 else f"{lost[0]} to {lost[-1]}"
            note = f"metrics.jsonl has lost {len(lost)} of the rounds {which}: times, traffic and the best accuracy"
            self._note(f"{note} of this run are those of the others alone", watch)
        self.diagnostics = self.folder.diagnostics()

    def _one_round(self, executor: Executor, judge: Judge, watch: Watcher) -> None:
        s, before, number = self.settings, self.state, self.state.round + 1
        began = time.perf_counter()
        jobs, events = self._sample(number)
        before.clients.expect([job.client for job in jobs])
        sent = s.method.send(before.server)
        collected, remembered = Collected(self.world, self.layout, jobs), before.clients.copy()
        for news in executor.train(jobs, before.weights, sent, before.clients.get):
            collected.add(news)
            if collected.events:
                before.clients.check()
            remembered.take(collected.states)
            watch.client(collected.answered, len(jobs))
        events += sorted(collected.events, key=lambda event: event["client"])
        skipped = self._too_few(number, collected, events)
        after = replace(before, round=number) if skipped else self._aggregate(number, collected, remembered)
        line: dict[str, Any] = {"round": number, "lr": lr_at(s, number), **collected.line(sent, before.clients)}
        if skipped:
            line |= {"clients": 0, "skipped": skipped}
        line["seconds"] = time.perf_counter() - began
        if self._account:
            line["epsilon"] = self._account.epsilon(number)
        if number % s.evaluate_every == 0 or number == s.rounds:
            began = time.perf_counter()
            line |= judge.judge(self._judged(after), after.clients.get)
            line["evaluate_seconds"] = time.perf_counter() - began
        line["events"] = sorted(events, key=lambda event: event["client"])
        diagnosis = self._diagnosis(before, after, collected.models)
        self._record(line, after, collected.models)
        self.history.append(line)
        self.diagnostics += [diagnosis] if diagnosis else []
        self.state = after
        self._checkpoint()
        watch.round(line)
        if diagnosis:
            watch.diagnosis(diagnosis)

    def _too_few(self, number: int, collected: Collected, events: list[dict[str, Any]]) -> str | None:
        """Why a round must be skipped, if it must. Here one good update is enough, and without any a run ends."""
        if not collected.clients:
            why = f": client {events[0]['client']} {advised(events[0]['event'].rstrip('.'))}" if events else ""
            said = f"round {number} has no client left to average{why}.{self._kept()}"
            raise RunError(said) from Elsewhere.of(collected.trace)
        return None

    def _sample(self, number: int) -> tuple[list[Job], list[dict[str, Any]]]:
        """The clients of a round; those without data are left out, and that is recorded."""
        s, count = self.settings, len(self.world.clients)
        chosen = draw_clients(s.seed, number, count, s.participation)
        events = [{"client": int(c), "event": "has no data"} for c in chosen if not len(self.world.clients[c])]
        clients = [int(c) for c in chosen if len(self.world.clients[c])]
        wanted = self._recorder.wanted(number, clients) if self._recorder else set()
        if self._keeps_clients(number):
            wanted = set(clients)
        fractions, lr = self.world.fractions(), lr_at(s, number)
        return [Job(number, c, lr, float(fractions[c]), c in wanted) for c in clients], events

    def _keeps_clients(self, number: int) -> bool:
        """Whether the clients' models of a round are written into the folder."""
        rule = keep_rule(self.settings.keep_clients, "keep_clients")
        if rule is None or self.folder is None:
            return False
        return number == self.settings.rounds if rule == 0 else number % rule == 0

    def _diagnosis(self, before: State, after: State, models: dict[int, Tensor]) -> dict[str, Any] | None:
        """Measure a round whose turn it is, and write that down."""
        if self._recorder is None or after.round % self._recorder.every:
            return None
        line = self._recorder.line(after.round, self._judged(after), before.weights, models)
        if self.folder:
            self.folder.diagnose(line)
        return line

    def _aggregate(self, number: int, collected: Collected, remembered: Remembered) -> State:
        """Combine the answers and let the methods' server step act; the present state stays as it is."""
        part, before, s = self.layout.shared_trained, self.state, self.settings
        update, statistics = collected.combined(before.weights[self.layout.shared])
        round = Round(
            number,
            update,
            before.weights[part].double(),
            {k: v.mean() for k, v in collected.means.items()},
            {k: v.sum() for k, v in collected.sums.items()},
            {k: v.clone() for k, v in before.server.items()},
            collected.clients,
            len(self.world.clients),
            float(self.world.fractions()[sorted(remembered.taken)].sum()),
            drawn(len(self.world.clients), s.participation),
            normal_at(self.layout, self.device, s.seed, number),
            s.method.bound,
            self.layout.named,
        )
        with one_thread(self.device):  # sums over many numbers: with two the last bit may be another
            s.method.aggregate(round)
        weights = before.weights.clone()
        weights[part] = (round.weights + round.update).float()
        weights[part.stop : self.layout.shared.stop] = statistics.float()
        if not fits(weights, *round.server.values()):
            raise RunError(
                f"the server step of round {number} gave NaN or numbers out of range; "
                f"use a smaller learning rate.{self._kept()}"
            )
        return State(number, weights, round.server, remembered)

    def _kept(self) -> str:
        if not self.folder or not self.round:
            return ""
        return f" The state after round {self.round} is kept in {self.folder.path}."

    def _judged(self, state: State) -> Tensor:
        """The weights that are evaluated and kept as the model, in the order of the layout."""
        part = self.layout.shared_trained
        own = self.settings.method.evaluated(state.server, state.weights[part].shape)
        if own is None:
            return state.weights
        judged = state.weights.clone()
        judged[part] = own.float()
        return judged

    def _reached(self) -> bool:
        return self.settings.stop_at_target and rounds_to(self.history, self.settings.target) is not None

    def _record(self, line: dict[str, Any], state: State, models: dict[int, Tensor]) -> None:
        """Write a round down, before it counts: what is written too early is rewound on resuming."""
        if self.folder is None:
            return
        self.folder.append(line)
        every = keep_rule(self.settings.keep, "keep")
        info = self._about(state)
        if every and state.round % every == 0:
            self.folder.keep(state.round, self._named(self._judged(state)), info)
        for client, model in models.items() if self._keeps_clients(state.round) else ():
            self.folder.keep(state.round, self._named(model), info | {"client": client}, client=client)

    def _named(self, model: Tensor) -> Tensors:
        """All tensors of a model by name."""
        return self.layout.views(model) | self._constants

    def _about(self, state: State) -> dict[str, Any]:
        """What the network of some weights can be built again from, and fed with (``isofed.models.load``)."""
        s, data = self.settings, self.world.dataset
        how = {"method": s.method.to_yaml(), "model": s.model, "norm": s.norm}
        pictures = {"shape": data.shape, "mean": data.mean, "std": data.std}
        return how | pictures | {"classes": data.classes, "round": state.round}

    def _checkpoint(self, force: bool = False) -> None:
        """Save the state, unless saving would take more than its share of the time."""
        now, state = time.monotonic(), self.state
        early = now - self._save_time < self._save_cost / CHECKPOINT_SHARE
        if self.folder is None or self._saved == state.round or (early and not force):
            return
        tensors = {"weights": state.weights} | {f"server/{k}": v for k, v in state.server.items()}
        with state.clients.saving() as index:
            tensors |= {f"clients/{k}": v for k, v in index.items()}
            self.folder.checkpoint(state.round, tensors, {"settings": self.settings.to_dict()})
        self._saved, self._save_time = state.round, time.monotonic()
        self._save_cost = self._save_time - now

    def _note(self, text: str, watch: Watcher) -> None:
        self.notes.append(text)
        watch.note(text)

    def _finish(self, executor: Executor, judge: Judge, memory: PeakMemory) -> Result:
        """Ask the last questions, look at the test part if that was put off, and sum up."""
        model, clients = self._judged(self.state), self.state.clients
        exchanges = []
        questions = Questions(self.world, self.layout, self.device)
        sent = self.settings.method.send(self.state.server)
        for name, method in self.settings.method.exchanges:
            model, line = questions.ask(name, method, model, sent, clients.get, executor)
            if not fits(model):
                raise RunError(f"'{name}' after the last round gave NaN or numbers out of range.{self._kept()}")
            exchanges.append(line | judge.judge(model, clients.get))
        tested = {}
        if self.settings.validation and self.settings.final_test:
            tested = judge.judge(model, clients.get, part="test")
        result = Result.of(self.settings, self.history, exchanges, tested, self.notes)
        result.peak_memory, result.executor = memory.bytes(), executor.shown
        result.weights = {k: v.clone() for k, v in self._named(model).items()}
        result.privacy = self._account.statement(result.rounds) if self._account else None
        if self.folder:
            self._checkpoint(force=True)
            self.folder.finish(result.weights | self._home_tensors(), self._about(self.state), result.to_dict())
            result.folder = self.folder.path
        return result

    def _home_tensors(self) -> Tensors:
        """The tensors that stayed with the clients, named ``client/3/stages.stage1.1.weight``."""
        trained, statistics = self.layout.home_trained, self.layout.home_statistics
        named: Tensors = {}
        if not self.layout.count(Policy.HOME):
            return named
        for client, state in self.state.clients.items():
            if "isofed.home" in state:
                pieces = state["isofed.home"].split([part.stop - part.start for part in (trained, statistics)])
                views = self.layout.views(pieces[0], trained) | self.layout.views(pieces[1], statistics)
                named |= {f"client/{client}/{k}": v for k, v in views.items()}
        return named


def _alike(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape and one.dtype == other.dtype


def under(prefix: str, tensors: Tensors) -> Tensors:
    """Those whose names start like this, without it."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
