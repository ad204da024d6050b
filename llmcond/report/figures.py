"""Figures: vectors, scores, intervals and distributions."""

from __future__ import annotations

import itertools
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError, escape_control_characters, format_count, install_command
from llmcond.files import (
    FIGURE_SUFFIXES,
    check_output,
    replace_atomically,
    suffix,
    write_csv,
)
from llmcond.log import log
from llmcond.text import shorten

if TYPE_CHECKING:
    from llmcond.evaluation.breakdown import Level

#: The legal suffixes of a figure.

#: An x value, a score and both ends of its interval; NaN for what is undefined leaves a gap.
Point = tuple[Any, float, float, float]

# Okabe and Ito's palette for colour-blind readers, without its yellow, which is too pale for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Shapes distinguish series in print without colour. There is one fewer than colours, so that a
# pair of colour and shape repeats late.
_SHAPES = ("o", "s", "^", "D", "v", "P")

# The style is set for each picture, so that the output depends on neither a matplotlibrc file nor
# the time of day.
_STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.08,
    "legend.frameon": False,
    "savefig.bbox": None,
    # Text is saved as outlines, because the reader's computer may lack the font.
    "svg.fonttype": "path",
    "svg.hashsalt": "llmcond",
}

_DPI = 200

# Without a date and a version, the same data give the same file.
_METADATA: Any = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}

# With more points than this, an SVG would be too large to open, so they are embedded as an image.
_MAX_VECTOR_POINTS = 5_000

# Up to this many x values each have a mark and an interval, and ticks if there is room.
_MAX_MARKS = 15

# Font files for scripts that the default font lacks.
_FALLBACK_FONTS = re.compile(
    r"NotoSans(CJK|JP|SC|KR|Devanagari|Bengali|Tamil|Telugu|Kannada|Malayalam|Gujarati|Gurmukhi|"
    r"Sinhala|Thai|Lao|Khmer|Myanmar|Hebrew|Arabic|Ethiopic|Georgian|Armenian|Symbols2?)-Regular|"
    r"NotoEmoji-Regular|Nirmala|LeelawUI|YuGothR|msyh|malgun|Arial Unicode|PingFang|AppleGothic",
    re.IGNORECASE,
)

# The largest number of clusters in the legend of a map.
_MAX_LEGEND = 20

# The number of bins of a histogram.
_BINS = 60

# The width of a character in a label, in inches.
_CHARACTER_WIDTH = 0.08


def plot_clusters(
    before: NDArray[np.floating],
    after: NDArray[np.floating],
    labels: NDArray[np.int64],
    names: Sequence[str],
    path: Path,
    titles: tuple[str, str],
) -> None:
    """Plot vectors before and after a head, coloured by condition (Hyper-CL, figure 4).

    The points are also written as CSV; see ``data_path``.

    Args:
        before: (n, 2) the encoder's vectors projected onto a plane.
        after: (n, 2) the head's embeddings projected onto a plane, in the same order.
        labels: (n,) the condition of each vector, as an index into ``names``.
        names: the conditions.
        path: the .png, .svg or .pdf file to write.
        titles: the titles of the two panels.

    Raises:
        UserError: matplotlib is not installed.
    """
    columns = ("condition", "before_x", "before_y", "after_x", "after_y")
    rows = (
        (names[label], *point) for label, *point in zip(labels, *before.T, *after.T, strict=True)
    )
    with draw_figure(path, (9.0, 4.6), columns, rows) as figure:
        panels = figure.subplots(1, 2)
        for axes, points, title in zip(panels, (before, after), titles, strict=True):
            _scatter(axes, points, labels, len(names))
            axes.set_title(wrap_text(title, 50))
        _legend(figure, names, "points")


@dataclass(frozen=True, slots=True)
class MapPanel:
    """A map of texts, as a panel of a figure.

    Attributes:
        title: The title.
        points: (n, 2) the positions of the texts, from 0 to 1; y points down.
        labels: (n,) the cluster of each text; -1: in none.
        clusters: The text of the legend for each cluster, in the order of the legend.
    """

    title: str
    points: NDArray[np.float64]
    labels: NDArray[np.int64]
    clusters: Mapping[int, str]


