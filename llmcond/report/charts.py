"""The charts of a page as Vega-Lite specifications, and the data that its script draws."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import vl_convert
from numpy.typing import NDArray

from llmcond.base.metrics import Floats, finite_or_none, get_metric
from llmcond.data.rows import QueryRows, Rows
from llmcond.evaluation.analyses import (
    by_condition,
    calibration,
    chance_error,
    rank_error,
    rank_share,
    rating_span,
)
from llmcond.evaluation.results import estimate_text, interval_text
from llmcond.heads.numpy_heads import DEV_SCORE_KEY
from llmcond.report.content import Page
from llmcond.report.tables import axis_label, p_value_text, with_minus_signs

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
    colour, shape = series_encoding(series, alt.Legend(title=None) if legend else None)
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


def calibration_chart(names: Sequence[str] = ("A", "B"), *, legend: bool = False) -> dict[str, Any]:
    """Return a chart of the mean prediction at each rating.

    The page's script supplies the datasets ``levels`` (series A or B, rating, place, n, mean, low,
    high) and ``ends``, the two ends of the line on which prediction and rating are equal. ``place``
    is the rating with a small shift that separates the two series.

    Args:
        names: the names of the series.
        legend: whether the chart has a legend, which the page draws itself.
    """

    def y(field: str) -> Any:
        return alt.Y(field, title="predicted similarity").scale(zero=False)

    colour, shape = series_encoding(names, alt.Legend(title=None) if legend else None)
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
    colour, shape = series_encoding(("A", "B"))
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


def series_encoding(names: Sequence[str], legend: Any = None) -> tuple[Any, Any]:
    """Return the encodings of series by their colours and marks; ``legend`` is None without one."""
    colours, shapes = zip(*(series_style(i) for i in range(len(names))), strict=True)
    domain = list(names)
    return (
        alt.Color("series:N", legend=legend, scale=alt.Scale(domain=domain, range=list(colours))),
        alt.Shape("series:N", legend=legend, scale=alt.Scale(domain=domain, range=list(shapes))),
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


#: The series of a chart: name, colour and mark.
Legend = Sequence[tuple[str, str, str]]


def page_data(page: Page) -> dict[str, Any]:
    """Return the data for the page's script as JSON; each distinct text is stored once."""
    curves = _learning_curves(page)
    data: dict[str, Any] = {"config": CONFIG, "charts": {}, "curves": curves}
    data |= {"primary": page.results[0].primary.heading, "ranked": page.ranked}
    data |= {"systems": [], "chosen": (None, None), "conditions": None}
    if page.systems:
        texts: dict[str, int] = {}
        rows = page.rows
        if isinstance(rows, QueryRows):
            row_data = _ranked_data(page, rows, texts)
        else:
            row_data = _rated_data(page, rows, texts)
        data["charts"] |= row_data.pop("charts")
        data |= {**row_data, "chosen": page.initial_systems(), "texts": list(texts)}
    epochs = [epoch for curve in curves for seed in curve["seeds"] for epoch in seed]
    metric = get_metric(page.dev_metric)
    data["dev"] = f"{metric.heading} on dev"
    for column, name, title in ((1, "loss", "loss"), (2, "dev", axis_label(metric, " on dev"))):
        if any(epoch[column] is not None for epoch in epochs):
            data["charts"][name] = curve_chart(name, title)
    return data


def _rated_data(page: Page, rows: Rows, texts: dict[str, int]) -> dict[str, Any]:
    """Return the data of rated rows, and add their texts with new numbers to ``texts``."""
    columns = {"condition": "condition", "sentence1": "sentence 1", "sentence2": "sentence 2"}
    rated, errors = rows.rated, {}
    for name in page.systems:
        similarity = page.mean_prediction(name)
        scored = np.isfinite(similarity) & rated
        errors[name] = np.full(len(similarity), np.nan)
        errors[name][scored] = rank_error(similarity[scored], rows.rating[scored])
    # For each rating, the range of ranks that its rows take in a perfect order.
    ranges = (_round_values(1000 * end, 0) for end in rating_span(rows.rating[rated]))
    spans = zip(_on_scale(page, rows.rating[rated]), *ranges, strict=True)
    return {
        "scale": list(page.scale),
        "systems": [_rated_system(page, rows, name, error) for name, error in errors.items()],
        "columns": list(columns.items()),
        "rows": {
            "number": rows.number.tolist(),
            "rating": _on_scale(page, rows.rating),
            **{key: _number_texts(getattr(rows, key), texts) for key in reversed(columns)},
        },
        "conditions": (
            _condition_errors(page, rows, rated, texts, list(errors.values()))
            if rated.any()
            else None
        ),
        "spans": [list(span) for span in dict.fromkeys(spans)],
        "charts": {"scatter": scatter_chart(), "levels": calibration_chart()},
    }


