"""What this machine does, here and now: local steps a second of each executor, and of a bare PyTorch loop.

The bare loop is what one would write by hand: the pictures on the device as normalised floats, channels-last,
``torch.optim.SGD``, autocast where the precision is bf16; no clients, no method, no augmentation. isofed's time
includes all of a visit: arrival, plan, steps and what is sent back. Executors are set up, and captured, before the
clock starts, and that time is a column of its own. All take turns, so that a slow moment of the machine hits all.

On a processor the bare loop runs on one thread, as ``serial`` does, and on a thread for every core that this process
may use, which is what the worker processes, of one thread each, get together. More threads are not always faster, least
of all on a busy machine, and who writes a loop by hand is free to choose: ratios are to the faster of the two.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn.functional import cross_entropy

from isofed import spec
from isofed.config import Settings, read_words, settings
from isofed.data import load
from isofed.display import Clock, show_table, simple_table
from isofed.engine.choose import available_cores, device_of, exact_arithmetic, executor_for
from isofed.engine.lane import OutOfMemory, synchronize
from isofed.engine.replica import Job, Outcome
from isofed.engine.slots import Slots
from isofed.engine.step import Pictures
from isofed.engine.workers import Workers
from isofed.engine.world import World
from isofed.errors import RunError, UserError, unknown
from isofed.files import write_atomic
from isofed.layout import Layout, Tensors
from isofed.models import create
from isofed.models.dropout import Dropout
from isofed.records import environment
from isofed.words import many

CLIENTS, STEPS = 64, 32  # in a round: the most clients, and the most steps of each
SECONDS = 1.0  # that one measurement takes, about
MODELS = {"cpu": "cnn,resnet20", "cuda": "pfl-cnn,resnet56,mobilenetv2,resnet18"}
OWN = ("models", "repeats", "json")
TAKES = (  # of the settings: the others are about data, rounds and records, of which there are none here
    *("model", "norm", "method", "augment", "batch_size", "lr", "momentum", "nesterov", "persistent_momentum"),
    *("weight_decay", "clip", "seed", "device", "executor", "workers", "slots", "precision", "deterministic"),
)
_COMMON: dict[str, Any] = {
    "partition": "iid",
    "batch_size": 64,
    "lr": 0.01,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "rounds": 1000,  # so that as many slots are made as a long run would
}
_UNITS = {"serial": "stream", "slots": "slot", "workers": "worker"}

Tell = Callable[[], None]  # hears that one more piece of the work is done


def chosen(
    clients: int = CLIENTS, samples: int = 512, steps: int = STEPS, size: int = 32, classes: int = 10, **more: Any
) -> Settings:
    """The settings of a federation to measure, with ``samples`` made-up pictures at each client."""
    count = max(10, clients * samples)
    data = f"synthetic:samples={count},test=512,size={size},channels=3,classes={classes}"
    return settings(_COMMON | {"data": data, "clients": clients, "local_steps": steps} | more)


def bare_loop(world: World) -> Callable[..., float]:
    """A function that takes some steps, on a processor with some threads, and gives steps a second."""
    s, device = world.settings, torch.device(world.settings.device)
    pictures = Pictures(world.parts["train"], world.dataset, device)
    inputs = pictures.normalised(pictures.images)
    network = world.network().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in network.modules():  # PyTorch's own dropout, which draws by itself
        for name, layer in module.named_children():
            if isinstance(layer, Dropout):
                setattr(module, name, torch.nn.Dropout(layer.p))
    optimiser = torch.optim.SGD(
        network.parameters(), lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay, nesterov=s.nesterov
    )
    order = torch.randperm(len(inputs), device=device)

    def run(steps: int, threads: int | None = None) -> float:
        with _threads(threads):
            synchronize(device)
            began = time.perf_counter()
            for step in range(steps):
                start = step * s.batch_size % (len(order) - s.batch_size)
                index = order[start : start + s.batch_size]
                optimiser.zero_grad()
                with torch.autocast(device.type, torch.bfloat16) if s.precision == "bf16" else nullcontext():
                    loss = cross_entropy(network(inputs[index]).logits.float(), pictures.labels[index])
                loss.backward()
                if s.clip is not None:
                    torch.nn.utils.clip_grad_norm_(network.parameters(), s.clip)
                optimiser.step()
            synchronize(device)
            return steps / (time.perf_counter() - began)

    return run


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Compute on so many threads, or on as many as ever."""
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Federated:
    """Rounds of visits on the executor that the settings ask for, from the same weights each time."""

    def __init__(self, world: World, clients: int = CLIENTS) -> None:
        began, self._device = time.perf_counter(), torch.device(world.settings.device)
        self.notes: list[str] = []
        self._open = ExitStack()
        self.executor = self._open.enter_context(executor_for(world, self._device, None, self.notes.append))
        try:
            self._method, self._fractions, self._lr = world.settings.method, world.fractions(), world.settings.lr
            self._model, network = world.settings.model, world.network()
            layout = Layout.of(network, self._method.share(network))
            self._weights = layout.pack(network, self._device)
            self._server = self._method.server_state(world.context(layout, self._device))
            self._states: dict[int, Tensors] = {}
            self._number, self.clients = 0, clients
            self()  # makes the slots
        except BaseException:
            self.close()
            raise
        self.seconds = time.perf_counter() - began

    @property
    def count(self) -> int:
        """Clients that are trained side by side."""
        if isinstance(self.executor, Slots):
            return len(self.executor.slots)
        return len(self.executor.pool.processes) if isinstance(self.executor, Workers) else 1

    def __call__(self) -> float:
        """One round; steps a second."""
        self._number += 1
        clients = range(min(self.clients, len(self._fractions)))
        jobs = [Job(self._number, c, self._lr, float(self._fractions[c])) for c in clients]
        synchronize(self._device)
        began = time.perf_counter()
        steps, new = 0, {}
        for outcome in self.executor.train(jobs, self._weights, self._method.send(self._server), self._states.get):
            assert isinstance(outcome, Outcome)
            if outcome.problem is not None:
                raise RunError(f"'{self._model}' cannot be measured: client {outcome.client} {outcome.problem}")
            steps += outcome.steps
            new[outcome.client] = outcome.state
        synchronize(self._device)
        self._states |= new
        return steps / (time.perf_counter() - began)

    def close(self) -> None:
        """Give memory and processes back."""
        self._open.close()


