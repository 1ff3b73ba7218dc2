"""Figures of runs for a paper or a talk: one function a picture, each written as SVG and as PNG.

Methods differ by colour, line style and marker at once, so that they can be told apart in grey and by the colour-blind.
The same runs give the same files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from isofed.data.describe import picture
from isofed.diagnostics.bought import Bought, bought
from isofed.diagnostics.spectra import FLOOR
from isofed.errors import UserError
from isofed.report.answer import compared
from isofed.report.figures_after import clients_shown, curvature, landscape, reliability, tsne
from isofed.report.gather import Found, Reader, Run, Splits
from isofed.report.style import blank, decimals, drawing, every, legend, look, whole_numbers
from isofed.tables import Row

AXES = {
    "round": "round",
    "megabytes": "MB sent and received",
    "seconds": "seconds of training",
    "gflop": "GFLOP of local steps",
}


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
    several = {
        label: run.diagnosis["tsne"] for label, run in diagnosed.items() if clients_shown(run.diagnosis.get("tsne"))
    }
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
    """Accuracy or loss against rounds, megabytes or seconds: the mean over seeds, with a band of one deviation.

    A method that asks the clients once more after the last round has a diamond: its final model, as in the table.
    """
    figure, asked = blank(6.4, 4.2), False
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
        final = _final(by_seed.values(), value)
        if final is not None:
            asked = True
            _diamond(axes, x[-1], scale * mean[-1], scale * final, look(place)["color"])
    if value == "loss":
        axes.set_yscale("log")
    if axis == "round":
        whole_numbers(axes)
    axes.set(xlabel=AXES[axis], ylabel="accuracy %" if value == "accuracy" else "loss")
    notes = ["mean over seeds ± one standard deviation"] if any(len(s) > 1 for s in found.rows.values()) else []
    if asked:
        notes.append("◇ final model, after a last question to the clients")
    axes.set_title("\n".join(notes), fontsize=9, loc="left")
    legend(figure, axes, len(found.rows))
    return figure


def _final(runs: Iterable[Run], value: str) -> float | None:
    """What the final models reach, mean over seeds, where they are other models than those of the last round."""
    results = [run.result for run in runs if run.asked and run.result is not None]
    values = [r.accuracy if value == "accuracy" else r.loss for r in results]
    known = [v for v in values if v is not None]
    return math.fsum(known) / len(known) if known else None


def _diamond(axes: Any, x: float, last: float, final: float, colour: str) -> None:
    axes.plot([x, x], [last, final], color=colour, linestyle=":", linewidth=1.2)
    axes.plot([x], [final], color=colour, marker="D", markersize=7, markerfacecolor="white", markeredgewidth=1.6)


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
    whole_numbers(axes)
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
        whole_numbers(axes)
        axes.set_title(title, fontsize=10, loc="left")
    legend(figure, all_axes[0], len(found.rows))
    return figure


def _mean(values: Sequence[float] | None) -> float | None:
    return float(np.mean(values)) if values else None


def method_table(found: Found) -> Any:
    """The table of a comparison: accuracy, difference to the first method with its interval, time and traffic.

    Rows of several data sets differ each from the first of their own.
    """
    rows = [row for table in compared(found).values() for row in table if row.accuracy is not None]
    columns = ["method", "accuracy %", "differ", "95 % interval", "s / round", "MB / round"]
    seconds, megabytes = _column(rows, "seconds_per_round"), _column(rows, "megabytes_per_round")
    cells = [
        [
            r.method,
            f"{100 * (r.accuracy or 0.0):.1f}" + (f" ± {100 * r.std:.1f}" if r.std is not None else ""),
            f"{100 * r.difference:+.1f}{' *' if r.clear else ''}" if r.difference is not None else "",
            f"{100 * r.low:+.1f} to {100 * r.high:+.1f}" if r.low is not None and r.high is not None else "",
            *paid,
        ]
        for r, *paid in zip(rows, seconds, megabytes, strict=True)
    ]
    if any(row.epsilon is not None for row in rows):
        columns.append("epsilon")
        for cell, text in zip(cells, _column(rows, "epsilon"), strict=True):
            cell.append(text)
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


def _column(rows: Sequence[Row], name: str) -> list[str]:
    """Numbers with as many places behind the point as each other."""
    values: list[float | None] = [getattr(row, name) for row in rows]
    places = decimals(values)
    return ["" if value is None else f"{value:.{places}f}" for value in values]
