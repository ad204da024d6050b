"""The charts of a page as Vega-Lite specifications, and the libraries that draw them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import altair as alt
import vl_convert

#: The colours of the series, repeated cyclically. There is one mark fewer than colours, so that
#: a pair of colour and mark repeats late.
_COLOURS = tuple(f"var(--series-{i})" for i in range(1, 8))
_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")

_INK, _MUTED, _LINE = "var(--ink)", "var(--muted)", "var(--line)"

#: Axes use the page's font and its colours, which follow the light or dark theme.
CONFIG: Mapping[str, Any] = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": _MUTED,
        "titleColor": _MUTED,
        "gridColor": _LINE,
        "domainColor": _LINE,
        "tickColor": _LINE,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "labelLimit": 150,
    },
    "axisY": {"domain": False, "ticks": False, "labelPadding": 8},
}

#: The rows of a chart's data.
ChartRows = Sequence[Mapping[str, Any]]

#: The height of a mark among several of a row, and of a row with a label of two lines, in pixels.
_MARK_HEIGHT, _ROW_HEIGHT = 15, 40


def series_style(i: int) -> tuple[str, str]:
    """Return the CSS colour and the Vega mark of the i-th series."""
    return _COLOURS[i % len(_COLOURS)], _SHAPES[i % len(_SHAPES)]


@cache
def javascript_bundle() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one self-contained script."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def interval_chart(
    rows: ChartRows,
    series: Sequence[str],
    title: str,
    description: str,
    reference: float | None = None,
    *,
    legend: bool = False,
) -> dict[str, Any]:
    """Return a chart of values with intervals, one line per label, split if it has several values.

    Args:
        rows: label, series, value, low and high; other keys are shown in the tooltip. The values
            of a label are drawn in this order.
        series: the names of the series in the order of their colours and marks.
        title: the title of the axis.
        description: a description for screen readers.
        reference: the value of a dashed line; None to omit it.
        legend: whether the chart has a legend, which the page draws itself.
    """
    counts = Counter(row["label"] for row in rows)
    # The values of a label are centred next to it, whether there is one or there are several.
    used: Counter[str] = Counter()
    placed = []
    for row in rows:
        label = row["label"]
        used[label] += 1
        placed.append({**row, "place": (used[label] - 0.5) / counts[label]})
    y = alt.Y("label:N", sort=list(counts), title=None).axis(
        labelExpr="split(datum.label, '\\n')",
        # The first of two lines stands above the middle of the row.
        labelBaseline={
            "condition": {"test": "indexof(datum.label, '\\n') > 0", "value": "bottom"},
            "value": "middle",
        },
        grid=False,
        domain=False,
    )
    plotted = {"label", "value", "low", "high"}
    tooltip = [alt.Tooltip(f"{key}:N") for key in rows[0] if key not in plotted]
    offset = alt.YOffset("place:Q", scale=alt.Scale(domain=[0, 1]))
    base = alt.Chart(alt.InlineData(values=placed)).encode(y=y, yOffset=offset, tooltip=tooltip)
    x = alt.X("value:Q", title=title, scale=alt.Scale(zero=False, nice=True)).axis(tickCount=8)
    colour, shape = series_encoding("series:N", series)
    if legend:
        colour, shape = colour.legend(title=None), shape.legend(title=None)
    bars = (
        base.transform_filter("isValid(datum.low) && isValid(datum.high)")
        .mark_rule(strokeWidth=2, opacity=0.55, aria=False)
        .encode(x=alt.X("low:Q", title=title), x2="high:Q", color=colour)
    )
    points = base.mark_point(filled=True, size=70, opacity=1, aria=False).encode(
        x=x, color=colour, shape=shape
    )
    layers = [bars, points] if any(row["low"] is not None for row in rows) else [points]
    if reference is not None:
        line = alt.Chart(alt.InlineData(values=[{"value": reference}]))
        layers.insert(0, line.mark_rule(strokeDash=[4, 4], color=_MUTED, aria=False).encode(x=x))
    height = len(counts) * max(max(counts.values()) * _MARK_HEIGHT, _ROW_HEIGHT)
    return _make_spec(alt.layer(*layers), description, height)


def scatter_chart() -> dict[str, Any]:
    """Return a chart of predictions against ratings, with the quartiles at each rating.

    The page's script supplies the datasets ``points`` (x, y, row) and ``levels`` (rating, low,
    median, high).
    """
    x, y = _rating_axis("x:Q"), alt.Y("y:Q", title="predicted similarity").scale(zero=False)
    dots = _chart_of("points").mark_circle(size=22, opacity=0.35, color="var(--mark)", aria=False)
    points = dots.encode(x=x, y=y, tooltip=[alt.Tooltip("row:Q")])
    levels = _chart_of("levels").encode(x=_rating_axis("rating:Q"))
    bars = levels.mark_rule(strokeWidth=4, color=_INK, aria=False)
    medians = levels.mark_tick(
        orient="horizontal", thickness=4, size=22, color=_INK, opacity=1, aria=False
    )
    chart = alt.layer(
        points, bars.encode(y=alt.Y("low:Q"), y2="high:Q"), medians.encode(y="median:Q")
    )
    description = "Predicted similarity of each row against its rating, and quartiles by rating."
    return _make_spec(chart, description, 260)


def calibration_chart() -> dict[str, Any]:
    """Return a chart of the mean prediction at each rating.

    The page's script supplies the datasets ``levels`` (series A or B, rating, place, n, mean, low,
    high) and ``ends``, the two ends of the line on which prediction and rating are equal. ``place``
    is the rating with a small shift that separates the two series.
    """

    def y(field: str) -> Any:
        return alt.Y(field, title="predicted similarity").scale(zero=False)

    colour, shape = series_encoding("series:N", ("A", "B"))
    line = _chart_of("ends").mark_line(strokeDash=[4, 4], color=_MUTED, strokeWidth=1, aria=False)
    tooltip = [
        alt.Tooltip("name:N", title="system"),
        alt.Tooltip("rating:Q", format=".3~f"),
        alt.Tooltip("n:Q", title="rows", format=",d"),
        alt.Tooltip("mean:Q", format=".3f"),
        alt.Tooltip("low:Q", title="lower quartile", format=".3f"),
        alt.Tooltip("high:Q", title="upper quartile", format=".3f"),
    ]
    base = _chart_of("levels").encode(x=_rating_axis("place:Q"), color=colour, tooltip=tooltip)
    bars = base.mark_rule(strokeWidth=2, opacity=0.55, aria=False)
    means = base.mark_line(strokeWidth=2, aria=False)
    points = base.mark_point(filled=True, size=80, opacity=1, aria=False)
    chart = alt.layer(
        line.encode(x=_rating_axis("rating:Q"), y=y("value:Q")),
        bars.encode(y=y("low:Q"), y2="high:Q"),
        means.encode(y=y("mean:Q")),
        points.encode(y=y("mean:Q"), shape=shape),
    )
    return _make_spec(chart, "Mean prediction and quartiles at each rating.", 280)


def hits_chart() -> dict[str, Any]:
    """Return a chart of the share of answers among the first k candidates, by k.

    The page's script supplies the dataset ``points`` (series A or B, name, k, share).
    """
    colour, shape = series_encoding("series:N", ("A", "B"))
    tooltip = [
        alt.Tooltip("name:N", title="system"),
        alt.Tooltip("k:Q", title="among the first", format=",~f"),
        alt.Tooltip("share:Q", format=".1%"),
    ]
    base = _chart_of("points").encode(
        x=alt.X("k:Q", title="k (logarithmic axis)", scale=alt.Scale(type="log")).axis(
            grid=False, format=",d"
        ),
        y=alt.Y("share:Q", title="answers among the first k").axis(format="%"),
        color=colour,
        tooltip=tooltip,
    )
    lines = base.mark_line(strokeWidth=2, aria=False)
    points = base.mark_point(filled=True, size=60, opacity=1, aria=False).encode(shape=shape)
    return _make_spec(
        alt.layer(lines, points), "Share of answers among the first k candidates.", 280
    )


def curve_chart(measure: str, title: str) -> dict[str, Any]:
    """Return a chart of a measure against epochs.

    The page's script supplies the datasets ``chosen`` (seed, epoch, measure), with a line for each
    seed of the selected system, and ``others`` (name, epoch, measure), with the means over seeds of
    all other systems. Either may be empty.
    """
    x = alt.X("epoch:Q", title="epoch").axis(tickMinStep=1, format="d")
    y = alt.Y(f"{measure}:Q", title=title).scale(zero=False)
    lines = _chart_of("others").mark_line(strokeWidth=1.25, color=_MUTED, opacity=0.35, aria=False)
    behind = lines.encode(x=x, y=y, detail="name:N", tooltip=[alt.Tooltip("name:N")])
    tooltip = [
        alt.Tooltip("seed:N"),
        alt.Tooltip("epoch:Q"),
        alt.Tooltip(f"{measure}:Q", title=title, format=".3~f"),
    ]
    front = _chart_of("chosen").encode(x=x, y=y, tooltip=tooltip)
    seeds = front.mark_line(strokeWidth=2, color=_COLOURS[0], aria=False)
    points = front.mark_point(filled=True, size=30, color=_COLOURS[0], opacity=1, aria=False)
    dash = alt.StrokeDash("seed:N", legend=None)
    chart = alt.layer(behind, seeds.encode(strokeDash=dash), points)
    return _make_spec(chart, f"{title} against epochs.", 240)


def _chart_of(data: str) -> Any:
    """Return a chart of the dataset that the page's script supplies under this name."""
    return alt.Chart(alt.NamedData(name=data))


def series_encoding(field: str, names: Sequence[str]) -> tuple[Any, Any]:
    """Return the encodings of series by their colours and marks, without a legend."""
    colours, shapes = zip(*(series_style(i) for i in range(len(names))), strict=True)
    domain = list(names)
    return (
        alt.Color(field, legend=None, scale=alt.Scale(domain=domain, range=list(colours))),
        alt.Shape(field, legend=None, scale=alt.Scale(domain=domain, range=list(shapes))),
    )


def _rating_axis(field: str) -> Any:
    scale = alt.Scale(zero=False, nice=False, padding=14)
    return alt.X(field, title="rating", scale=scale).axis(grid=False, tickCount=6, format="~g")


def _make_spec(chart: Any, description: str, height: int) -> dict[str, Any]:
    spec: dict[str, Any] = chart.properties(
        width="container", height=height, description=description
    ).to_dict()
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    # Altair's defaults would override those of the page, and readers might think that the schema's
    # URL is fetched.
    return {key: value for key, value in spec.items() if key not in ("config", "$schema")}