def plot_maps(panels: Sequence[MapPanel], texts: Sequence[str], path: Path, caption: str) -> None:
    """Plot maps of the same n texts, one below the other, each with the number of every cluster.

    The positions are also written as CSV; see ``data_path``.

    Args:
        panels: the maps.
        texts: (n,) the texts, for the CSV.
        path: the .png, .svg or .pdf file to write.
        caption: the text above the maps.

    Raises:
        UserError: matplotlib is not installed.
    """
    columns = ("map", "x", "y", "cluster", "name", "text")
    rows = (
        (panel.title, *point, label, panel.clusters[label], text)
        for panel in panels
        for point, label, text in zip(
            panel.points.tolist(), panel.labels.tolist(), texts, strict=True
        )
    )
    with draw_figure(path, (9.0, 0.6 + 5.2 * len(panels)), columns, rows) as figure:
        grid = figure.subplots(len(panels), 1, squeeze=False).flat
        for axes, panel in zip(grid, panels, strict=True):
            _draw_map(axes, panel)
        figure.suptitle(wrap_text(caption, 120), fontsize="small", x=0.02, ha="left")


def _draw_map(axes: Any, panel: MapPanel) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import withStroke

    points = panel.points * [1, -1]
    inside = panel.labels >= 0
    numbers = {number: i for i, number in enumerate(sorted(set(panel.clusters) - {-1}))}
    if not inside.all():
        axes.scatter(*points[~inside].T, s=6, color="#999999", linewidths=0)
    if inside.any():
        positions = np.array([numbers[label] for label in panel.labels[inside].tolist()])
        _scatter(axes, points[inside], positions, len(numbers))
    halo = [withStroke(linewidth=2, foreground="white")]
    for number in numbers:
        if (panel.labels == number).any():
            # The number is next to the cluster's centre, so that it does not hide a small cluster.
            centre = np.median(points[panel.labels == number], axis=0)
            style = {"fontsize": 9, "fontweight": "bold", "path_effects": halo}
            axes.annotate(str(number), centre, (6, 4), textcoords="offset points", **style)
    axes.set_title(wrap_text(panel.title, 60), loc="left")
    handles, labels = [], []
    for number, text in list(panel.clusters.items())[:_MAX_LEGEND]:
        colour, shape = ("#999999", ".") if number < 0 else _style_of(numbers[number])
        handles.append(Line2D([], [], color=colour, marker=shape, markersize=6, linestyle="none"))
        labels.append(wrap_text(shorten(text, 80), 42))
    n_more = len(panel.clusters) - len(handles)
    if n_more:
        handles.append(Line2D([], [], linestyle="none"))
        labels.append(f"and {format_count(n_more, 'smaller cluster')}")
    axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.02, 1.0), fontsize=8)


