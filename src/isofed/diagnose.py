"""Diagnostics after a run, on the models that it kept: what ``isofed diagnose`` does."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from torch import Tensor

from isofed import __version__, diagnostics, spec
from isofed.config import is_setting
from isofed.config import settings as make_settings
from isofed.diagnostics.bought import bought
from isofed.diagnostics.cost import cost, pass_macs
from isofed.display import Clock, simple_table
from isofed.engine.choose import device_of
from isofed.engine.replica import one_thread
from isofed.engine.world import World
from isofed.errors import RunError, UserError, unknown
from isofed.federation import check_files
from isofed.files import load_tensors, plain
from isofed.layout import Layout, Tensors
from isofed.probe import AT_ONCE, Probe
from isofed.recorder import evenly, short
from isofed.records import MODEL, Kept, RunFolder
from isofed.report.gather import run_folders

Tell = Callable[[int, int], None]  # is told how much of a section is done, and of how much at most
_LISTED = 300  # clients whose labels are written down
_DOTS = 1000  # of a t-SNE
_PRODUCT = 4  # passes that a product with the Hessian takes, about
_SECONDS = {"cost": 2.0, "tsne": 4.0}  # that sections take besides passes, about
_SMALL = 2e9  # multiply-accumulates of a pass up to which several threads only get in each other's way


@dataclass(frozen=True)
class Options:
    """What to measure, and how closely."""

    only: tuple[str, ...] = ()
    samples: int = 512  # of the data, at most
    probes: int = 64  # of the Hessian, at most, for its trace and its diagonal
    points: int = 21  # of the landscape, in each direction
    clients: int = 5  # whose curvature and features are looked at, where their models were kept
    device: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, str]) -> Options:
        """From ``key=value`` words."""
        made = cls()
        names = [f.name for f in fields(cls)]
        for key, text in values.items():
            if key not in names:
                raise unknown("option of diagnose", key, names)
            if key == "device":
                made = replace(made, device=text)
            elif key == "only":
                chosen = tuple(word.strip() for word in text.split(",") if word.strip())
                for word in chosen:
                    if word not in SECTIONS:
                        raise unknown("diagnostic", word, SECTIONS)
                made = replace(made, only=chosen)
            else:
                number = spec.convert(text, int, key)
                if number < (2 if key in ("samples", "points") else 1):
                    raise UserError(f"{key}={text} is too few")
                made = replace(made, **{key: number})
        return made

    @property
    def sections(self) -> list[str]:
        return [name for name in SECTIONS if not self.only or name in self.only]


@dataclass(frozen=True)
class Model:
    """Weights of a run, in the order of its layout: the shared ones of a round, or a client's own."""

    round: int
    client: int | None
    weights: Tensor


