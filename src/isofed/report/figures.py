"""Figures of runs for a paper or a talk: one function a picture, each written as SVG and as PNG.

Methods differ by colour, line style and marker at once, so that they can be told apart in grey and by the colour-blind.
The same runs give the same files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from isofed import tables
from isofed.data.describe import picture
from isofed.diagnostics.bought import Bought, bought
from isofed.diagnostics.spectra import FLOOR
from isofed.errors import UserError
from isofed.report.gather import Found, Reader, Run, Splits
from isofed.report.style import COLOURS, MARKERS, blank, drawing, every, legend, look

AXES = {
    "round": "round",
    "megabytes": "MB sent and received",
    "seconds": "seconds of training",
    "gflop": "GFLOP of local steps",
}
_FEW = 5  # samples of a bin, of which a share means nothing
_PANELS = 6  # at most, side by side or below one another


def write_all(runs: Sequence[Path], folder: Path) -> list[Path]:
    """Draw everything that these runs (or folders of runs) have records for; gives the files, SVG and PNG of each."""
    found = Reader().read(runs)
    if not found.rows:
        raise UserError("; ".join(found.problems) or f"there are no runs in {', '.join(map(str, runs))}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [file for name, draw in _pictures(found) for file in _written(folder / name, draw)]
    except OSError as error:
        raise UserError(f"figures cannot be written into {folder}: {error.strerror}") from None


def _pictures(found: Found) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names of pictures, and how to draw each."""
    for value in ("accuracy", "loss"):
        for axis in ("round", "megabytes", "seconds", "gflop"):
            empty = {"megabytes": all(run.pooled for run in found.runs), "gflop": all(not r.flops for r in found.runs)}
            if not empty.get(axis):
                yield f"{value}-by-{axis}", partial(curves, found, value, axis)
    yield "methods", partial(method_table, found)
    if any("classifier_spectrum" in line for run in found.runs for line in run.measured):
        yield "classifier-spectrum", partial(spectra, found, "classifier_spectrum")
    if any("representation_spectrum" in line for run in found.runs for line in run.measured):
        yield "representation-spectrum", partial(spectra, found, "representation_spectrum")
    if any("alignment" in line or "drift" in line for run in found.runs for line in run.measured):
        yield "alignment-by-round", partial(alignment, found)
    diagnosed = {label: run for label, by_seed in found.rows.items() for run in list(by_seed.values())[:1]}
    for section, name, draw in (
        ("curvature", "curvature", curvature),
        ("calibration", "calibration", reliability),
        ("landscape", "landscape", landscape),
        ("tsne", "tsne-by-class", tsne),
    ):
        content = {label: run.diagnosis[section] for label, run in diagnosed.items() if run.diagnosis.get(section)}
        if content:
            yield name, partial(draw, content)
    several = {label: run.diagnosis["tsne"] for label, run in diagnosed.items() if _clients(run.diagnosis.get("tsne"))}
    if several:
        yield "tsne-by-client", partial(tsne, several, "client")
    for number, made in enumerate(Splits().of(found.runs), 1):
        if "counts" in made:
            yield f"split-{number}", partial(dict, made)


