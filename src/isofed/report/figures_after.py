"""Figures of what ``isofed diagnose`` measured: curvature, calibration, the loss around models, t-SNE."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from isofed.report.measured import between_clients
from isofed.report.style import COLOURS, MARKERS, below, blank, look

_FEW = 5  # samples of a bin, of which a share means nothing
_PANELS = 6  # at most, side by side or below one another
_LEGEND = 20  # most groups that a legend names


def curvature(content: Mapping[str, Mapping[str, Any]]) -> Any:
    """Bars of the largest eigenvalue and the trace of the Hessian, and of H_N and H_D between clients where known.

    H_N and H_D of diagonals in which noise outweighs the estimate have no bar.
    """
    panels: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
        "largest eigenvalue": lambda c: c["eigenvalues"][0],
        "trace": lambda c: c["trace"],
        "H_N, diagonals": lambda c: between_clients(c).get("H_N"),
        "H_D, diagonals": lambda c: between_clients(c).get("H_D"),
        "H_N, traces": lambda c: between_clients(c).get("H_N_traces"),
        "H_D, traces": lambda c: between_clients(c).get("H_D_traces"),
    }
    noisy = [between_clients(c)["noise"] for c in content.values()]
    shown = {t: get for t, get in panels.items() if any(get(c) is not None for c in content.values())}
    figure = blank(2.2 + 2.0 * len(shown), 1.4 + 0.32 * len(content))
    grid = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, (title, get) in zip(grid, shown.items(), strict=True):
        values = [get(c) for c in content.values()]
        errors = [c.get("trace_error") or 0.0 for c in content.values()] if title == "trace" else None
        axes.barh(
            range(len(values)), [v or 0.0 for v in values], xerr=errors, ecolor="#444444", color=COLOURS[0], height=0.65
        )
        for place, value in enumerate(values):
            if value is None:
                axes.text(0, place, " -", va="center")
        axes.set_yticks(range(len(values)), list(content))
        axes.set_ylim(len(values) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        axes.set_title(title, fontsize=10, loc="left")
    figure.supxlabel(_how_to_read(any("H_" in title for title in shown), any(noisy)), fontsize=8)
    return figure


def _how_to_read(clients: bool, noisy: bool) -> str:
    lines = ["the line on a bar of the trace is its standard error"]
    if clients:
        lines.append("H_N: how much the clients' curvatures differ in size, 0 if not at all")
        lines.append("H_D: how alike their directions are, at most 1")
    if noisy:
        lines.append("diagonals in which noise outweighs the estimate are left out")
    return "\n".join("; ".join(lines[at : at + 2]) for at in range(0, len(lines), 2))


def reliability(content: Mapping[str, Mapping[str, Any]]) -> Any:
    """How often predictions are right against how sure they are; on the diagonal a model is as sure as it is right.

    Bins of fewer than five samples are left out.
    """
    figure = blank(5.6, 5.4)
    axes = figure.subplots()
    axes.plot([0, 100], [0, 100], color="#999999", linewidth=1, linestyle=":")
    for place, (label, found) in enumerate(content.items()):
        counts = found.get("counts") or [_FEW] * len(found["confidence"])
        bins = zip(found["confidence"], found["accuracy"], counts, strict=True)
        points = [(100 * c, 100 * a) for c, a, n in bins if c is not None and a is not None and n >= _FEW]
        name = f"{label} (error {100 * found['error']:.1f} %)"
        axes.plot([c for c, _ in points], [a for _, a in points], label=name, **look(place))
    axes.set(xlabel="confidence, %", ylabel="share that is right, %", xlim=(0, 100), ylim=(0, 100), aspect="equal")
    handles, names = axes.get_legend_handles_labels()
    below(figure, handles, names)
    return figure


def landscape(content: Mapping[str, Mapping[str, Any]]) -> Any:
    """The training loss around each model along two directions, with lines of equal loss; dark is high."""
    chosen = list(content.items())[:_PANELS]
    figure, grid = _panels(len(chosen), 3.4)
    levels = _levels([np.asarray(found["loss"], float) for _, found in chosen])
    for axes, (label, found) in zip(grid, chosen, strict=False):
        a, b = (np.asarray(found["steps"], float) for _ in range(2))
        loss = np.asarray(found["loss"], float).T
        shades = axes.contourf(a, b, loss, levels=levels, cmap="cividis_r", extend="both")
        axes.contour(a, b, loss, levels=levels, colors="white", linewidths=0.4)
        axes.plot(0, 0, marker="+", color="#b00020", markersize=9)
        axes.set_title(label, fontsize=10, loc="left")
        axes.set(xlabel="along the first direction", ylabel="along the second", aspect="equal")
        axes.grid(visible=False)
    figure.colorbar(shades, ax=grid[: len(chosen)], label="loss (dark is high)", format="%.3g")
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


def clients_shown(found: Mapping[str, Any] | None) -> bool:
    """Whether features of several clients' models are in it."""
    return len(set((found or {}).get("client") or [])) > 1


def tsne(content: Mapping[str, Mapping[str, Any]], by: str = "class") -> Any:
    """Features of the test part in the plane, coloured by class, or by the client whose model gave them.

    A group has one colour in all panels; beyond the number of colours its marks are hollow.
    """
    from matplotlib.lines import Line2D

    chosen = list(content.items())[:_PANELS]
    figure, grid = _panels(len(chosen), 3.4)
    groups = sorted({group for _, found in chosen for group in found[by]})
    looks = [_mark(place) for place in range(len(groups))]
    for axes, (label, found) in zip(grid, chosen, strict=False):
        points, own = np.asarray(found["points"], float), np.asarray(found[by])
        for group, mark in zip(groups, looks, strict=True):
            here = points[own == group]
            axes.plot(here[:, 0], here[:, 1], **mark, markersize=3, alpha=0.8)
        axes.set_title(f"{label}, by {by}", fontsize=10, loc="left")
        axes.set(xticks=[], yticks=[], aspect="equal")
        axes.spines[["left", "bottom"]].set_visible(False)
    if len(groups) <= _LEGEND:
        handles = [Line2D([], [], **mark, markersize=6) for mark in looks]
        below(figure, handles, [f"{by} {group}" for group in groups], handlelength=1.0)
    return figure


def _mark(place: int) -> dict[str, Any]:
    colour, solid = COLOURS[place % len(COLOURS)], place < len(COLOURS)
    face = {"markerfacecolor": colour, "markeredgewidth": 0} if solid else {"markerfacecolor": "none"}
    return {"color": colour, "marker": MARKERS[place % len(MARKERS)], "linestyle": "", **face}