class Diagnosis:
    """One run and what can be measured on it."""

    def __init__(self, path: str | Path, options: Options) -> None:
        self.folder, self.options = RunFolder.open(path), options
        self.settings = make_settings(self.folder.config)
        self.device = self._device()
        self.world = World.create(self.settings)
        check_files(self.folder, self.settings)
        if self.folder.environment.get("data") != self.world.dataset.fingerprint:
            raise UserError(f"the data of the run {path} have changed since it was made, so it cannot be diagnosed")
        network = self.world.network()
        self.layout = Layout.of(network, self.settings.method.share(network))
        self.history = self.folder.metrics()
        last = self.history[-1]["round"] if self.history else 0
        self._kept = [one for one in self.folder.kept() if one.round <= last]

    def _device(self) -> torch.device:
        if self.options.device is None and not torch.cuda.is_available():
            return torch.device("cpu")
        return device_of(self.options.device or self.settings.device)

    def _load(self, tensors: Tensors) -> Tensor:
        flat = torch.zeros(self.layout.total)
        for name, view in self.layout.views(flat).items():
            if name not in tensors or tensors[name].shape != view.shape:
                raise RunError(f"a model in {self.folder.path} belongs to another network")
            view.copy_(tensors[name])
        return flat.to(self.device)

    @cached_property
    def final(self) -> Model:
        """The final model; of a run that goes on, its newest state."""
        if (self.folder.path / MODEL).exists():
            tensors, info = load_tensors(self.folder.path / MODEL)
            # Of what stays at home with the clients there is no global one: that of the first client is taken.
            first = min((int(k.split("/")[1]) for k in tensors if k.startswith("client/")), default=None)
            prefix = f"client/{first}/"
            own = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            return Model(int(info["round"]), None, self._load(tensors | own))
        checkpoint = self.folder.latest()
        if checkpoint is None or checkpoint.tensors["weights"].shape != (self.layout.total,):
            raise UserError(f"the run {self.folder.path} has no model yet")
        return Model(checkpoint.round, None, checkpoint.tensors["weights"].to(self.device))

    def kept(self, clients: bool) -> Iterator[Model]:
        """The models that were kept, one after another."""
        for one in self._kept:
            if (one.client is not None) == clients:
                yield Model(one.round, one.client, self._load(load_tensors(one.path)[0]))

    @cached_property
    def local(self) -> list[Model]:
        """Clients' own models of the last round in which they were kept; an even selection of many."""
        return [Model(one.round, one.client, self._load(load_tensors(one.path)[0])) for one in self._local]

    @cached_property
    def _local(self) -> list[Kept]:
        own = [one for one in self._kept if one.client is not None]
        last = [one for one in own if one.round == own[-1].round]
        return [last[i] for i in evenly(range(len(last)), self.options.clients)]

    @cached_property
    def test(self) -> Probe:
        part = "validation" if self.settings.validation and not self.settings.final_test else "test"
        return Probe(self.world, self.layout, self.device, part, self.options.samples)

    @cached_property
    def train(self) -> Probe:
        return Probe(self.world, self.layout, self.device, "train", self.options.samples)

    def seconds(self, section: str, a_pass: float) -> float:
        """About how long a section takes, if a pass over the sample takes so long."""
        o, local = self.options, len(self._local)
        passes = {
            "spectra": 1 + sum(one.client is None for one in self._kept) + local,
            "curvature": _PRODUCT * (100 + o.probes * (1 + (local if local > 1 else 0))),
            "landscape": _PRODUCT * 100 + o.points**2,
        }
        return _SECONDS.get(section, 0.0) + a_pass * passes.get(section, 1)

    @cached_property
    def a_pass(self) -> float:
        """Seconds of a pass over the sample."""
        with self._threads():
            for _ in range(2):  # the first one sets things up
                began = time.perf_counter()
                self.train.look(self.final.weights)
        return time.perf_counter() - began

    def _threads(self) -> AbstractContextManager[None]:
        small = pass_macs(self.world.network()) * min(self.options.samples, AT_ONCE) < _SMALL
        return one_thread(self.device) if small else nullcontext()

    def measure(self, section: str, tell: Tell = lambda done, of: None) -> Any:
        """One section of the diagnosis; empty where the run has not kept what it needs."""
        with self._threads():
            return SECTIONS[section](self, tell)

    def spectra(self, tell: Tell) -> dict[str, Any]:
        by_round = {model.round: model for model in self.kept(clients=False)} | {self.final.round: self.final}
        found, of = [], len(by_round) + len(self.local)
        values = {}
        for model in by_round.values():
            line = self._spectra(model)
            values[model.round] = line.pop("values")
            found.append(line)
            tell(len(found), of)
        for model in self.local:
            line = self._spectra(model)
            theirs = line.pop("values")
            if model.round in values:
                line["gap"] = diagnostics.spectrum_gap([theirs], values[model.round])
            found.append(line)
            tell(len(found), of)
        return {"part": self.test.part, "samples": len(self.test.index), "models": found}

    def _spectra(self, model: Model) -> dict[str, Any]:
        features, _ = self.test.look(model.weights)
        spectrum = diagnostics.representation_spectrum(features)
        line: dict[str, Any] = {
            "round": model.round,
            "client": model.client,
            "representation_spectrum": short(spectrum.values),
            "representation_effective_rank": spectrum.effective_rank,
            "significant": diagnostics.significant(spectrum.values),
            "singular_spread": diagnostics.singular_spread(features),
        }
        if (head := self.test.head(model.weights)) is not None:
            classifier = diagnostics.classifier_spectrum(head)
            line["classifier_spectrum"] = short(classifier.values)
            line["classifier_effective_rank"] = classifier.effective_rank
        return line | {"values": spectrum.values}

    def alignment(self, tell: Tell) -> list[dict[str, Any]]:
        heads: dict[int, list[Tensor]] = {}
        for model in self.kept(clients=True):
            if (head := self.test.head(model.weights)) is not None:
                heads.setdefault(model.round, []).append(head.clone())
        several = {number: rows for number, rows in heads.items() if len(rows) > 1}
        return [
            {"round": number, "clients": len(rows), **diagnostics.classifier_alignment(rows)._asdict()}
            for number, rows in several.items()
        ]

    def curvature(self, tell: Tell) -> dict[str, Any]:
        network, data, probes = self.train.network, (self.train.inputs, self.train.labels), self.options.probes
        self.train.bind(self.final.weights)
        several = self.local if len(self.local) > 1 else []
        of = 100 + probes * (1 + len(several))
        top = diagnostics.hessian_top_eigenvalues(network, data, 2, progress=_part(tell, 0, 100, of))
        trace = diagnostics.hessian_trace(network, data, probes=probes, progress=_part(tell, 100, probes, of))
        found: dict[str, Any] = {
            "round": self.final.round,
            "part": "train",
            "samples": len(self.train.index),
            "eigenvalues": top.values,
            "eigenvalue_errors": top.errors,
            "trace": trace.value,
            "trace_error": trace.error,
            "probes": trace.probes,
        }
        diagonals = []
        for place, model in enumerate(several, 1):
            self.train.bind(model.weights)
            progress = _part(tell, 100 + place * probes, probes, of)
            diagonals.append(diagnostics.hessian_diagonal(network, data, probes=probes, progress=progress))
        if diagonals:
            whole = diagnostics.hessian_match([d.values for d in diagonals])
            traces = diagnostics.hessian_match([d.traces for d in diagonals])
            found["clients"] = {
                "clients": [model.client for model in self.local],
                "round": self.local[0].round,
                "H_N": whole.norm,
                "H_D": whole.direction,
                "H_N_traces": traces.norm,
                "H_D_traces": traces.direction,
                "error": max(d.error for d in diagonals),
            }
        return found

    def calibration(self, tell: Tell) -> dict[str, Any]:
        _, logits = self.test.look(self.final.weights)
        found = diagnostics.calibration(logits.softmax(1), self.test.labels)
        return {"part": self.test.part, "samples": len(self.test.index), **found._asdict()}

    def landscape(self, tell: Tell) -> dict[str, Any]:
        self.train.bind(self.final.weights)
        network, data = self.train.network, (self.train.inputs, self.train.labels)
        of = 100 * _PRODUCT + self.options.points**2
        top = diagnostics.hessian_top_eigenvalues(network, data, 2, progress=lambda n, _: tell(_PRODUCT * n, of))
        made = diagnostics.loss_landscape(
            network,
            data,
            list(top.vectors),
            points=self.options.points,
            progress=lambda n, _: tell(100 * _PRODUCT + n, of),
        )
        samples = {"part": "train", "samples": len(self.train.index), "directions": "top eigenvectors of the Hessian"}
        return samples | {"steps": short(made.steps), "loss": [short(row) for row in made.loss]}

    def tsne(self, tell: Tell) -> dict[str, Any]:
        models = self.local or [self.final]
        each = evenly(range(len(self.test.index)), max(4, _DOTS // len(models)))
        features = torch.cat([self.test.look(model.weights)[0][each] for model in models])
        with _single():
            points = diagnostics.tsne(features)
        return {
            "part": self.test.part,
            "round": models[0].round,
            "points": [short(point) for point in points],
            "class": self.test.labels[each].tolist() * len(models),
            "client": [model.client for model in models for _ in each] if self.local else [],
        }

    def cost(self, tell: Tell) -> dict[str, Any]:
        s, names = self.settings, ("model", "norm", "batch_size", "data", "root", "seed", "momentum", "nesterov")
        own = {name: getattr(s, name) for name in names}
        per_sample = cost(s.method, dataset=self.world.dataset, operations=True, **own)
        paid = bought(self.history, per_sample.flops, len(self.world.dataset.classes))
        return {
            "parameters": per_sample.parameters,
            "held": per_sample.held,
            "macs_per_sample": per_sample.macs,
            "flops_per_sample": per_sample.flops,
            "total": paid.total._asdict(),
            **paid.to_dict(),
        }

    def labels(self, tell: Tell) -> dict[str, Any]:
        classes = self.world.dataset.classes
        found = diagnostics.label_distribution(self.world.parts["train"].labels, self.world.clients, len(classes))
        shown = {name: value[:_LISTED].tolist() for name, value in found._asdict().items() if name != "shares"}
        return {"classes": list(classes), "clients": len(self.world.clients), **shown}


SECTIONS: dict[str, Callable[[Diagnosis, Tell], Any]] = {
    "labels": Diagnosis.labels,
    "cost": Diagnosis.cost,
    "calibration": Diagnosis.calibration,
    "spectra": Diagnosis.spectra,
    "alignment": Diagnosis.alignment,
    "curvature": Diagnosis.curvature,
    "landscape": Diagnosis.landscape,
    "tsne": Diagnosis.tsne,
}


def _part(tell: Tell, before: int, most: int, of: int) -> Tell:
    """Of ``of`` products with the Hessian, those after ``before`` others, at most ``most``."""
    return lambda done, _: tell(before + min(done, most), of)


@contextmanager
def _single() -> Iterator[None]:
    """One thread for scikit-learn, whose threads wait for each other most of the time where cores are busy."""
    try:
        limits = importlib.import_module("threadpoolctl").threadpool_limits
    except ImportError:  # scikit-learn, which brings it, is missing too, and says so
        limits = nullcontext
    with limits(1):
        yield


def diagnose(console: Console, words: Sequence[str]) -> None:
    """Measure runs, print a table, and write ``diagnosis.json`` into each run folder."""
    given = [word for word in words if not is_setting(word)]
    options = Options.of(dict(word.split("=", 1) for word in words if is_setting(word)))
    paths = [folder for word in given for folder in (run_folders(Path(word)) or [Path(word)])]
    if not paths:
        raise UserError("diagnose needs at least one run folder, for example: isofed diagnose runs/mine")
    runs = [Diagnosis(path, options) for path in dict.fromkeys(paths)]
    found: dict[str, dict[str, Any]] = {}
    with _Progress(console, runs).showing() as progress:
        for run in runs:
            found[str(run.folder.path)] = diagnosed(run, progress.section)
    _print(console, found)
    where = next(iter(found)) if len(found) == 1 else f"each of the {len(found)} run folders"
    console.print(f"written: diagnosis.json in {where}", highlight=False, markup=False, soft_wrap=True)


def diagnosed(run: Diagnosis, section: Callable[[Diagnosis, str], Tell] | None = None) -> dict[str, Any]:
    """All that was asked for, written into the run folder beside what was found before."""
    content = {"isofed": __version__, "method": run.settings.method.shown(), "seed": run.settings.seed}
    content = run.folder.diagnosis() | content
    for name in run.options.sections:
        tell = section(run, name) if section else lambda done, of: None
        content[name] = plain(run.measure(name, tell))
        run.folder.write_diagnosis(content)  # each time: what is done stays when the next one is stopped
    return content


class _Progress:
    """How far it is: on a terminal a line with the time left, elsewhere a line for each section."""

    def __init__(self, console: Console, runs: Sequence[Diagnosis]) -> None:
        self.console, self._clock = console, Clock()
        self._live: Live | None = None
        a_pass = runs[0].a_pass
        self._todo = [(run, name, run.seconds(name, a_pass)) for run in runs for name in run.options.sections]
        self._total, self._number, self._share = sum(seconds for _, _, seconds in self._todo), 0, 0.0

    @contextmanager
    def showing(self) -> Iterator[_Progress]:
        if not self.console.is_terminal:
            yield self
            return
        with Live(console=self.console, refresh_per_second=8, transient=True) as self._live:
            yield self

    def section(self, run: Diagnosis, name: str) -> Tell:
        """The next section begins."""
        self._number, self._share = self._number + 1, 0.0
        self._current = f"[{self._number}/{len(self._todo)}] {run.folder.path}: {name}"
        if self._live is None:
            self.console.print(self._text(), highlight=False, markup=False)
        self._tell(0, 1)
        return self._tell

    def _tell(self, done: int, of: int) -> None:
        self._share = done / of
        if self._live is not None:
            self._live.update(escape(self._text()))

    def _text(self) -> str:
        *before, now = (seconds for _, _, seconds in self._todo[: self._number])
        done = sum(before) + self._share * now
        share = f" {100 * self._share:.0f} %" if self._share else ""
        return f"{self._current}{share}, {self._clock.left(done, self._total)} left"


def _print(console: Console, found: Mapping[str, Mapping[str, Any]]) -> None:
    rows = {path: _numbers(content) for path, content in found.items()}
    columns = [name for name in next(iter(rows.values())) if any(row[name] for row in rows.values())]
    out = simple_table("run", *columns)
    for path, row in rows.items():
        label = f"{found[path]['method']}, seed {found[path]['seed']}"
        out.add_row(escape(label), *(row[name] or "-" for name in columns))
    console.print(out)


def _numbers(content: Mapping[str, Any]) -> dict[str, str]:
    """The most telling numbers of a diagnosis, as texts; empty where there is none."""
    spectra = [m for m in (content.get("spectra") or {}).get("models", []) if m["client"] is None]
    gaps = [m["gap"] for m in (content.get("spectra") or {}).get("models", []) if m.get("gap") is not None]
    last = spectra[-1] if spectra else {}
    aligned = (content.get("alignment") or [{}])[-1]
    curved, calibrated = content.get("curvature") or {}, content.get("calibration") or {}
    clients = curved.get("clients") or {}
    per = (content.get("cost") or {}).get("points_per") or {}
    width = len(last.get("representation_spectrum") or [])
    return {
        "classifier rank": _text(last.get("classifier_effective_rank"), ".1f"),
        "significant": f"{last['significant']}/{width}" if last else "",
        "gap R": _text(sum(gaps) / len(gaps) if gaps else None, "+.2f"),
        "cosine": _text(aligned.get("cosine"), ".3f"),
        "top eigenvalue": _text((curved.get("eigenvalues") or [None])[0], ".3g"),
        "trace": _text(curved.get("trace"), ".3g"),
        "H_N": _text(clients.get("H_N"), ".3g"),
        "H_D": _text(clients.get("H_D"), ".3f"),
        "calibration %": _text(calibrated.get("error"), ".1f", 100),
        "points/MB": _text(per.get("megabyte"), ".3g"),
        "points/s": _text(per.get("second"), ".3g"),
        "points/GFLOP": _text(per.get("gflop"), ".3g"),
    }


def _text(value: float | None, form: str, scale: float = 1) -> str:
    return "" if value is None else format(scale * value, form)