def plot_curve(
    series: Mapping[str, Iterable[Point]],
    path: Path,
    xlabel: str,
    ylabel: str,
    log_x: bool = False,
    band: str = "",
) -> None:
    """Plot scores with a band against dimensions or steps (CASE, figures 3 and 4).

    The points are also written as CSV; see ``data_path``.

    Args:
        series: the points of each series by its name, in any order of x.
        path: the .png, .svg or .pdf file to write.
        xlabel: the label of the x axis.
        ylabel: the label of the y axis.
        log_x: whether the x axis is logarithmic; every x is then above 0.
        band: the caption that explains the line and the band.

    Raises:
        UserError: matplotlib is not installed.
    """
    ordered = {name: sorted(set(points)) for name, points in series.items()}
    curves = {name: np.array(points, dtype=np.float64).T for name, points in ordered.items()}
    columns = ("series", xlabel, ylabel, "low", "high")
    rows = ((name, *point) for name, points in ordered.items() for point in points)
    with draw_figure(path, (7.0, 4.6), columns, rows) as figure:
        axes = figure.subplots()
        for i, (x, mean, low, high) in enumerate(curves.values()):
            colour, shape = _style_of(i)
            # Many marks would hide their line and each other.
            every = -(-len(x) // _MAX_MARKS)
            start = i * every // len(curves)
            marks = {"marker": shape, "markersize": 6, "markevery": (start, every)}
            axes.plot(x, mean, color=colour, **marks)
            known = np.isfinite(low) & np.isfinite(high)
            axes.fill_between(x, low, high, where=known, color=colour, alpha=0.15, linewidth=0)
            if every == 1 and known.any():
                # A band has no width at an isolated point, so each point also has a vertical line.
                ends = low[known], high[known]
                axes.vlines(x[known], *ends, color=colour, alpha=0.5, linewidth=1.2)
        if log_x:
            axes.set_xscale("log")
        _set_ticks(axes, np.unique(np.concatenate([x for x, *_ in curves.values()])), log_x)
        axes.set_xlabel(wrap_text(xlabel, 80))
        axes.set_ylabel(wrap_text(ylabel, 44))
        axes.set_title(wrap_text(band, 90), fontsize="small", loc="left")
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        _legend(figure, list(curves), "lines")


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its interval, in a figure of intervals.

    Attributes:
        label: The label of its line; several series may share a label.
        series: The name of its series.
        value: The value.
        low: The lower end of the interval; NaN if there is none.
        high: The upper end, likewise.
    """

    label: str
    series: str
    value: float
    low: float
    high: float


def plot_intervals(
    rows: Sequence[Interval],
    path: Path,
    xlabel: str,
    caption: str,
    reference: float | None = None,
) -> None:
    """Plot values with their intervals, one line for each label (a forest plot).

    The values are also written as CSV; see ``data_path``.

    Args:
        rows: the values, from top to bottom.
        path: the .png, .svg or .pdf file to write.
        xlabel: the label of the x axis.
        caption: the text that explains the bars.
        reference: the value of a dashed vertical line; None for none.

    Raises:
        UserError: matplotlib is not installed.
    """
    labels = list(dict.fromkeys(row.label for row in rows))
    series = list(dict.fromkeys(row.series for row in rows))
    slots = Counter(row.label for row in rows)
    size = (7.0, 1.2 + len(labels) * max(0.3, 0.2 * max(slots.values())))
    columns = [field.name for field in fields(Interval)]
    with draw_figure(path, size, columns, map(astuple, rows)) as figure:
        axes = figure.subplots()
        if reference is not None:
            axes.axvline(reference, color="#888888", linestyle="--", linewidth=1)
        n_plotted: Counter[str] = Counter()
        for row in rows:
            offset = (n_plotted[row.label] - (slots[row.label] - 1) / 2) * 0.8 / max(slots.values())
            y = labels.index(row.label) + offset
            n_plotted[row.label] += 1
            colour, shape = _style_of(series.index(row.series))
            axes.hlines(y, row.low, row.high, color=colour, alpha=0.6, linewidth=1.6)
            axes.plot(row.value, y, color=colour, marker=shape, markersize=6, linestyle="none")
        axes.set_yticks(range(len(labels)), [wrap_text(label, 40) for label in labels])
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(wrap_text(xlabel, 80))
        figure.suptitle(wrap_text(caption, 100), fontsize="small", x=0.02, ha="left")
        axes.grid(axis="x", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        if len(series) > 1:
            _legend(figure, series, "points")


def plot_histograms(
    panels: Mapping[str, Mapping[str, NDArray[np.floating]]],
    path: Path,
    xlabel: str,
    noun: str,
    caption: str,
) -> None:
    """Plot the distributions of values, with one panel for each group of series.

    All panels have the same bins. The numbers in the bins are also written as CSV; see
    ``data_path``.

    Args:
        panels: the (n,) finite values of each series, by the titles of the panels and the names of
            the series.
        path: the .png, .svg or .pdf file to write.
        xlabel: the label of the x axis.
        noun: what has the values, in the plural.
        caption: the text that explains the panels.

    Raises:
        UserError: matplotlib is not installed.
    """
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    everything = np.concatenate([v for series in panels.values() for v in series.values()])
    edges = np.histogram_bin_edges(everything, _BINS)
    counts = {
        (title, name): np.histogram(values, edges)[0]
        for title, series in panels.items()
        for name, values in series.items()
    }
    columns = ("panel", "series", "from", "to", noun, "percent")
    rows = (
        (title, name, low, high, count, 100 * count / max(1, bins.sum()))
        for (title, name), bins in counts.items()
        for low, high, count in zip(edges, edges[1:], bins, strict=False)
    )
    n_columns = 1 if len(panels) == 1 else 2
    n_rows = -(-len(panels) // n_columns)
    with draw_figure(path, (4.6 * n_columns, 0.9 + 2.2 * n_rows), columns, rows) as figure:
        grid = figure.subplots(n_rows, n_columns, sharex=True, squeeze=False).flat
        for (title, series), axes in zip(panels.items(), grid, strict=False):
            for name, values in series.items():
                colour, _ = _style_of(names.index(name))
                percent = 100 * counts[title, name] / max(1, len(values))
                axes.stairs(percent, edges, fill=True, color=colour, alpha=0.35)
                axes.stairs(percent, edges, color=colour, linewidth=1.2)
                if len(values):
                    axes.axvline(values.mean(), color=colour, linestyle="--", linewidth=1)
            axes.set_title(wrap_text(title, 50))
            axes.set_xlabel(wrap_text(xlabel, 50))
            axes.set_ylabel(f"% of {noun}")
            axes.tick_params(labelbottom=True)
        for axes in grid:  # those that are left
            axes.set_visible(False)
        figure.suptitle(wrap_text(caption, 120), fontsize="small", x=0.02, ha="left")
        _legend(figure, names, "areas")


def plot_predictions(
    systems: Mapping[str, Sequence[Level]], path: Path, xlabel: str, ylabel: str, caption: str
) -> None:
    """Plot the distribution of predictions at each rating, with one panel for each system.

    The numbers are also written as CSV; see ``data_path``.

    Args:
        systems: the predictions of each system by its name, in ascending order of the ratings.
        path: the .png, .svg or .pdf file to write.
        xlabel: the label of the x axes.
        ylabel: the label of the y axis.
        caption: the text that explains the marks.

    Raises:
        UserError: matplotlib is not installed.
    """
    from llmcond.evaluation.breakdown import Level  # which imports scipy

    columns = ("system", *(field.name for field in fields(Level)))
    rows = ((name, *astuple(level)) for name, levels in systems.items() for level in levels)
    with draw_figure(path, (4.6 * len(systems), 4.0), columns, rows) as figure:
        panels = figure.subplots(1, len(systems), sharey=True, squeeze=False).flat
        for i, (axes, (name, levels)) in enumerate(zip(panels, systems.items(), strict=True)):
            colour, shape = _style_of(i)
            table = np.array([astuple(level) for level in levels], dtype=np.float64)
            rating, _, mean, low, median, high = table.T
            axes.vlines(rating, low, high, color=colour, alpha=0.4, linewidth=5)
            axes.plot(rating, median, color="black", marker="_", markersize=11, linestyle="none")
            axes.plot(rating, mean, color=colour, marker=shape, markersize=6)
            axes.set_title(wrap_text(name, 42))
            axes.set_xlabel(xlabel)
            axes.grid(axis="y", color="#dddddd", linewidth=0.8)
            axes.set_axisbelow(True)
        figure.axes[0].set_ylabel(ylabel)
        figure.suptitle(wrap_text(caption, 55 * len(systems)), fontsize="small", x=0.02, ha="left")


def has_matplotlib() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_matplotlib() -> None:
    """Raise a UserError unless matplotlib is installed."""
    if not has_matplotlib():
        raise UserError(
            "pictures need matplotlib, which is not installed. Install it: "
            f"{install_command('plots')}."
        )


def check_figure(path: Path) -> None:
    """Check, before long work, that a figure and its data can be written.

    Raises:
        UserError: the path has another suffix than ``FIGURE_SUFFIXES``, it cannot be written, or
            matplotlib is not installed.
    """
    check_output(path, FIGURE_SUFFIXES)
    check_output(data_path(path), (".csv",))
    check_matplotlib()


def data_path(path: Path) -> Path:
    """Return the file of the numbers that a figure shows: ``steps-data.csv`` for ``steps.svg``."""
    return path.with_name(f"{path.stem}-data.csv")


@contextmanager
def draw_figure(
    path: Path,
    size: tuple[float, float],
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
) -> Iterator[Any]:
    """Yield a matplotlib figure to draw on, and save it and its data at the end of the block.

    Args:
        path: the .png, .svg or .pdf file to write.
        size: the width and height in inches.
        columns: the headings of the data.
        rows: the data, one row for each point or bar of the figure.

    Raises:
        UserError: matplotlib is not installed.
    """
    kind = suffix(path)
    check_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        # pyplot is avoided, because it keeps every figure in memory and may open a window.
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
        yield figure
        with replace_atomically(path) as temporary:
            is_complete = _save_figure(figure, temporary, kind)
            if not is_complete:
                _add_fallback_fonts(figure)
                is_complete = _save_figure(figure, temporary, kind)
    if not is_complete:
        log.info(
            f"{path} lacks characters that no installed font has. Install the Noto fonts, and run "
            "the same command again"
        )
    write_csv(data_path(path), columns, rows)
    log.info(f"picture -> {path}")


def _save_figure(figure: Any, path: Path, kind: str) -> bool:
    """Save a figure as a file of a kind such as ``.png``; return whether it has every character."""
    with warnings.catch_warnings(record=True) as missing:
        warnings.filterwarnings("always", "Glyph .* missing from font")
        figure.savefig(path, format=kind[1:], metadata=_METADATA[kind])
    return not missing


def _add_fallback_fonts(figure: Any) -> None:
    """Let a figure use installed fonts for the characters that the default font lacks."""
    from matplotlib.font_manager import FontProperties, findSystemFonts, fontManager
    from matplotlib.text import Text

    # Fonts that were installed recently are not in matplotlib's list.
    paths = [path for path in sorted(findSystemFonts()) if _FALLBACK_FONTS.match(Path(path).name)]
    for path in paths:
        fontManager.addfont(path)
    names = [FontProperties(fname=path).get_name() for path in paths]
    for text in figure.findobj(
        lambda part: isinstance(part, Text) and not part.get_text().isascii()
    ):
        text.set_fontfamily(["DejaVu Sans", *names])


def _style_of(i: int) -> tuple[str, str]:
    """Return the colour and the marker of the i-th series."""
    return COLOURS[i % len(COLOURS)], _SHAPES[i % len(_SHAPES)]


def _scatter(
    axes: Any, points: NDArray[np.floating], labels: NDArray[np.int64], n_labels: int
) -> None:
    size = float(np.clip(4_000 / len(points), 6, 42))
    marks = {"edgecolors": "white", "linewidths": 0.4 if size > 10 else 0}
    marks["rasterized"] = len(points) > _MAX_VECTOR_POINTS
    # Points are drawn in ten random turns, so that no condition covers all others.
    turns = np.random.default_rng(0).integers(10, size=len(points))
    for turn, i in itertools.product(range(10), range(n_labels)):
        x, y = points[(labels == i) & (turns == turn)].T
        colour, shape = _style_of(i)
        axes.scatter(x, y, s=size, color=colour, marker=shape, alpha=0.85, **marks)
    # Only distances are meaningful in a projection, so both axes have the same scale.
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.08)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(visible=True, color="#bbbbbb")


def _legend(figure: Any, names: Sequence[str], marks: Literal["lines", "points", "areas"]) -> None:
    """Put the legend below the panels, where it covers no data, and make room for it."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    labels = [wrap_text(name, 40) for name in names]
    handles: list[Any] = []
    for i in range(len(names)):
        colour, shape = _style_of(i)
        style = "-" if marks == "lines" else "none"
        if marks == "areas":
            handles.append(Patch(color=colour, alpha=0.5))
        else:
            line = Line2D([], [], color=colour, marker=shape, markersize=6, linestyle=style)
            handles.append(line)
    width, height = figure.get_size_inches()
    # Use as many columns as fit into the width.
    for columns in (4, 3, 2, 1):
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        box = legend.get_window_extent()
        if columns == 1 or box.width <= width * figure.dpi:
            break
        legend.remove()
    figure.set_size_inches(width, height + box.height / figure.dpi)


def _set_ticks(axes: Any, x: NDArray[np.float64], log_x: bool) -> None:
    """Put ticks at the x values that have room; if there are many, at round numbers."""
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    if len(x) > _MAX_MARKS:
        if not log_x:
            axes.xaxis.set_major_formatter(StrMethodFormatter(_TICK))
        return
    positions = np.log(x) if log_x else x
    inches = positions / (float(np.ptp(positions)) or 1.0) * 0.8 * axes.figure.get_size_inches()[0]
    tick_indices: list[int] = []
    for i in reversed(range(len(x))):
        # Neighbouring ticks need half the width of both labels, and a space.
        labels = [_TICK.format(x=x[j]) for j in (i, *tick_indices[-1:])]
        room = (sum(map(len, labels)) / 2 + 1.5) * _CHARACTER_WIDTH
        if not tick_indices or inches[tick_indices[-1]] - inches[i] >= room:
            tick_indices.append(i)
    axes.set_xticks(x[tick_indices])
    axes.xaxis.set_major_formatter(StrMethodFormatter(_TICK))
    axes.xaxis.set_minor_locator(NullLocator())


_TICK = "{x:,.10g}"


def wrap_text(text: str, width: int) -> str:
    r"""Wrap a label into lines, without control characters and without mathematics.

    Matplotlib reads text between two dollar signs as mathematics; ``\$`` is a literal dollar sign.
    """
    lines = textwrap.wrap(escape_control_characters(text), width, break_on_hyphens=False)
    return "\n".join(lines).replace("$", r"\$")
