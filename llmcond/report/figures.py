"""Figures in files: charts of Altair, saved by vl-convert with their numbers as CSV."""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmcond.base.errors import escape_control_characters
from llmcond.base.files import as_json, data_path, replace_atomically, suffix, write_csv
from llmcond.base.output import log
from llmcond.base.text import shorten
from llmcond.evaluation.results import Result, format_settings
from llmcond.heads.numpy_heads import score_key
from llmcond.report.tables import axis_label

if TYPE_CHECKING:
    from llmcond.evaluation.analyses import Level

#: An x value, a score and both ends of its interval; NaN or None for what is undefined.
Point = tuple[Any, float, float | None, float | None]

#: Okabe and Ito's palette for colour-blind readers, without its yellow, which is too pale for
#: lines. It replaces the colours of the page, which follow the light or dark theme.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_PRINTED = {f"var(--series-{i})": colour for i, colour in enumerate(_COLOURS, 1)} | {
    "var(--ink)": "#1c1d1f",
    "var(--muted)": "#5c5f66",
    "var(--line)": "#deddd8",
}
#: The number of pixels per unit of a PNG.
_SCALE = 2.0
#: Up to this many x values each have a mark, an interval and a tick.
_MAX_MARKS = 15
#: The largest number of clusters in the legend of a map.
_MAX_LEGEND = 20
#: The number of bins of a histogram.
_BINS = 60
_NO_INTERVAL = "two seeds or few rows have none"

# -- files -------------------------------------------------------------------------------------