def _written(stem: Path, draw: Callable[[], Any]) -> list[Path]:
    files = [stem.with_name(stem.name + suffix) for suffix in (".svg", ".png")]
    with drawing():
        made = draw()
        for file in files:
            if isinstance(made, dict):
                picture(np.asarray(made["counts"]), made["classes"], file, made["name"])
            else:
                made.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def curves(found: Found, value: str = "accuracy", axis: str = "round") -> Any:
    """Accuracy or loss against rounds, megabytes or seconds: the mean over seeds, with a band of one deviation."""
    figure = blank(6.4, 4.2)
    axes = figure.subplots()
    for place, (label, by_seed) in enumerate(found.rows.items()):
        made = [paid for run in by_seed.values() if (paid := _bought(run)) is not None]
        if axis == "gflop":
            made = [paid for paid in made if paid.gflop]
        if not made or (axis == "megabytes" and not made[0].megabytes[-1]):
            continue
        rounds = sorted(set.intersection(*(set(paid.rounds) for paid in made)))
        x, _ = _over_seeds(made, rounds, "rounds" if axis == "round" else axis)
        mean, std = _over_seeds(made, rounds, value)
        scale = 100 if value == "accuracy" else 1
        axes.plot(x, scale * mean, label=label, markevery=every(len(x)), **look(place))
        if len(made) > 1:
            low, high = scale * (mean - std), scale * (mean + std)
            axes.fill_between(x, low, high, color=look(place)["color"], alpha=0.15, linewidth=0)
    if value == "loss":
        axes.set_yscale("log")
    axes.set(xlabel=AXES[axis], ylabel="accuracy %" if value == "accuracy" else "loss")
    if any(len(by_seed) > 1 for by_seed in found.rows.values()):
        axes.set_title("mean over seeds ± one standard deviation", fontsize=9, loc="left")
    legend(figure, axes, len(found.rows))
    return figure


def _bought(run: Run) -> Bought | None:
    judged = any(line.get("accuracy") is not None for line in run.history)
    return bought(run.history, run.flops) if judged else None


