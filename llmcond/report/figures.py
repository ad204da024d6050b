"""Pictures: vectors in a plane by condition, and scores along dimensions or steps."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError, install_command, printable
from llmcond.files import replacing
from llmcond.log import log

#: x, a score, and both ends of its interval; NaN in the last three leaves a gap.
Point = tuple[Any, float, float, float]

# Okabe and Ito's palette, which colour-blind people can read, less its yellow: too pale for lines.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Shapes as well, for print without colour; one fewer than colours, so that pairs repeat late.
_SHAPES = ("o", "s", "^", "D", "v", "P")

# Set for each picture, so that neither a matplotlibrc nor the time of day changes it.
_STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.08,
    "legend.frameon": False,
    "savefig.bbox": None,
    # As outlines: the reader's computer may lack the font.
    "svg.fonttype": "path",
    "svg.hashsalt": "llmcond",
}

_DPI = 200

# More points than that make an SVG too large to open; they are put into it as an image.
_MANY = 5_000

# Marks and intervals at each x, and ticks where they have room, if there are so few.
_FEW = 15

# The width of a character, in inches.
_CHARACTER = 0.08


def plot_clusters(
    before: NDArray[np.floating],
    after: NDArray[np.floating],
    labels: NDArray[np.int64],
    names: Sequence[str],
    path: Path,
    titles: tuple[str, str],
) -> None:
    """Draw vectors before and after a head, coloured by condition (Hyper-CL, figure 4).

    Args:
        before: (n, 2) a plane picture of the encoder's vectors.
        after: (n, 2) one of the head's embeddings, in the same order.
        labels: (n,) positions in ``names``.
        names: the conditions.
        path: a .png or .svg file.
        titles: of the panels.

    Raises:
        UserError: matplotlib is not installed.
    """
    with _picture(path, (9.0, 4.6)) as figure:
        panels = figure.subplots(1, 2)
        for axes, points, title in zip(panels, (before, after), titles, strict=True):
            _scatter(axes, points, labels, len(names))
            axes.set_title(_shown(title, 50))
        _legend(figure, names, lines=False)


def plot_curve(
    series: Mapping[str, Iterable[Point]],
    path: Path,
    xlabel: str,
    ylabel: str,
    log_x: bool = False,
    band: str = "",
) -> None:
    """Draw scores with a band along dimensions or steps (CASE, figures 3 and 4).

    Each series has a name and distinct points, in any order of x, which is above 0 for ``log_x``, a
    logarithmic scale. ``band`` says above the picture what the lower and upper values are.

    Raises:
        UserError: matplotlib is not installed.
    """
    ordered = {name: sorted(set(points)) for name, points in series.items()}
    curves = {name: np.array(points, dtype=np.float64).T for name, points in ordered.items()}
    with _picture(path, (7.0, 4.6)) as figure:
        axes = figure.subplots()
        for i, (x, mean, low, high) in enumerate(curves.values()):
            colour, shape = _look(i)
            # Many marks would hide their line, and each other.
            every = -(-len(x) // _FEW)
            start = i * every // len(curves)
            marks = {"marker": shape, "markersize": 6, "markevery": (start, every)}
            axes.plot(x, mean, color=colour, **marks)
            axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            if every == 1:
                # A band has no width at a point that stands alone.
                axes.vlines(x, low, high, color=colour, alpha=0.5, linewidth=1.2)
        if log_x:
            axes.set_xscale("log")
        _ticks(axes, np.unique(np.concatenate([x for x, *_ in curves.values()])), log_x)
        axes.set_xlabel(_shown(xlabel, 80))
        axes.set_ylabel(_shown(ylabel, 44))
        axes.set_title(band, fontsize="small", loc="left")
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        _legend(figure, list(curves), lines=True)
    log.info(f"picture -> {path}")


def has_matplotlib() -> bool:
    """Return whether pictures can be drawn."""
    return find_spec("matplotlib") is not None


def check_matplotlib() -> None:
    """Raise a UserError unless pictures can be drawn."""
    if not has_matplotlib():
        raise UserError(f"pictures need matplotlib: {install_command('plots')}.")


@contextmanager
def _picture(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Yield a figure of some inches to draw on, and save it as a .png or .svg file."""
    kind = path.suffix.lower()
    check_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        # Not pyplot, which keeps every figure and may open a window.
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
        yield figure
        # No date and no version: the same data give the same file.
        metadata = {"Date": None} if kind == ".svg" else {"Software": None}
        with replacing(path) as temporary:
            figure.savefig(temporary, format=kind[1:], metadata=metadata)