def _ranked_data(page: Page, rows: QueryRows, texts: dict[str, int]) -> dict[str, Any]:
    """Return the data of ranked queries, and add their texts with new numbers to ``texts``."""
    # The metrics are averaged over seeds, not the ranks: a mean rank is rarely the first.
    ranks_by_seed = {name: np.atleast_2d(page.similarity[name]) for name in page.systems}
    ranks_by_name = {name: page.mean_prediction(name) for name in page.systems}
    lowest = max(ranks.max() for ranks in ranks_by_seed.values())
    steps = [k * 10**power for power in range(8) for k in (1, 2, 3, 5) if k * 10**power < lowest]
    systems = [
        {
            "name": name,
            "score": _format_score(page, name),
            "rank": _round_values(ranks, 2),
            # The position on a logarithmic axis from the first to the last of all ranks.
            "place": _round_values(1000 * np.log(ranks) / (np.log(lowest) or 1), 0),
            "hits": [
                [k, round(float((ranks_by_seed[name] <= k).mean()), 4)]
                for k in [*steps, float(lowest)]
            ],
        }
        for name, ranks in ranks_by_name.items()
    ]
    metric, groups = page.results[0].primary, by_condition(rows.columns[rows.group_column])
    noun = rows.group_column.removesuffix("_text")
    return {
        "systems": systems,
        "columns": [
            ("heading", "question"),
            *((key, key.removesuffix("_text").replace("_", " ")) for key in rows.texts),
        ],
        "rows": {
            "number": list(range(1, len(rows) + 1)),
            "heading": _number_texts(rows.headings, texts),
            **{key: _number_texts(rows.columns[key], texts) for key in rows.texts},
        },
        "conditions": metric.by_row
        and {
            "what": [noun, f"{noun.removesuffix('y')}ies" if noun.endswith("y") else f"{noun}s"],
            "text": _number_texts(groups.label, texts),
            "n": groups.count.tolist(),
            "figure": [
                _round_values(
                    metric.factor * groups.mean(np.mean([*map(metric.by_row, ranks)], axis=0)),
                    metric.decimals,
                )
                for ranks in ranks_by_seed.values()
            ],
            "decimals": metric.decimals,
        },
        "charts": {"hits": hits_chart()},
    }


def _number_texts(column: Sequence[str], texts: dict[str, int]) -> list[int]:
    """Return the number of each text in ``texts``; new texts are added with the next number."""
    return [texts.setdefault(text, len(texts)) for text in column]


def _format_score(page: Page, name: str) -> str:
    """Format a system's primary metric with its interval."""
    result = next(result for result in page.results if result.name == name)
    text = estimate_text(result.primary, result.main)
    return f"{result.primary.heading} {with_minus_signs(text)}"


def _rated_system(page: Page, rows: Rows, name: str, error: Floats) -> dict[str, Any]:
    similarity = page.mean_prediction(name)
    predicted, rated = np.isfinite(similarity), ~np.isnan(error)
    shares = np.full(len(similarity), np.nan)
    shares[predicted] = rank_share(similarity[predicted])
    levels = calibration(similarity[rated], rows.rating[rated])
    ratings = _on_scale(page, np.array([level.rating for level in levels]))
    return {
        "name": name,
        "score": _format_score(page, name),
        "similarity": _round_values(similarity, 4),
        "place": _round_values(1000 * shares, 0),
        "error": _round_values(1000 * error, 0),
        "levels": [
            [
                rating,
                level.n,
                *_round_values(np.array([level.mean, level.low, level.median, level.high]), 4),
            ]
            for rating, level in zip(ratings, levels, strict=True)
        ],
    }


def _condition_errors(
    page: Page,
    rows: Rows,
    rated: NDArray[np.bool_],
    texts: dict[str, int],
    errors: Sequence[Floats],
) -> dict[str, Any]:
    """Return the mean rating and the mean rank errors of the rows of each condition."""
    groups = by_condition(
        [text for text, is_rated in zip(rows.condition, rated, strict=True) if is_rated]
    )
    rating = rows.rating[rated]
    return {
        "what": ["condition", "conditions"],
        "text": _number_texts(groups.label, texts),
        "n": groups.count.tolist(),
        "rating": _on_scale(page, groups.mean(rating), 2),
        "chance": _round_values(1000 * groups.mean(chance_error(rating)), 0),
        "error": [_round_values(1000 * groups.mean(np.abs(error[rated])), 0) for error in errors],
    }


def _learning_curves(page: Page) -> list[dict[str, Any]]:
    """Return the learning curves of each result's seeds, as far as they have figures."""
    systems = []
    for result in page.results:
        curves = [
            [_epoch_figures(epoch, page) for epoch in fit["curve"]]
            for fit in result.fits
            if fit.get("curve")
        ]
        if any(epoch[1:] != [None, None] for curve in curves for epoch in curve):
            has_all_seeds = len(result.seeds) == len(curves)
            labels = list(result.seeds) if has_all_seeds else list(range(len(curves)))
            systems.append({"name": result.name, "labels": labels, "seeds": curves})
    return systems