def _over_seeds(made: Sequence[Bought], rounds: Sequence[int], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation at these rounds."""
    values = []
    for paid in made:
        at = dict(zip(paid.rounds, getattr(paid, name), strict=True))
        values.append([math.nan if at[r] is None else float(at[r]) for r in rounds])
    array = np.asarray(values)
    return array.mean(0), array.std(0, ddof=1) if len(made) > 1 else np.zeros(len(rounds))


def spectra(found: Found, name: str = "classifier_spectrum") -> Any:
    """Singular values, the largest first, of each method in the last round that was diagnosed.

    Of the global model; and of local ones before averaging, as a thin line, where they were looked at.
    """
    figure, locals_shown = blank(6.4, 4.2), False
    axes = figure.subplots()
    for place, (label, by_seed) in enumerate(found.rows.items()):
        lines = [[line for line in run.measured if line.get(name)] for run in by_seed.values()]
        last = [np.asarray(of_run[-1][name], float) for of_run in lines if of_run]
        if not last:
            continue
        logs = _logs(last)
        x, mean = np.arange(1, logs.shape[1] + 1), logs.mean(0)
        axes.plot(x, np.exp(mean), label=label, markevery=every(len(x)), **look(place))
        if len(last) > 1:
            std = logs.std(0, ddof=1)
            band = np.exp(mean - std), np.exp(mean + std)
            axes.fill_between(x, *band, color=look(place)["color"], alpha=0.15, linewidth=0)
        own = [
            np.asarray(o[name], float) for of_run in lines if of_run for o in of_run[-1].get("local", []) if name in o
        ]
        if own:
            locals_shown = True
            mean = _logs(own).mean(0)
            axes.plot(np.arange(1, len(mean) + 1), np.exp(mean), **look(place) | {"marker": "", "linewidth": 0.8})
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(bottom=max(low, 1e-8 * high))  # dead features would flatten all others
    axes.set(xlabel="number", ylabel="singular value")
    what = "of the classifier" if name.startswith("classifier") else "of the covariance of the features"
    thin = "\nthin: local models before averaging" if locals_shown else ""
    axes.set_title(f"singular values {what}{thin}", fontsize=10, loc="left")
    legend(figure, axes, len(found.rows))
    return figure


def _logs(spectra: Sequence[np.ndarray]) -> np.ndarray:
    """Natural logarithms of the first hundred values of each, as far as all have them."""
    count = min(100, *map(len, spectra))
    return np.log(np.clip(np.stack([values[:count] for values in spectra]), FLOOR, None))


def alignment(found: Found) -> Any:
    """By round: how the clients' classifiers agree in direction and in length, and how far updates are off the mean."""
    figure = blank(9.6, 3.8)
    panels = {
        "cosine between classifiers": lambda line: line.get("alignment", {}).get("cosine"),
        "difference of their lengths": lambda line: line.get("alignment", {}).get("norm_difference"),
        "degrees between update and mean": lambda line: _mean(line.get("drift", {}).get("angle")),
    }
    all_axes = figure.subplots(1, len(panels))
    for axes, (title, value) in zip(all_axes, panels.items(), strict=True):
        for place, (label, by_seed) in enumerate(found.rows.items()):
            by_round: dict[int, list[float]] = {}
            for run in by_seed.values():
                for line in run.measured:
                    if (number := value(line)) is not None:
                        by_round.setdefault(line["round"], []).append(number)
            x = sorted(by_round)
            mean = [float(np.mean(by_round[r])) for r in x]
            axes.plot(x, mean, label=label, markevery=every(len(x)), **look(place))
        axes.set(xlabel="round")
        axes.set_title(title, fontsize=10, loc="left")
    legend(figure, all_axes[0], len(found.rows))
    return figure


def _mean(values: Sequence[float] | None) -> float | None:
    return float(np.mean(values)) if values else None


def curvature(content: Mapping[str, Mapping[str, Any]]) -> Any:
    """Bars of the largest eigenvalue and the trace of the Hessian, and of H_N and H_D between clients where known."""
    panels = {
        "largest eigenvalue": lambda c: c["eigenvalues"][0],
        "trace": lambda c: c["trace"],
        "H_N between clients": lambda c: c.get("clients", {}).get("H_N"),
        "H_D between clients": lambda c: c.get("clients", {}).get("H_D"),
    }
    shown = {t: get for t, get in panels.items() if any(get(c) is not None for c in content.values())}
    figure = blank(2.2 + 2.2 * len(shown), 1.4 + 0.32 * len(content))
    grid = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, (title, get) in zip(grid, shown.items(), strict=True):
        values = [get(c) for c in content.values()]
        axes.barh(range(len(values)), [v or 0.0 for v in values], color=COLOURS[0], height=0.65)
        axes.set_yticks(range(len(values)), list(content))
        axes.set_ylim(len(values) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_title(title, fontsize=10, loc="left")
    return figure


def reliability(content: Mapping[str, Mapping[str, Any]]) -> Any:
    """How often predictions are right against how sure they are; on the diagonal a model is as sure as it is right.

    Bins of fewer than five samples are left out.
    """
    figure = blank(5.6, 5.4)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle=":")
    for place, (label, found) in enumerate(content.items()):
        counts = found.get("counts") or [_FEW] * len(found["confidence"])
        bins = zip(found["confidence"], found["accuracy"], counts, strict=True)
        points = [(c, a) for c, a, n in bins if c is not None and a is not None and n >= _FEW]
        name = f"{label} (error {100 * found['error']:.1f} %)"
        axes.plot([c for c, _ in points], [a for _, a in points], label=name, **look(place))
    axes.set(xlabel="confidence", ylabel="share that is right", xlim=(0, 1), ylim=(0, 1), aspect="equal")
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=1 if len(names) < 4 else 2)
    return figure


def landscape(content: Mapping[str, Mapping[str, Any]]) -> Any:
    """The training loss around each model along two directions, as lines of equal loss; dark is low."""
    chosen = list(content.items())[:_PANELS]
    figure, grid = _panels(len(chosen), 3.4)
    levels = _levels([np.asarray(found["loss"], float) for _, found in chosen])
    for axes, (label, found) in zip(grid, chosen, strict=False):
        a, b = (np.asarray(found["steps"], float) for _ in range(2))
        shades = axes.contourf(a, b, np.asarray(found["loss"], float).T, levels=levels, cmap="cividis", extend="both")
        axes.contour(a, b, np.asarray(found["loss"], float).T, levels=levels, colors="white", linewidths=0.4)
        axes.plot(0, 0, marker="+", color="white", markersize=9)
        axes.set_title(label, fontsize=10, loc="left")
        axes.set(xlabel="along the first direction", ylabel="along the second", aspect="equal")
        axes.grid(visible=False)
    figure.colorbar(shades, ax=grid[: len(chosen)], label="loss", format="%.3g")
    return figure


