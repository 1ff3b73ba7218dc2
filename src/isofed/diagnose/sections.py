"""Each section of a diagnosis, measured on a run and given as plain values."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from isofed import diagnostics
from isofed.diagnose.material import Material, Model
from isofed.diagnostics.bought import bought
from isofed.diagnostics.cost import cost as cost_of
from isofed.diagnostics.hessian import DEFLATE, deflation_products
from isofed.errors import NotFinite, UserError
from isofed.recorder import evenly, short

Tell = Callable[[int, int], None]  # is told how much of a section is done, and of how much at most
_LISTED = 300  # clients whose labels are written down
_DOTS = 1000  # of a t-SNE
_PRODUCT = 4  # passes that a product with the Hessian takes, about
_SECONDS = {"cost": 2.0, "tsne": 4.0}  # that sections take besides passes, about


class Diagnosis(Material):
    """One run and what can be measured on it."""

    def measure(self, section: str, tell: Tell = lambda done, of: None) -> Any:
        """One section of the diagnosis; empty where the run has not kept what it needs."""
        with self.threads():
            return _MEASURES[section](self, tell)

    def seconds(self, section: str, a_pass: float) -> float:
        """About how long a section takes, if a pass over the sample takes so long."""
        o, local = self.options, len(self._local)
        passes = {
            "spectra": 1 + sum(one.client is None for one in self._kept) + local,
            "curvature": _PRODUCT * (100 + _most(o.probes) * (1 + (local if local > 1 else 0))),
            "landscape": _PRODUCT * 100 + o.points**2,
        }
        return _SECONDS.get(section, 0.0) + a_pass * passes.get(section, 1)


def spectra(run: Material, tell: Tell) -> dict[str, Any]:
    """The classifier and the features of the global models by round, and of local models with their gap R."""
    by_round = {model.round: model for model in run.kept(clients=False)} | {run.final.round: run.final}
    found, of = [], len(by_round) + len(run.local)
    values = {}
    for model in by_round.values():
        line = _spectra(run, model)
        values[model.round] = line.pop("values")
        found.append(line)
        tell(len(found), of)
    for model in run.local:
        line = _spectra(run, model)
        theirs = line.pop("values")
        if model.round in values:
            line["gap"] = diagnostics.spectrum_gap([theirs], values[model.round])
        found.append(line)
        tell(len(found), of)
    return {"part": run.test.part, "samples": len(run.test.index), "models": found}


def _spectra(run: Material, model: Model) -> dict[str, Any]:
    features, _ = run.test.look(model.weights)
    spectrum = diagnostics.representation_spectrum(features)
    line: dict[str, Any] = {
        "round": model.round,
        "client": model.client,
        "representation_spectrum": short(spectrum.values),
        "representation_effective_rank": spectrum.effective_rank,
        "significant": diagnostics.significant(spectrum.values),
        "singular_spread": diagnostics.singular_spread(features),
    }
    if (head := run.test.head(model.weights)) is not None:
        classifier = diagnostics.classifier_spectrum(head)
        line["classifier_spectrum"] = short(classifier.values)
        line["classifier_effective_rank"] = classifier.effective_rank
    return line | {"values": spectrum.values}


def alignment(run: Material, tell: Tell) -> list[dict[str, Any]]:
    """How the clients' classifiers agree, of each round in which they were kept."""
    heads: dict[int, list[Tensor]] = {}
    for model in run.kept(clients=True):
        if (head := run.test.head(model.weights)) is not None:
            heads.setdefault(model.round, []).append(head.clone())
    several = {number: rows for number, rows in heads.items() if len(rows) > 1}
    return [
        {"round": number, "clients": len(rows), **diagnostics.classifier_alignment(rows)._asdict()}
        for number, rows in several.items()
    ]


def curvature(run: Material, tell: Tell) -> dict[str, Any]:
    """The Hessian of the final model, and how alike it is between clients where their models were kept."""
    network, data, probes = run.train.network, (run.train.inputs, run.train.labels), run.options.probes
    run.train.bind(run.final.weights)
    several = run.local if len(run.local) > 1 else []
    products = _Products(tell, 100, *[_most(probes)] * (1 + len(several)))
    size = _batch(data[0])
    top = diagnostics.hessian_top_eigenvalues(network, data, 2, batch_size=size, progress=products.next())
    trace = diagnostics.hessian_trace(network, data, probes=probes, batch_size=size, progress=products.next())
    found: dict[str, Any] = {
        "round": run.final.round,
        "part": "train",
        "samples": len(run.train.index),
        "eigenvalues": top.values,
        "eigenvalue_errors": top.errors,
        "trace": trace.value,
        "trace_error": trace.error,
        "probes": trace.probes,
    }
    diagonals = []
    for model in several:
        run.train.bind(model.weights)
        told = products.next()
        try:
            diagonals.append(diagnostics.hessian_diagonal(network, data, probes=probes, batch_size=size, progress=told))
        except NotFinite as error:
            raise NotFinite(f"of client {model.client}'s model, {error}", found) from None
    if diagonals:
        whole = diagnostics.hessian_match([d.values for d in diagonals])
        traces = diagnostics.hessian_match([d.traces for d in diagonals])
        found["clients"] = {
            "clients": [model.client for model in run.local],
            "round": run.local[0].round,
            # Of each tensor's trace: who makes H_N_traces what it is.
            "traces": [float(d.traces.sum()) for d in diagonals],
            "lengths": [float(d.traces.norm()) for d in diagonals],
            "H_N": whole.norm,
            "H_D": whole.direction,
            "H_N_traces": traces.norm,
            "H_D_traces": traces.direction,
            "error": max(d.error for d in diagonals),
        }
    return found