@dataclass
class Row:
    """One way to train a network; the numbers are one for each repeat."""

    model: str
    way: str
    count: int  # threads, streams, slots or worker processes
    unit: str
    setup_seconds: float | None = None
    steps_per_second: list[float] = field(default_factory=list)
    images_per_second: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # to the faster bare loop, repeat by repeat
    notes: list[str] = field(default_factory=list)


def executors(s: Settings) -> list[str]:
    """Those to measure: the one that is asked for, or those that suit the device."""
    if s.executor == "auto":
        return ["serial", "workers" if s.device == "cpu" else "slots"]
    return [s.executor]


def threads(s: Settings) -> list[int | None]:
    """Those of the bare loop."""
    return [*dict.fromkeys([available_cores(), 1])] if s.device == "cpu" else [None]


def measurements(s: Settings, repeats: int) -> int:
    """How often :func:`measure` tells that a piece of the work is done."""
    return (repeats + 1) * (len(threads(s)) + len(executors(s)))


def measure(world: World, repeats: int, tell: Tell = lambda: None) -> list[Row]:
    """The bare loop and each executor on one network, in turns."""
    s = world.settings
    rows: list[Row] = []
    runs: list[Callable[[], float]] = []
    with exact_arithmetic(s), ExitStack() as all_open:
        bare, length = bare_loop(world), 0
        for n in threads(s):
            length = _length(partial(bare, threads=n))
            rows.append(Row(s.model, "bare", n or 1, "thread" if n else "stream"))
            runs.append(partial(bare, length, n))
            tell()
        steps = max(2, min(STEPS, length // 2))  # two visits of one after another take as long
        for kind in executors(s):
            own = {"executor": kind, "local_steps": steps} | ({} if kind == "slots" else {"slots": None})
            run = Federated(replace(world, settings=settings(s.to_dict() | own)), clients=1)
            all_open.enter_context(closing(run))
            run.clients = 2 * run.count
            run.clients = run.count * max(2, round(run() * SECONDS / steps / run.count))
            unit = "thread" if kind == "serial" and s.device == "cpu" else _UNITS[kind]
            rows.append(Row(s.model, kind, run.count, unit, run.seconds, notes=run.notes))
            runs.append(run)
            tell()
        for _ in range(repeats):
            for row, run_once in zip(rows, runs, strict=True):
                rate = run_once()
                row.steps_per_second.append(rate)
                row.images_per_second.append(rate * s.batch_size)
                tell()
    base = max((row for row in rows if row.way == "bare"), key=lambda row: statistics.median(row.steps_per_second))
    for row in rows:
        row.ratios = [a / b for a, b in zip(row.steps_per_second, base.steps_per_second, strict=True)]
    return rows


def _length(run: Callable[[int], float]) -> int:
    """The steps that one measurement takes, found by trying."""
    run(3)  # warms up
    steps = 2
    while (rate := run(steps)) * SECONDS > 4 * steps:
        steps *= 4
    return max(2, round(rate * SECONDS))


def spread(values: list[float], digits: int = 1) -> str:
    """The median with the range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


# --- the command


def bench(console: Console, words: Sequence[str]) -> None:
    """Measure some networks and show a table."""
    values = read_words(words)
    repeats = spec.convert(values.pop("repeats", 3), int, "repeats")
    if repeats < 1:
        raise UserError(f"repeats must be at least 1, not {repeats}")
    file = _writable(values.pop("json", None))
    worlds = _worlds(values)
    s = worlds[0].settings
    about = environment(s.device, "") | {"cores": available_cores()}
    where = f"{about['device_name']}, {many(available_cores(), 'core')}" if s.device == "cpu" else about["device_name"]
    said = f"{where}, torch {about['torch']}, {s.precision}, batch {s.batch_size}, pictures of 32 x 32 x 3"
    console.print(said, highlight=False, markup=False)
    rows = _measure_all(console, worlds, repeats)
    _print(console, rows, repeats)
    if file:
        used = {key: value for key, value in s.to_dict().items() if key in TAKES and key != "model"}
        record = {"environment": about, "settings": used, "repeats": repeats, "rows": [asdict(row) for row in rows]}
        write_atomic(file, (json.dumps(record, indent=2) + "\n").encode())
        console.print(f"all numbers are in {file}", highlight=False, markup=False)


def _is_ours(file: Path) -> bool:
    """Whether a file holds an earlier measurement, which a new one may replace."""
    try:
        held = json.loads(file.read_text(encoding="utf-8") or "{}")
    except (OSError, ValueError):
        return False
    return isinstance(held, dict) and (not held or {"environment", "repeats", "rows"} <= held.keys())


def _writable(given: Any) -> Path | None:
    """The file to write, if that will be possible."""
    if given is None:
        return None
    file = Path(str(given)).expanduser()
    if file.suffix.lower() != ".json" or file.is_dir():
        raise UserError(f"json={given} is not possible: it must name a .json file, as in json=bench.json")
    if file.exists() and not _is_ours(file):
        raise UserError(f"json={given} is not possible: that file holds something else, which would be lost")
    if not file.parent.is_dir():
        raise UserError(f"json={given} is not possible: there is no folder {file.parent}")
    if not os.access(file.parent, os.W_OK):
        raise UserError(f"json={given} is not possible: the folder {file.parent} is not writable")
    return file


def _worlds(values: dict[str, Any]) -> list[World]:
    """One for each network, all with the same clients; what is wrong with any of them is said here."""
    for key in values:
        if key not in (*TAKES, *OWN):
            if key not in Settings.model_fields:
                raise unknown("setting", key, [*TAKES, *OWN])
            takes = ", ".join(TAKES + OWN)
            raise UserError(
                f"{key} means nothing to bench, which brings its own clients and pictures; it takes {takes}"
            )
    if "models" in values and "model" in values:
        raise UserError("model and models exclude each other; give one of them")
    device = device_of(str(values.get("device") or _best_device()))
    values["device"] = "cpu" if device.type == "cpu" else str(device)
    given = values.pop("models", None) or values.pop("model", None) or MODELS[device.type]
    names = [str(name).strip() for name in (given if isinstance(given, list) else str(given).split(","))]
    s = chosen(**values)
    if s.executor == "ray":
        raise UserError("bench measures this machine alone; use executor=serial, workers or slots, or leave it out")
    # Two visits for each of those side by side, and nothing but full batches.
    clients = max(CLIENTS, 2 * (s.slots or s.workers or available_cores()))
    every = [chosen(clients, 2 * s.batch_size, model=name, **values) for name in dict.fromkeys(names)]
    for one in every:
        create(one.model, classes=10, shape=(3, 32, 32), norm=one.norm)
    dataset = load(every[0].data)
    return [World.create(one, dataset) for one in every]


def _best_device() -> str:
    try:
        device_of("cuda")
    except UserError:
        return "cpu"
    return "cuda"


def _measure_all(console: Console, worlds: Sequence[World], repeats: int) -> list[Row]:
    """All networks: a bar with the time left on a terminal, elsewhere a line for each when it is done."""
    rows: list[Row] = []
    total, clock = len(worlds) * measurements(worlds[0].settings, repeats), Clock()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        for done, world in enumerate(worlds, 1):
            model = world.settings.model
            bar.update(task, description=escape(model))
            try:
                found = measure(world, repeats, partial(bar.advance, task))
            except OutOfMemory:
                raise RunError(f"the GPU has not enough memory for '{model}'; use a smaller batch_size") from None
            rows += found
            for note in dict.fromkeys(note for row in found for note in row.notes):
                console.print(f"note: {model}: {note}", highlight=False, markup=False)
            if not console.is_terminal:
                left = clock.left(done, len(worlds))
                console.print(f"[{done}/{len(worlds)}] {model}  {left} left", highlight=False, markup=False)
    return rows


def _print(console: Console, rows: Sequence[Row], repeats: int) -> None:
    table = simple_table("model", "loop", "steps/s", "images/s", "ratio", "set-up s")
    table.columns[1].justify = "left"
    wide = console.width >= 100  # rather no range than a number cut off
    for n, row in enumerate(rows):
        first, count = not n or rows[n - 1].model != row.model, many(row.count, row.unit)
        table.add_row(
            escape(row.model) if first else "",
            count if row.way.startswith(row.unit) else f"{row.way}, {count}",
            spread(row.steps_per_second) if wide else f"{statistics.median(row.steps_per_second):.1f}",
            f"{statistics.median(row.images_per_second):,.0f}",
            "1" if set(row.ratios) == {1.0} else spread(row.ratios, 2),
            "" if row.setup_seconds is None else f"{row.setup_seconds:.1f}",
        )
    console.print()
    show_table(console, table)
    console.print(
        f"\nMedian (range) of {many(repeats, 'repeat')} in turns. 'bare' is a plain PyTorch loop without a federation; "
        "ratios are to the fastest of those, and above 1 is faster. Set-up comes once in a run.",
        highlight=False,
    )