def _levels(losses: Sequence[np.ndarray]) -> np.ndarray:
    """Of equal ratio, the same for all methods, so that they can be compared."""
    finite = np.concatenate([values[np.isfinite(values)].ravel() for values in losses])
    low, high = max(float(finite.min()), 1e-6), float(np.quantile(finite, 0.98))
    return np.geomspace(low, max(high, 1.01 * low), 18)


def _panels(count: int, size: float) -> tuple[Any, list[Any]]:
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = blank(size * columns + 0.8, size * rows + 0.3)
    grid = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axes in grid[count:]:
        axes.set_axis_off()
    return figure, grid


def _clients(found: Mapping[str, Any] | None) -> bool:
    """Whether features of several clients' models are in it."""
    return len(set((found or {}).get("client") or [])) > 1


def tsne(content: Mapping[str, Mapping[str, Any]], by: str = "class") -> Any:
    """Features of the test part in the plane, coloured by class, or by the client whose model gave them."""
    chosen = list(content.items())[:_PANELS]
    figure, grid = _panels(len(chosen), 3.4)
    for axes, (label, found) in zip(grid, chosen, strict=False):
        points = np.asarray(found["points"], float)
        groups = np.asarray(found[by])
        for place, group in enumerate(np.unique(groups)):
            here = points[groups == group]
            look = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
            axes.scatter(here[:, 0], here[:, 1], s=9, linewidths=0, alpha=0.8, label=f"{by} {group}", **look)
        axes.set_title(f"{label}, by {by}", fontsize=10, loc="left")
        axes.set(xticks=[], yticks=[], aspect="equal")
        axes.spines[["left", "bottom"]].set_visible(False)
    handles, names = grid[0].get_legend_handles_labels()
    if len(names) <= 20:
        figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 6), markerscale=2)
    return figure


def method_table(found: Found) -> Any:
    """The table of a comparison: accuracy, difference to the first method with its interval, time and traffic."""
    rows = tables.comparison(found.batch, list(found.batch.results), found.target) if found.batch.results else []
    columns = ("method", "accuracy %", "differ", "95 % interval", "s / round", "MB / round")
    cells = [
        (
            r.method,
            f"{100 * r.accuracy:.1f}" + (f" ± {100 * r.std:.1f}" if r.std is not None else ""),
            f"{100 * r.difference:+.1f}{' *' if r.clear else ''}" if r.difference is not None else "",
            f"{100 * r.low:+.1f} to {100 * r.high:+.1f}" if r.low is not None and r.high is not None else "",
            f"{r.seconds_per_round:.2f}" if r.seconds_per_round is not None else "",
            f"{r.megabytes_per_round:.2f}" if r.megabytes_per_round is not None else "",
        )
        for r in rows
        if r.accuracy is not None
    ]
    widths = [max(len(text) for text in column) + 2 for column in zip(columns, *cells, strict=True)]
    figure = blank(0.088 * sum(widths), 0.45 + 0.26 * len(cells))
    axes = figure.subplots()
    axes.set_axis_off()
    shares = [w / sum(widths) for w in widths]
    kinds = ["left"] + ["right"] * (len(columns) - 1)
    table = axes.table([columns, *cells], colWidths=shares, bbox=(0, 0, 1, 1), edges="horizontal", cellLoc="right")
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    for (row, column), cell in table.get_celld().items():
        cell.set_edgecolor("#bbbbbb")
        cell.get_text().set_horizontalalignment(kinds[column])
        cell.get_text().set_fontweight("bold" if row == 0 else "normal")
    return figure
