"""How figures look: the same colours, lines and fonts everywhere, readable in grey and by the colour-blind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from isofed.errors import UserError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8C6D31")  # Okabe and Ito's
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_MARKS = 8  # on a line
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text,
    "svg.hashsalt": "isofed",  # and no random name goes in
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
}


@contextmanager
def drawing() -> Iterator[None]:
    """For the time of a block, matplotlib draws in this package's style."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("pictures need matplotlib: pip install 'isofed[plot]'") from None
    with matplotlib.rc_context(_RC):
        yield


def blank(width: float, height: float) -> Any:
    """A figure that belongs to no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def look(place: int) -> dict[str, Any]:
    """How the line of a method looks, by its place."""
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": STYLES[place % len(STYLES)],
        "marker": MARKERS[place % len(MARKERS)],
    }


def every(points: int) -> int:
    return max(1, points // _MARKS)


def legend(figure: Any, axes: Any, count: int) -> None:
    if count > 1:
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(count, 4), handlelength=3.2)