def _epoch_figures(epoch: Mapping[str, Any], page: Page) -> list[float | None]:
    """Return an epoch, its loss and its score on dev; None for what the curve lacks."""
    # Heads that rank record a score without the metric's name.
    key = DEV_SCORE_KEY if DEV_SCORE_KEY in epoch else f"dev_{page.dev_metric}"
    # A head whose epoch was selected by another metric has no curve of this one on dev.
    loss, dev = (np.array([epoch.get(name)], np.float64) for name in ("loss", key))
    factor = get_metric(page.dev_metric).factor
    return [epoch["epoch"], *_round_values(loss, 5), *_round_values(factor * dev, 5)]


def _on_scale(page: Page, rating: Floats, digits: int = 4) -> list[Any]:
    """Return ratings from 0 to 1 on the scale of the data."""
    low, high = page.scale
    return _round_values(low + (high - low) * rating, digits)


def _round_values(values: NDArray[np.floating], digits: int) -> list[Any]:
    """Return rounded values for short JSON: None for NaN, integers for whole numbers."""
    rounded = (round(float(v), digits) if math.isfinite(v) else None for v in values)
    return [int(v) if v is not None and v.is_integer() else v for v in rounded]


# -- charts that do not depend on the selected systems ---------------------------------------


def head_chart(page: Page) -> tuple[dict[str, Any], Legend] | None:
    """Return a chart of the primary metric by head and prompt, the best first.

    Returns:
        The chart and its legend; None if the metric is defined for fewer than two results.
    """
    metric, rows, heads = page.results[0].primary, interval_rows(page), _list_heads(page)
    if len(rows) < 2:
        return None
    baselines = list(page.baselines.values()) if len(page.baselines) == 1 else []
    reference = metric.in_display_unit(baselines[0].main.value) if baselines else None
    description = (
        f"{metric.heading} of each system with its 95 % confidence interval, by prompt and head."
    )
    chart = interval_chart(rows, heads, axis_label(metric), description, reference)
    return chart, [(name, *series_style(i)) for i, name in enumerate(heads)]


def difference_chart(page: Page) -> dict[str, Any] | None:
    """Return a chart of the differences of systems of several runs to their baseline.

    The systems are in the order of the results. The chart is None if no difference is defined.
    """
    metric, rows = page.results[0].primary, interval_rows(page, differences=True)
    if not rows or not _system_labels(page):
        return None
    title = f"difference in {axis_label(metric)}"
    description = f"Difference of each system to the baseline in {metric.heading}."
    return interval_chart(rows, _list_heads(page), title, description, reference=0.0)


def _list_heads(page: Page) -> list[str]:
    return list(dict.fromkeys(result.head for result in page.results))


def interval_rows(page: Page, *, differences: bool = False) -> list[dict[str, Any]]:
    """Return rows of ``interval_chart`` with the primary metric, or the differences in it.

    Results whose figure is undefined have no row.
    """
    metric, systems, rows = page.results[0].primary, _system_labels(page), []
    subtracts = not page.ranked or any(result.subtract for result in page.results)
    for result in page.results:
        difference = (result.difference or {}).get(metric.name)
        figure = difference if differences else result.main
        if figure is None or finite_or_none(figure.value) is None:
            continue
        details = [("no subtraction", "minus c")[result.subtract]] if subtracts else []
        details += [result.variant[1]]
        details += ["control"] if result.about.get("control") else []
        details += ["baseline"] if result.name in page.baselines else []
        details += [difference.verdict] if difference and differences else []
        named = systems.get(result.name) or f"{result.prompt or result.name}\n"
        interval = interval_text(metric, figure)
        low, high = map(metric.in_display_unit, (figure.low, figure.high))
        row = {
            "label": ", ".join(filter(None, (named, *details))).replace("\n, ", "\n"),
            "series": result.head,
            "system": result.name,
            "value": metric.in_display_unit(figure.value),
            "low": low if interval else None,
            "high": high if interval else None,
            "difference" if differences else metric.heading: with_minus_signs(
                metric.format(figure.value, signed=differences)
            ),
            "95 % interval": with_minus_signs(interval) or "undefined",
        }
        if difference and differences:
            row["p, corrected"] = p_value_text(difference.p_holm)
        rows.append(row)
    return rows


def _system_labels(page: Page) -> dict[str, str]:
    """Return short labels of systems of several runs by name: the head, and the run's folder."""
    labels = {}
    for result in page.results:
        if "heads" in result.about:
            source = result.about["heads"][0]["run"]
            head = result.name.removeprefix(source).lstrip(":, ") or result.head
            labels[result.name] = f"{head}\n{Path(source).name}"
    unique = len(set(labels.values())) == len(labels)
    return labels if unique else {name: f"{name}\n" for name in labels}
