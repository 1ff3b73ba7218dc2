"""How figures look: the same colours, lines and fonts everywhere, readable in grey and by the colour-blind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from isofed import extras
from isofed.errors import UserError

# Those of the page in light colours, in its order: Okabe and Ito's, some of them darker for lines on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c0609a", "#d89000", "#3fa3de", "#7a5c00", "#444c56")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_MARKS = 8  # on a line
_LETTER, _BESIDE, _LINE = 0.075, 0.3, 0.21  # inches of a legend: a letter, what surrounds a name, a line
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
        raise UserError(f"pictures need matplotlib: {extras.command('plot')}") from None
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
        below(figure, handles, names, handlelength=3.2)


def below(figure: Any, handles: Sequence[Any], names: Sequence[str], handlelength: float = 2.0) -> None:
    """A legend under the axes, in as many columns as the figure is wide; the figure grows by what it takes."""
    inches = _LETTER * max(map(len, names)) + _LETTER * 2 * handlelength + _BESIDE
    width, height = figure.get_size_inches()
    columns = max(1, min(len(names), int(width / inches)))
    figure.set_size_inches(width, height + _LINE * (-(-len(names) // columns) - 1))
    figure.legend(handles, names, loc="outside lower center", ncols=columns, handlelength=handlelength)


def whole_numbers(axes: Any) -> None:
    """Ticks at whole numbers only: there is no round 1.5."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def decimals(values: Iterable[float | None]) -> int:
    """Places behind the point for a column: three digits of its largest number, and two of its smallest."""
    sizes = [abs(v) for v in values if v]
    if not sizes:
        return 0
    return min(6, max(0, 2 - math.floor(math.log10(max(sizes))), 1 - math.floor(math.log10(min(sizes)))))