def calibration(run: Material, tell: Tell) -> dict[str, Any]:
    """How sure the final model is against how right."""
    _, logits = run.test.look(run.final.weights)
    found = diagnostics.calibration(logits.softmax(1), run.test.labels)
    return {"part": run.test.part, "samples": len(run.test.index), **found._asdict()}


def landscape(run: Material, tell: Tell) -> dict[str, Any]:
    """The training loss around the final model, along the Hessian's two top eigenvectors."""
    run.train.bind(run.final.weights)
    network, data = run.train.network, (run.train.inputs, run.train.labels)
    of = 100 * _PRODUCT + run.options.points**2
    top = diagnostics.hessian_top_eigenvalues(
        network, data, 2, batch_size=_batch(data[0]), progress=lambda n, _: tell(_PRODUCT * n, of)
    )
    made = diagnostics.loss_landscape(
        network,
        data,
        list(top.vectors),
        points=run.options.points,
        progress=lambda n, _: tell(100 * _PRODUCT + n, of),
    )
    samples = {"part": "train", "samples": len(run.train.index), "directions": "top eigenvectors of the Hessian"}
    return samples | {"steps": short(made.steps), "loss": [short(row) for row in made.loss]}


def tsne(run: Material, tell: Tell) -> dict[str, Any]:
    """Features in the plane: as each client's model sees them where those were kept, else as the final one does."""
    models = run.local or [run.final]
    each = evenly(range(len(run.test.index)), max(4, _DOTS // len(models)))
    features = torch.cat([run.test.look(model.weights)[0][each] for model in models])
    if min(len(features) - 2, features.shape[1]) < 2:
        few = f"{len(features)} of {features.shape[1]} numbers"
        raise UserError(f"a t-SNE needs at least 4 features of 2 numbers, not {few}: name other sections with only=")
    with _single():
        points = diagnostics.tsne(features)
    return {
        "part": run.test.part,
        "round": models[0].round,
        "points": [short(point) for point in points],
        "class": run.test.labels[each].tolist() * len(models),
        "client": [model.client for model in models for _ in each] if run.local else [],
    }


def cost(run: Material, tell: Tell) -> dict[str, Any]:
    """What a sample costs, and accuracy against all that was paid; of the local steps only, not of evaluations."""
    s, names = run.settings, ("model", "norm", "batch_size", "data", "root", "seed", "momentum", "nesterov")
    own = {name: getattr(s, name) for name in names}
    per_sample = cost_of(s.method, dataset=run.world.dataset, operations=True, **own)
    paid = bought(run.history, per_sample.flops, len(run.world.dataset.classes))
    return {
        "parameters": per_sample.parameters,
        "held": per_sample.held,
        "macs_per_sample": per_sample.macs,
        "flops_per_sample": per_sample.flops,
        "total": paid.total._asdict(),
        **paid.to_dict(),
    }


def labels(run: Material, tell: Tell) -> dict[str, Any]:
    """Who holds which classes."""
    classes = run.world.dataset.classes
    found = diagnostics.label_distribution(run.world.parts["train"].labels, run.world.clients, len(classes))
    shown = {name: value[:_LISTED].tolist() for name, value in found._asdict().items() if name != "shares"}
    return {"classes": list(classes), "clients": len(run.world.clients), **shown}


_MEASURES: dict[str, Callable[[Material, Tell], Any]] = {
    measure.__name__: measure for measure in (labels, cost, calibration, spectra, alignment, curvature, landscape, tsne)
}


def _most(probes: int) -> int:
    """How many products with the Hessian a trace or a diagonal takes at most."""
    return probes + deflation_products(DEFLATE)


class _Products:
    """Products with the Hessian, by one function after another: how many were made, and how many there are at most."""

    def __init__(self, tell: Tell, *most: int) -> None:
        self._tell, self._made, self._left = tell, 0, list(most)

    def next(self) -> Tell:
        """What the next function tells, which may need fewer than it said at first."""
        before, _ = self._made, self._left.pop(0)

        def told(done: int, of: int) -> None:
            self._made = before + done
            self._tell(self._made, before + of + sum(self._left))

        return told


def _batch(inputs: Tensor) -> int:
    """Samples of a pass: few do not fill a GPU."""
    return 1024 if inputs.is_cuda else 256


@contextmanager
def _single() -> Iterator[None]:
    """One thread for scikit-learn, whose threads wait for each other most of the time where cores are busy."""
    try:
        limits = importlib.import_module("threadpoolctl").threadpool_limits
    except ImportError:  # scikit-learn, which brings it, is missing too, and says so
        limits = nullcontext
    with limits(1):
        yield