def _look(i: int) -> tuple[str, str]:
    """Return the colour and the mark of the i-th series."""
    return _COLOURS[i % len(_COLOURS)], _SHAPES[i % len(_SHAPES)]


def _scatter(
    axes: Any, points: NDArray[np.floating], kinds: NDArray[np.int64], n_kinds: int
) -> None:
    size = float(np.clip(4_000 / len(points), 6, 42))
    marks = {"edgecolors": "white", "linewidths": 0.4 if size > 10 else 0}
    marks["rasterized"] = len(points) > _MANY
    # In turns, so that no condition is drawn over all others.
    turn = np.random.default_rng(0).integers(10, size=len(points))
    for now, i in itertools.product(range(10), range(n_kinds)):
        x, y = points[(kinds == i) & (turn == now)].T
        colour, shape = _look(i)
        axes.scatter(x, y, s=size, color=colour, marker=shape, alpha=0.85, **marks)
    # Only distances mean something in a projection, and they are the same both ways.
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.08)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color="#bbbbbb")


def _legend(figure: Any, names: Sequence[str], lines: bool) -> None:
    """Put the legend below everything, where it covers no data, and make room for it."""
    from matplotlib.lines import Line2D

    shown = [_shown(name, 40) for name in names]
    handles = []
    for i in range(len(names)):
        colour, shape = _look(i)
        style = "-" if lines else "none"
        handles.append(Line2D([], [], color=colour, marker=shape, markersize=6, linestyle=style))
    width, height = figure.get_size_inches()
    # As many columns as there is width for.
    for columns in (4, 3, 2, 1):
        legend = figure.legend(handles, shown, loc="outside lower center", ncols=columns)
        box = legend.get_window_extent()
        if columns == 1 or box.width <= width * figure.dpi:
            break
        legend.remove()
    figure.set_size_inches(width, height + box.height / figure.dpi)


def _ticks(axes: Any, x: NDArray[np.float64], log_x: bool) -> None:
    """Put ticks at the x values themselves, as far as they have room; at round ones for many."""
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    if len(x) > _FEW:
        if not log_x:
            axes.xaxis.set_major_formatter(StrMethodFormatter(_TICK))
        return
    place = np.log(x) if log_x else x
    inches = place / (float(np.ptp(place)) or 1.0) * 0.8 * axes.figure.get_size_inches()[0]
    kept: list[int] = []
    for i in reversed(range(len(x))):
        # Half of both labels, and a space.
        labels = [_TICK.format(x=x[j]) for j in (i, *kept[-1:])]
        room = (sum(map(len, labels)) / 2 + 1.5) * _CHARACTER
        if not kept or inches[kept[-1]] - inches[i] >= room:
            kept.append(i)
    axes.set_xticks(x[kept])
    axes.xaxis.set_major_formatter(StrMethodFormatter(_TICK))
    axes.xaxis.set_minor_locator(NullLocator())


_TICK = "{x:,.10g}"


def _shown(text: str, width: int) -> str:
    r"""Return a text as it is to be read: in lines, without mathematics and control characters.

    Between two dollar signs matplotlib reads mathematics; ``\$`` is the sign itself.
    """
    lines = textwrap.wrap(printable(text), width, break_on_hyphens=False)
    return "\n".join(lines).replace("$", r"\$")
