"""What a split looks like: rows for a table of classes by client, and a picture of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isofed import extras
from isofed.data.base import Index
from isofed.errors import UserError

_BUBBLES = 30  # beyond so many clients or classes bubbles are dots, and a map of shades says more
_INK = "#1f3b57"  # one dark colour: size and shade carry the numbers, so it reads in grey too


@dataclass(frozen=True)
class Table:
    """Plain texts for whoever prints a table."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def domains_of(counts: Index, names: Sequence[str]) -> list[str]:
    """For each client its domain, ``mixed`` or ``-``, from its samples per domain [clients, domains]."""
    held = [np.flatnonzero(row) for row in counts]
    return [names[h[0]] if len(h) == 1 else "mixed" if len(h) else "-" for h in held]


def table(
    counts: Index,
    classes: Sequence[str],
    domains: Sequence[str] | None = None,
    most_clients: int = 20,
    most_classes: int = 12,
) -> Table:
    """Samples, number of classes and largest class of each client, and its samples of each class where they fit.

    ``counts`` is [clients, classes]; ``domains`` holds a text for each client (see :func:`domains_of`). With more
    than ``most_clients`` clients the middle ones are left out, and a row says how many; the last row is the sum.
    """
    wide = len(classes) <= most_classes
    columns = ("client", *(["domain"] if domains else []), "samples", "classes", "largest", *(classes if wide else []))
    if len(counts) > most_clients:
        first = most_clients - most_clients // 2
        shown: list[int | None] = [*range(first), None, *range(len(counts) - most_clients // 2, len(counts))]
    else:
        shown = list(range(len(counts)))
    rows: list[tuple[str, ...]] = []
    for client in shown:
        if client is None:
            left_out = len(counts) - most_clients
            rows.append(("...", f"{left_out:,} more", *[""] * (len(columns) - 2)))
        else:
            where = [domains[client]] if domains else []
            rows.append((str(client), *where, *_numbers(counts[client], classes, wide)))
    rows.append(("all", *([""] if domains else []), *_numbers(counts.sum(0), classes, wide)))
    return Table(columns, tuple(rows))


def _numbers(row: Index, classes: Sequence[str], wide: bool) -> tuple[str, ...]:
    total, top = int(row.sum()), int(row.argmax())
    largest = f"{classes[top]} {row[top] / total:.0%}" if total else "-"
    return (f"{total:,}", str(int((row > 0).sum())), largest, *(f"{n:,}" if n else "." for n in row if wide))


def picture(counts: Index, classes: Sequence[str], path: str | Path, title: str = "") -> Path:
    """Write a chart of the samples per class and client as PNG, SVG or PDF: bubbles, or shades when there are many."""
    target = Path(path)
    if target.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"a picture is written as .png, .svg or .pdf, not '{target.name}'")
    if not target.parent.is_dir():
        raise UserError(f"there is no folder '{target.parent}' to write '{target.name}' into")
    if not counts.size:
        raise UserError("there is nothing to draw: the split has no clients or no classes")
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"pictures need matplotlib: {extras.command('plot')}") from None
    clients = len(counts)
    small = clients <= _BUBBLES and len(classes) <= _BUBBLES
    size = (max(4.5, 1.8 + 0.32 * clients), max(3.2, 1.8 + 0.26 * len(classes))) if small else (9.0, 6.5)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    top, main = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3.2))
    _sizes(top, counts.sum(1), title)
    (_bubbles if small else _shades)(figure, main, counts)
    main.set(xlabel="client", ylabel="class")
    _ticks(main.xaxis, [str(i) for i in range(clients)])
    _ticks(main.yaxis, [name if len(name) <= 16 else name[:15] + "…" for name in classes])
    main.set_xlim(-0.6, clients - 0.4)
    main.set_ylim(len(classes) - 0.4, -0.6)
    # Text stays text, and no date or random name goes in: the same split gives the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "isofed"}):
        figure.savefig(
            target,
            dpi=150,
            metadata={".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(target.suffix.lower()),
        )
    return target


def _sizes(axes: Any, sizes: Index, title: str) -> None:
    if len(sizes) <= 200:
        axes.bar(range(len(sizes)), sizes, color=_INK, width=0.8)
    else:  # one outline: ten thousand bars would take minutes and show no gap
        axes.stairs(sizes, np.arange(len(sizes) + 1) - 0.5, color=_INK, fill=True)
    axes.set_ylabel("samples")
    axes.tick_params(axis="x", labelbottom=False)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(title, fontsize=11)


def _bubbles(figure: Any, axes: Any, counts: Index) -> None:
    client, label = np.nonzero(counts)
    held = counts[client, label]
    largest = max(int(counts.max()), 1)
    axes.scatter(client, label, s=190 * held / largest, color=_INK, linewidths=0)
    axes.set_axisbelow(True)
    axes.grid(color="#e3e3e3", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    keys = sorted({max(1, round(largest * share)) for share in (0.1, 0.5, 1.0)})
    for key in keys:
        axes.scatter([], [], s=190 * key / largest, color=_INK, linewidths=0, label=f"{key:,}")
    figure.legend(title="samples", loc="outside right center", frameon=False, labelspacing=1.0)


def _shades(figure: Any, axes: Any, counts: Index) -> None:
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5, vmin=0, vmax=max(int(counts.max()), 1))  # as with the area of bubbles, small numbers show
    image = axes.imshow(counts.T, aspect="auto", cmap="Greys", interpolation="nearest", norm=norm)
    figure.colorbar(image, ax=axes, label="samples", pad=0.01)


def _ticks(axis: Any, names: list[str], most: int = 30) -> None:
    step = -(-len(names) // most)
    axis.set_ticks(range(0, len(names), step), names[::step])
