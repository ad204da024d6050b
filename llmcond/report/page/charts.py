"""The charts of a page as Vega-Lite, and the libraries that draw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import altair as alt
import vl_convert

#: So many series differ in colour and mark; further ones begin again. One mark fewer than
#: colours, so that pairs of both repeat late.
_COLOURS = tuple(f"var(--series-{i})" for i in range(1, 8))
_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")

_INK, _MUTED, _LINE = "var(--ink)", "var(--muted)", "var(--line)"

#: Axes take the page's colours, which follow its light or dark theme, and its font.
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

#: A chart's rows and their series in order.
Rows = Sequence[Mapping[str, Any]]

#: In pixels: what a mark takes beside others of its row, what a row's label of two lines takes.
_STEP, _ROW = 15, 40


def look(i: int) -> tuple[str, str]:
    """Return the colour and the mark of the i-th series, as CSS and as Vega name them."""
    return _COLOURS[i % len(_COLOURS)], _SHAPES[i % len(_SHAPES)]


@cache
def libraries() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script that asks for nothing else."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def intervals(
    rows: Rows, series: Sequence[str], title: str, description: str, reference: float | None = None
) -> dict[str, Any]:
    """Return a chart of values with intervals: a line for each label, side by side if several.

    Args:
        rows: label, slot (place beside others of the label), series, value, low, high and what a
            tooltip shows.
        series: names in the order of their looks.
        title: of the axis.
        description: for those who do not see it.
        reference: where a dashed line is drawn.
    """
    labels = list(dict.fromkeys(row["label"] for row in rows))
    slots = len({row["slot"] for row in rows})
    y = alt.Y("label:N", sort=labels, title=None).axis(
        labelExpr="split(datum.label, '\\n')", grid=False, domain=False
    )
    drawn = {"label", "slot", "value", "low", "high"}
    tooltip = [alt.Tooltip(f"{key}:N") for key in rows[0] if key not in drawn]
    base = alt.Chart(alt.InlineData(values=[dict(row) for row in rows])).encode(
        y=y, yOffset=alt.YOffset("slot:O"), tooltip=tooltip
    )
    x = alt.X("value:Q", title=title, scale=alt.Scale(zero=False, nice=True)).axis(tickCount=8)
    colour, shape = _series("series:N", series)
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
        where = alt.Chart(alt.InlineData(values=[{"value": reference}]))
        layers.insert(0, where.mark_rule(strokeDash=[4, 4], color=_MUTED, aria=False).encode(x=x))
    height = len(labels) * max(slots * _STEP, _ROW)
    return _finished(alt.layer(*layers), description, height)


def scatter() -> dict[str, Any]:
    """Return a chart of predictions against ratings, with quartiles over them.

    The page gives it ``points`` (x, y, row) and ``levels`` (rating, low, median, high).
    """
    x, y = _rating("x:Q"), alt.Y("y:Q", title="predicted similarity").scale(zero=False)
    dots = _named("points").mark_circle(size=22, opacity=0.35, color="var(--mark)", aria=False)
    points = dots.encode(x=x, y=y, tooltip=[alt.Tooltip("row:Q")])
    levels = _named("levels").encode(x=_rating("rating:Q"))
    bars = levels.mark_rule(strokeWidth=4, color=_INK, aria=False)
    medians = levels.mark_tick(
        orient="horizontal", thickness=4, size=22, color=_INK, opacity=1, aria=False
    )
    chart = alt.layer(
        points, bars.encode(y=alt.Y("low:Q"), y2="high:Q"), medians.encode(y="median:Q")
    )
    description = "Predicted similarity of each row against its rating, and quartiles by rating."
    return _finished(chart, description, 260)


def calibration() -> dict[str, Any]:
    """Return a chart of what is predicted at each rating.

    The page gives it ``levels`` (series A or B, rating, shifted a little apart as place, n, mean,
    low, high) and ``ends``, the two points of the line on which prediction and rating are equal.
    """

    def y(field: str) -> Any:
        return alt.Y(field, title="predicted similarity").scale(zero=False)

    colour, shape = _series("series:N", ("A", "B"))
    line = _named("ends").mark_line(strokeDash=[4, 4], color=_MUTED, strokeWidth=1, aria=False)
    tooltip = [
        alt.Tooltip("name:N", title="system"),
        alt.Tooltip("rating:Q", format=".3~f"),
        alt.Tooltip("n:Q", title="rows", format=",d"),
        alt.Tooltip("mean:Q", format=".3f"),
        alt.Tooltip("low:Q", title="lower quartile", format=".3f"),
        alt.Tooltip("high:Q", title="upper quartile", format=".3f"),
    ]
    base = _named("levels").encode(x=_rating("place:Q"), color=colour, tooltip=tooltip)
    bars = base.mark_rule(strokeWidth=2, opacity=0.55, aria=False)
    joined = base.mark_line(strokeWidth=2, aria=False)
    points = base.mark_point(filled=True, size=80, opacity=1, aria=False)
    chart = alt.layer(
        line.encode(x=_rating("rating:Q"), y=y("value:Q")),
        bars.encode(y=y("low:Q"), y2="high:Q"),
        joined.encode(y=y("mean:Q")),
        points.encode(y=y("mean:Q"), shape=shape),
    )
    return _finished(chart, "Mean prediction and quartiles at each rating.", 280)


def hits() -> dict[str, Any]:
    """Return a chart of the share of answers that rank first, second, and so on at most.

    The page gives it ``points`` (series A or B, name, k, share).
    """
    colour, shape = _series("series:N", ("A", "B"))
    tooltip = [
        alt.Tooltip("name:N", title="system"),
        alt.Tooltip("k:Q", title="among the first", format=",~f"),
        alt.Tooltip("share:Q", format=".1%"),
    ]
    base = _named("points").encode(
        x=alt.X("k:Q", title="rank", scale=alt.Scale(type="log")).axis(grid=False, format="~s"),
        y=alt.Y("share:Q", title="answers that rank so high").axis(format="%"),
        color=colour,
        tooltip=tooltip,
    )
    joined = base.mark_line(strokeWidth=2, aria=False)
    points = base.mark_point(filled=True, size=60, opacity=1, aria=False).encode(shape=shape)
    return _finished(alt.layer(joined, points), "Share of answers by the most that they rank.", 280)


def curves(measure: str, title: str) -> dict[str, Any]:
    """Return a chart of a measure against epochs.

    The page gives it ``chosen`` (seed, epoch, measure), a line for each seed of the chosen system,
    and ``others`` (name, epoch, measure), the means over seeds of all others; either may be empty.
    """
    x = alt.X("epoch:Q", title="epoch").axis(tickMinStep=1, format="d")
    y = alt.Y(f"{measure}:Q", title=title).scale(zero=False)
    lines = _named("others").mark_line(strokeWidth=1.25, color=_MUTED, opacity=0.35, aria=False)
    behind = lines.encode(x=x, y=y, detail="name:N", tooltip=[alt.Tooltip("name:N")])
    tooltip = [
        alt.Tooltip("seed:N"),
        alt.Tooltip("epoch:Q"),
        alt.Tooltip(f"{measure}:Q", title=title, format=".3~f"),
    ]
    front = _named("chosen").encode(x=x, y=y, tooltip=tooltip)
    seeds = front.mark_line(strokeWidth=2, color=_COLOURS[0], aria=False)
    points = front.mark_point(filled=True, size=30, color=_COLOURS[0], opacity=1, aria=False)
    dash = alt.StrokeDash("seed:N", legend=None)
    chart = alt.layer(behind, seeds.encode(strokeDash=dash), points)
    return _finished(chart, f"{title} against epochs.", 240)


def _named(data: str) -> Any:
    """Return a chart of rows that the page gives it under a name."""
    return alt.Chart(alt.NamedData(name=data))


def _series(field: str, names: Sequence[str]) -> tuple[Any, Any]:
    colours, shapes = zip(*(look(i) for i in range(len(names))), strict=True)
    domain = list(names)
    return (
        alt.Color(field, legend=None, scale=alt.Scale(domain=domain, range=list(colours))),
        alt.Shape(field, legend=None, scale=alt.Scale(domain=domain, range=list(shapes))),
    )


def _rating(field: str) -> Any:
    scale = alt.Scale(zero=False, nice=False, padding=14)
    return alt.X(field, title="rating", scale=scale).axis(grid=False, tickCount=6, format="~g")


def _finished(chart: Any, description: str, height: int) -> dict[str, Any]:
    spec: dict[str, Any] = chart.properties(
        width="container", height=height, description=description
    ).to_dict()
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    # Altair's own defaults would come before the page's, and its link would be read by people as
    # something that is fetched.
    return {key: value for key, value in spec.items() if key not in ("config", "$schema")}