def _save(
    chart: Any, path: Path, caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    """Save a chart with a caption above it, and its data.

    Args:
        chart: a chart of Altair, or a specification of the page.
        path: the .png, .svg or .pdf file to write.
        caption: the text above the chart.
        columns: the headings of the data.
        rows: the data, one row for each point or bar of the chart.
    """
    import vl_convert

    from llmcond.report.charts import CONFIG

    spec = chart if isinstance(chart, dict) else chart.to_dict()
    title = {"text": textwrap.wrap(caption, 100), "anchor": "start", "offset": 12}
    legend = {"orient": "bottom", "labelLimit": 0, "symbolLimit": 0, "symbolOpacity": 1}
    spec["config"] = {
        **CONFIG,
        "background": "white",
        "legend": legend,
        "header": {"labelFontWeight": "bold", "labelLimit": 360},
        "title": {"fontWeight": "normal", "fontSize": 12},
    }
    text = json.dumps(_clean(spec | ({"title": title} if caption else {})))
    for variable, colour in _PRINTED.items():
        text = text.replace(variable, colour)
    _write_svg(vl_convert.vegalite_to_svg(text), path, columns, rows)


def _write_svg(
    svg: str, path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    import vl_convert

    form = suffix(path)
    with replace_atomically(path) as temporary:
        if form == ".svg":
            content = svg.encode()
        elif form == ".pdf":
            content = vl_convert.svg_to_pdf(svg)
        else:
            content = vl_convert.svg_to_png(svg, scale=_SCALE)
        temporary.write_bytes(content)
    write_csv(data_path(path), columns, rows)
    log.info(f"picture -> {path}")


def _clean(value: Any) -> Any:
    """Return a specification without control characters, NaN and types of NumPy."""
    if isinstance(value, Mapping):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return escape_control_characters(value) if isinstance(value, str) else as_json(value)


def _data(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Any:
    """Return rows as inline data for a chart."""
    import altair as alt

    values = [dict(zip(columns, row, strict=True)) for row in rows]
    return alt.InlineData(values=_clean(values))


def _series(names: Sequence[str], legend: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """Return the encodings of series by colour and mark, with one legend."""
    from llmcond.report.charts import series_encoding

    names = _clean(names)
    colour, shape = series_encoding(names)
    if len(names) == 1 and legend is None:
        return colour, shape
    columns = max(1, 100 // (max(map(len, names)) + 6))
    options = {"title": None, "columns": columns, **(legend or {})}
    return colour.legend(**options), shape.legend(**options)


# -- vectors on a plane ------------------------------------------------------------------------


def _scatter(
    points: NDArray[np.floating], series: Sequence[str], encodings: tuple[Any, Any]
) -> Any:
    """Return a chart of points in a square, since only distances are meaningful."""
    import altair as alt

    # Points are drawn in random order, so that no series covers all others.
    order = np.random.default_rng(0).permutation(len(points))
    data = _data(("series", "x", "y"), ((series[i], *points[i]) for i in order))
    low, high = points.min(axis=0), points.max(axis=0)
    half, centre = 0.55 * (float((high - low).max()) or 1.0), (low + high) / 2
    x, y = (
        channel(f"{name}:Q", axis=None).scale(
            domain=[float(middle) - half, float(middle) + half], nice=False, zero=False
        )
        for channel, name, middle in ((alt.X, "x", centre[0]), (alt.Y, "y", centre[1]))
    )
    colour, shape = encodings
    size = float(np.clip(8_000 / len(points), 12, 70))
    marks = alt.Chart(data).mark_point(filled=True, size=size, opacity=0.8)
    chart = marks.encode(x=x, y=y, color=colour, shape=shape)
    return chart.properties(width=360, height=360, view=alt.ViewConfig(stroke="#bbbbbb"))


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

    Hyper-CL's figure 4 has such maps of embeddings by condition, before and after a head.

    The positions are also written as CSV; see ``data_path``.

    Args:
        panels: the maps.
        texts: (n,) the texts, for the CSV.
        path: the .png, .svg or .pdf file to write.
        caption: the text above the maps.
    """
    import altair as alt

    columns = ("map", "x", "y", "cluster", "name", "text")
    rows = (
        (panel.title, *point, label, panel.clusters[label], text)
        for panel in panels
        for point, label, text in zip(
            panel.points.tolist(), panel.labels.tolist(), texts, strict=True
        )
    )
    charts = alt.vconcat(*map(_draw_map, panels))
    charts = charts.resolve_scale(color="independent", shape="independent")
    _save(charts, path, caption, columns, rows)


def _draw_map(panel: MapPanel) -> Any:
    import altair as alt

    from llmcond.report.charts import series_style

    points = panel.points * [1, -1]
    # Texts in no cluster are grey.
    names = {number: shorten(text, 80) for number, text in panel.clusters.items()}
    shown = list(names.values())[:_MAX_LEGEND]
    more = len(names) > len(shown)
    legend: Any = {
        "title": f"the {_MAX_LEGEND} largest of {len(names)} clusters" if more else None,
        "values": shown,
        "columns": 1,
        "orient": "right",
    }
    colour, shape = _series(list(names.values()), legend=legend)
    colours = ["#999999" if n < 0 else series_style(i)[0] for i, n in enumerate(names)]
    colour = colour.scale(domain=_clean(list(names.values())), range=colours)
    series = [names[label] for label in panel.labels.tolist()]
    chart = _scatter(points, series, (colour, shape))
    centres = [
        (str(number), *np.median(points[panel.labels == number], axis=0))
        for number in names
        if number >= 0 and (panel.labels == number).any()
    ]
    text = alt.Chart(_data(("number", "x", "y"), centres)).encode(
        x=chart.encoding.x, y=chart.encoding.y, text="number:N"
    )
    # The number is next to the cluster's centre, so that it does not hide a small cluster.
    style: Any = {"dx": 8, "dy": -6, "fontSize": 11, "fontWeight": "bold"}
    halo = text.mark_text(stroke="white", strokeWidth=3, **style)
    layers = alt.layer(chart, halo, text.mark_text(color="black", **style))
    return layers.properties(width=420, height=420, title=shorten(panel.title, 80))


# -- curves and intervals ----------------------------------------------------------------------


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
    """
    import altair as alt

    rows = [(name, *point) for name, points in series.items() for point in sorted(set(points))]
    ticks = sorted({row[1] for row in rows})
    few = len(ticks) <= _MAX_MARKS
    x = alt.X(
        "x:Q",
        title=xlabel,
        scale=alt.Scale(type="log" if log_x else "linear", zero=False, nice=False, padding=12),
    )
    x = x.axis(
        grid=False, format=",.10~g", labelOverlap=True, values=ticks if few else alt.Undefined
    )
    y = alt.Y("y:Q", title=textwrap.wrap(ylabel, 50)).scale(zero=False)
    colour, shape = _series(list(series))
    base = alt.Chart(_data(("series", "x", "y", "low", "high"), rows)).encode(x=x, color=colour)
    known = base.transform_filter("isValid(datum.low) && isValid(datum.high)")
    ends: Any = {"y": alt.Y("low:Q"), "y2": "high:Q"}
    layers = [
        known.mark_area(opacity=0.15).encode(**ends),
        base.mark_line(strokeWidth=1.5, invalid="break-paths-show-domains").encode(y=y),
    ]
    # Many marks would hide their line and each other. A band has no width at an isolated point, so
    # each point also has a vertical line.
    if few:
        marks = base.mark_point(filled=True, size=50, opacity=1)
        layers += [known.mark_rule(opacity=0.5).encode(**ends), marks.encode(y=y, shape=shape)]
    chart = alt.layer(*layers).properties(width=520, height=320)
    _save(chart, path, band, ("series", xlabel, ylabel, "low", "high"), rows)


def plot_intervals(
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    xlabel: str,
    bar: str,
    reference: float | None = None,
) -> None:
    """Plot values with their intervals, one line for each label (a forest plot).

    The values are also written as CSV; see ``data_path``. No file is written without a row.

    Args:
        rows: the values from top to bottom, as ``interval_chart`` takes them.
        path: the .png, .svg or .pdf file to write.
        xlabel: the label of the x axis.
        bar: what the bars are.
        reference: the value of a dashed vertical line; None for none.
    """
    from llmcond.report.charts import interval_chart

    if not rows:
        return
    columns = ("label", "series", "value", "low", "high")
    values = [_clean({key: row[key] for key in columns}) for row in rows]
    data: list[list[Any]] = [
        [math.nan if row[key] is None else row[key] for key in columns] for row in values
    ]
    for row in data:
        row[0] = row[0].replace("\n", ", ")
    series = list(dict.fromkeys(row["series"] for row in values))
    caption = f"bar: {bar} ({_NO_INTERVAL})"
    legend = len(series) > 1
    chart = interval_chart(values, series, xlabel, caption, reference, legend=legend)
    del chart["autosize"]
    _save({**chart, "width": 480}, path, caption, columns, data)


def plot_predictions(
    systems: Mapping[str, Sequence[Level]], scale: tuple[float, float], path: Path
) -> None:
    """Plot the mean prediction of each system, and its quartiles, at each rating.

    The numbers are also written as CSV; see ``data_path``.

    Args:
        systems: the predictions of each system by its name, in ascending order of the ratings.
        scale: the lowest and the highest rating.
        path: the .png, .svg or .pdf file to write.
    """
    from llmcond.evaluation.analyses import Level
    from llmcond.report.charts import calibration_chart

    columns = ("system", *(field.name for field in fields(Level)))
    rows = [(name, *astuple(level)) for name, levels in systems.items() for level in levels]
    points = [
        dict(zip(columns, row, strict=True)) | {"series": row[0], "place": row[1]} for row in rows
    ]
    spec = calibration_chart(_clean(list(systems)), legend=True)
    del spec["autosize"]
    spec["width"] = 420
    spec["datasets"] = {
        "levels": points,
        "ends": [{"rating": end, "value": value} for value, end in enumerate(scale)],
    }
    caption = "line and mark: mean over rows; bar: middle half of the rows; dashed: equal to rating"
    _save(spec, path, caption, columns, rows)


# -- sweeps and learning curves ----------------------------------------------------------------


def write_plots(
    results: Sequence[Result],
    plot: str | Path | None,
    steps: str | Path | None,
    split: str = "dev",
) -> None:
    """Write the figures of --plot and --plot-steps that are wanted; ``split`` is for steps."""
    if plot is not None:
        plot_settings(results, Path(plot))
    if steps is not None:
        plot_steps(results, Path(steps), split)


def plot_settings(results: Sequence[Result], path: Path) -> None:
    """Plot the primary metric against the first setting with several numbers (CASE, figure 4).

    There is one line for each head, prompt and value of the other settings, with its interval.
    """
    key = _find_numeric_setting(results)
    if key is None:
        log.info(f"{path} was not written: no numeric setting was varied")
        return
    metric = results[0].primary
    series: dict[str, list[Point]] = {}
    for result in results:
        value, low, high = (metric.in_display_unit(figure) for figure in astuple(result.main))
        if value is None or key not in result.settings:
            continue
        name = _line_name(result, {k: v for k, v in result.settings.items() if k != key})
        # A requested dimension is limited to the size of the features, so plot the actual one.
        x = result.dim if key == "dim" else result.settings[key]
        bounds = (math.nan, math.nan) if low is None or high is None else (low, high)
        series.setdefault(name, []).append((x, value, *bounds))
    if not series:
        log.info(f"{path} was not written: no score is defined")
        return
    x_values = sorted({point[0] for points in series.values() for point in points})
    log_x = x_values[0] > 0 and x_values[-1] / x_values[0] > 8
    one_seed = all(len(result.seeds) <= 1 for result in results)
    line = "line: one seed" if one_seed else "line: mean over seeds"
    rows = "rows" if one_seed else "rows and seeds"
    caption = f"{line}; band: 95 % confidence interval over {rows} ({_NO_INTERVAL})"
    plot_curve(series, path, key.replace("_", " "), axis_label(metric), log_x, caption)


def _line_name(result: Result, settings: Mapping[str, Any]) -> str:
    return f"{result.name} {format_settings(settings)}".rstrip()


def _find_numeric_setting(results: Sequence[Result]) -> str | None:
    for key in results[0].settings:
        values = {result.settings.get(key) for result in results}
        if len(values) > 1 and all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in values
        ):
            return str(key)
    return None


def plot_steps(results: Sequence[Result], path: Path, split: str = "dev") -> None:
    """Plot the score on a split against training steps, with the range over seeds (CASE, figure 3).

    The learning curves of the fits must have the scores on this split.
    """
    series: dict[str, list[Point]] = {}
    for result in results:
        fits = [fit for fit in result.fits if fit.get("curve")]
        # A curve ends where its shortest seed ends.
        for epoch, epoch_logs in enumerate(zip(*(fit["curve"] for fit in fits), strict=False)):
            key, general_key = score_key(split, result.primary.name), score_key(split)
            values = [epoch_log.get(key, epoch_log.get(general_key)) for epoch_log in epoch_logs]
            if None not in values:
                steps = epoch_logs[0].get("step") or (epoch + 1) * fits[0]["steps_per_epoch"]
                figures = (statistics.fmean(values), min(values), max(values))
                mean, low, high = (result.primary.factor * figure for figure in figures)
                settings = result.settings
                line = series.setdefault(_line_name(result, settings), [])
                line.append((steps, mean, low, high))
    if not series:
        log.info(f"{path} was not written: no head is trained in steps, or there is no dev split")
        return
    one_seed = all(len(result.fits) <= 1 for result in results)
    band = "line: one seed" if one_seed else "line: mean over seeds; band: range over seeds"
    plot_curve(series, path, "steps", axis_label(results[0].primary, f" on {split}"), band=band)


# -- analyses ------------------------------------------------------------------


def plot_isotropy(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot the distributions of the cosines to the mean vector (CASE, figures 5 and 6).

    There is one panel for each head and prompt, which compares the vectors with and without
    subtraction. All panels have the same bins, whose numbers are also written as CSV; see
    ``data_path``. No file is written if all vectors are zero.

    Args:
        rows: name, head, prompt, subtract and ``cosines`` (n,) of each set of vectors.
        path: the .png, .svg or .pdf file to write.
    """
    import altair as alt

    panels: dict[tuple[str, str], NDArray[np.floating]] = {}
    for row in rows:
        title, series = f"{row['head']}@{row['prompt']}", "minus c" if row["subtract"] else "with c"
        # Fitted heads of the same recipe and prompt have distinct names.
        title = row["name"] if (title, series) in panels else title
        if len(row["cosines"]):
            panels[title, series] = row["cosines"]
    if not panels:
        return
    edges = np.histogram_bin_edges(np.concatenate(list(panels.values())), _BINS)
    data = []
    for key, values in panels.items():
        counts, mean = np.histogram(values, edges)[0], values.mean()
        for bar in zip(edges, edges[1:], counts, 100 * counts / counts.sum(), strict=False):
            data.append((*key, *(number.item() for number in bar), mean))
    columns = ("panel", "series", "from", "to", "vectors", "percent")
    names = list(dict.fromkeys(series for _, series in panels))
    base = alt.Chart(_data((*columns, "mean"), data)).encode(color=_series(names)[0])
    bars = base.mark_area(opacity=0.4, line=True, interpolate="step-after").encode(
        x=alt.X("from:Q", title="cosine to the mean vector").scale(zero=False, nice=False),
        y=alt.Y("percent:Q", title="% of vectors", stack=None),
    )
    means = base.mark_rule(strokeDash=[4, 4]).encode(x="mean(mean):Q")
    titles = list(dict.fromkeys(title for title, _ in panels))
    chart = alt.layer(bars, means).properties(width=300, height=140)
    chart = chart.facet(alt.Facet("panel:N", title=None, sort=titles), columns=2)
    caption = "minus c: the unconditional vector is subtracted; dashed line: mean"
    _save(chart, path, caption, columns, (row[:-1] for row in data))


# -- shaded tokens -----------------------------------------------------------------------------


class ShadedToken(NamedTuple):
    """A token of a figure.

    Attributes:
        text: the token.
        number: its value, which is written below it.
        share: its value as a share of the largest one, from -1 to 1; it decides the shade.
        special: whether it is no part of the sentence.
        continues: whether it continues the word of the token before it.
    """

    text: str
    number: str
    share: float
    special: bool
    continues: bool


class TokenRow(NamedTuple):
    """The tokens of a sentence in a figure, with the row's title and a detail below it."""

    title: str
    detail: str
    tokens: Sequence[ShadedToken]


#: The width of a figure of tokens and of its labels, the height of a line, and the width of a
#: character of a token in a font whose characters have equal widths, in pixels.
_WIDTH, _LABELS, _LINE, _CHARACTER = 860, 190, 46, 7.8
#: Longer tokens are cut.
_MAX_TOKEN = 40


def plot_tokens(
    rows: Sequence[TokenRow],
    path: Path,
    caption: str,
    columns: Sequence[str],
    data: Iterable[Sequence[object]],
) -> None:
    """Plot the tokens of sentences, shaded by their values (CSR, figures 5 to 7).

    Args:
        rows: the tokens of each sentence.
        path: the .png, .svg or .pdf file to write.
        caption: the text below the rows.
        columns: the headings of the data, which are also written as CSV; see ``data_path``.
        data: the data.
    """
    parts, top = ['<rect width="100%" height="100%" fill="white"/>'], 12.0
    for row in rows:
        labels = [*textwrap.wrap(row.title, 26), *textwrap.wrap(row.detail, 30)]
        parts += [_svg_text(text, 12, top + 16 + 17 * i, 12) for i, text in enumerate(labels)]
        tokens, bottom = _draw_tokens(row.tokens, top)
        parts += tokens
        top = max(bottom, top + 17 * len(labels) + 12) + 10
    lines = textwrap.wrap(caption, 120)
    parts += [_svg_text(line, 12, top + 16 + 17 * i, 12) for i, line in enumerate(lines)]
    height = top + 17 * len(lines) + 16
    size = f'width="{_WIDTH}" height="{height:g}" viewBox="0 0 {_WIDTH} {height:g}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>\n'
    _write_svg(svg, path, columns, data)


def _draw_tokens(tokens: Sequence[ShadedToken], top: float) -> tuple[list[str], float]:
    """Return the tokens in lines that begin at ``top``, and the position below the last line."""
    from rich.cells import cell_len

    parts, x, line = [], float(_LABELS), top
    for token in tokens:
        text = token.text if len(token.text) <= _MAX_TOKEN else f"{token.text[:_MAX_TOKEN]}…"
        text = escape_control_characters(text).replace("\n", "\\n")
        width = max(_CHARACTER * cell_len(text), 5.4 * len(token.number)) + 10
        x += 0 if token.continues else 5
        if x + width > _WIDTH - 10 and x > _LABELS + 5:
            x, line = _LABELS + 5, line + _LINE
        colour = _COLOURS[0] if token.share >= 0 else _COLOURS[1]
        opacity = min(abs(token.share), 1.0)
        style = f'text-anchor="middle" fill="{"white" if opacity > 0.65 else "black"}"'
        italic = ' font-style="italic"' if token.special else ""
        box = f'x="{x:g}" y="{line:g}" width="{width:g}" height="{_LINE - 4}"'
        parts += [
            f'<rect {box} fill="{colour}" fill-opacity="{opacity:.3f}"/>',
            _svg_text(text, x + width / 2, line + 18, 13, style + italic, "monospace"),
            _svg_text(token.number, x + width / 2, line + 35, 9, style),
        ]
        x += width
    return parts, line + _LINE


def _svg_text(
    text: str, x: float, y: float, size: int, style: str = "", font: str = "sans-serif"
) -> str:
    style = f'font-family="{font}" font-size="{size}" xml:space="preserve" {style}'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(escape_control_characters(text))}</text>'
