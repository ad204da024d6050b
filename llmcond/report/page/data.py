"""The data that a page's script draws and sorts, and the charts that show all systems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.data.rows import QueryRows, Rows
from llmcond.evaluation.analyses import (
    by_condition,
    calibration,
    chance_error,
    rank_error,
    rank_share,
    rating_span,
)
from llmcond.heads.pairs import DEV_SCORE_KEY
from llmcond.metrics import Floats, finite_or_none, format_number, get_metric
from llmcond.report.page import charts
from llmcond.report.page.gather import Page
from llmcond.report.page.tables import interval_ends, with_minus_signs
from llmcond.report.tables import p_value_text, range_text

#: The series of a chart: name, colour and mark.
Legend = Sequence[tuple[str, str, str]]


def page_data(page: Page) -> dict[str, Any]:
    """Return the data for the page's script as JSON; each distinct text is stored once."""
    curves = _learning_curves(page)
    data: dict[str, Any] = {"config": charts.CONFIG, "charts": {}, "curves": curves}
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
    scale = "" if metric.factor == 1 else f" × {metric.factor:g}"
    for column, name, title in ((1, "loss", "loss"), (2, "dev", f"{data['dev']}{scale}")):
        if any(epoch[column] is not None for epoch in epochs):
            data["charts"][name] = charts.curve_chart(name, title)
    return data


def _rated_data(page: Page, rows: Rows, texts: dict[str, int]) -> dict[str, Any]:
    """Return the data of rated rows, and add their texts with new numbers to ``texts``."""
    errors = {name: _rank_errors(page, rows, name) for name in page.systems}
    columns = {"condition": "condition", "sentence1": "sentence 1", "sentence2": "sentence 2"}
    rated = rows.rated
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
        "charts": {"scatter": charts.scatter_chart(), "levels": charts.calibration_chart()},
    }


def _ranked_data(page: Page, rows: QueryRows, texts: dict[str, int]) -> dict[str, Any]:
    """Return the data of ranked queries, and add their texts with new numbers to ``texts``."""
    ranks_by_name = {
        name: np.asarray(page.similarity[name], dtype=np.float64) for name in page.systems
    }
    lowest = max(ranks.max() for ranks in ranks_by_name.values())
    steps = [k * 10**power for power in range(8) for k in (1, 2, 3, 5) if k * 10**power < lowest]
    systems = [
        {
            "name": name,
            "score": _format_score(page, name),
            "rank": _round_values(ranks, 2),
            # The position on a logarithmic axis from the first to the last of all ranks.
            "place": _round_values(1000 * np.log(ranks) / (np.log(lowest) or 1), 0),
            "hits": [[k, round(float((ranks <= k).mean()), 4)] for k in [*steps, float(lowest)]],
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
                _round_values(metric.factor * groups.mean(metric.by_row(ranks)), metric.decimals)
                for ranks in ranks_by_name.values()
            ],
            "decimals": metric.decimals,
        },
        "charts": {"hits": charts.hits_chart()},
    }


def _number_texts(column: Sequence[str], texts: dict[str, int]) -> list[int]:
    """Return the number of each text in ``texts``; new texts are added with the next number."""
    return [texts.setdefault(text, len(texts)) for text in column]


def _format_score(page: Page, name: str) -> str:
    """Format a system's primary metric with its interval."""
    result = next(result for result in page.results if result.name == name)
    metric, estimate = result.primary, result.main
    bounds = with_minus_signs(range_text(metric, estimate.low, estimate.high))
    score = f"{metric.heading} {with_minus_signs(metric.format(estimate.value))}"
    return f"{score} ({bounds})" if bounds else score


def _rated_system(page: Page, rows: Rows, name: str, error: Floats) -> dict[str, Any]:
    similarity = np.asarray(page.similarity[name], dtype=np.float64)
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


def _rank_errors(page: Page, rows: Rows, name: str) -> Floats:
    """Return the (n,) rank errors of a system; NaN if a row has no rating or no prediction."""
    similarity = np.asarray(page.similarity[name], dtype=np.float64)
    rated = np.isfinite(similarity) & rows.rated
    error = np.full(len(similarity), np.nan)
    error[rated] = rank_error(similarity[rated], rows.rating[rated])
    return error


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


def _make_legend(names: Sequence[str]) -> Legend:
    return [(name, *charts.series_style(i)) for i, name in enumerate(names)]


def head_chart(page: Page) -> tuple[dict[str, Any], Legend] | None:
    """Return a chart of the primary metric by head and template, best template first.

    Returns:
        The chart and its legend; None if the metric is defined for fewer than two results.
    """
    metric = page.results[0].primary
    defined = [result for result in page.results if finite_or_none(result.main.value) is not None]
    if len(defined) < 2:
        return None
    heads = list(dict.fromkeys(result.head for result in defined))
    systems = _system_labels(page)
    rows = []
    for i, result in enumerate(page.results):
        if finite_or_none(result.main.value) is None:
            continue
        details = [("no subtraction", "minus c")[result.subtract]] if page.subtracts else []
        details += [page.variants[1][i]] if page.variants else []
        details += ["control"] if result.about.get("control") else []
        details += ["baseline"] if result.name in page.baselines else []
        named = systems.get(result.name) or f"{result.prompt or result.name}\n"
        label = ", ".join(filter(None, (named, *details))).replace("\n, ", "\n")
        estimate = result.main
        low, high = interval_ends(estimate.low, estimate.high)
        rows.append(
            {
                "label": label,
                "series": result.head,
                "value": metric.in_display_unit(estimate.value),
                "low": metric.in_display_unit(low),
                "high": metric.in_display_unit(high),
                "system": result.name,
                metric.heading: with_minus_signs(metric.format(estimate.value)),
                "95 % interval": with_minus_signs(range_text(metric, estimate.low, estimate.high))
                or "undefined",
            }
        )
    baselines = list(page.baselines.values()) if len(page.baselines) == 1 else []
    reference = metric.in_display_unit(baselines[0].main.value) if baselines else None
    description = (
        f"{metric.heading} of each system with its 95 % confidence interval, by template and head."
    )
    title = metric.heading + ("" if metric.factor == 1 else f" × {metric.factor:g}")
    return charts.interval_chart(rows, heads, title, description, reference), _make_legend(heads)


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


def difference_chart(page: Page) -> dict[str, Any] | None:
    """Return a chart of the differences of systems of several runs to their baseline.

    The systems are in the order of the results. The chart is None if no difference is defined.
    """
    metric, systems, rows = page.results[0].primary, _system_labels(page), []
    for result in page.results:
        difference = (result.difference or {}).get(metric.name)
        if "heads" not in result.about or difference is None:
            continue
        if finite_or_none(difference.value) is None:
            continue
        low, high = interval_ends(difference.low, difference.high)
        rows.append(
            {
                "label": f"{systems[result.name]}, {difference.verdict}",
                "series": "difference",
                "value": metric.in_display_unit(difference.value),
                "low": metric.in_display_unit(low),
                "high": metric.in_display_unit(high),
                "difference": with_minus_signs(metric.format(difference.value, signed=True)),
                "95 % interval": with_minus_signs(
                    range_text(metric, difference.low, difference.high, signed=True)
                )
                or "undefined",
                "p, corrected": p_value_text(difference.p_holm),
            }
        )
    if not rows:
        return None
    scale = "" if metric.factor == 1 else f" × {metric.factor:g}"
    title = f"difference in {metric.heading}{scale}"
    description = f"Difference of each system to {page.baseline} in {metric.heading}."
    return charts.interval_chart(rows, ["difference"], title, description, reference=0.0)


def isotropy_charts(page: Page) -> tuple[list[dict[str, Any]], Legend] | None:
    """Return charts of the mean cosine and the partition ratio of each set of vectors.

    Returns:
        The charts and their legend; None if no figure is defined.
    """
    kinds: list[str] = ["minus c" if row["subtract"] else "no subtraction" for row in page.isotropy]
    series: list[str] = [name for name in ("minus c", "no subtraction") if name in kinds]
    specs = []
    for key, spread, title in (
        ("mean_cosine", "std_cosine", "mean cosine ± sd"),
        ("partition_ratio", None, "partition ratio"),
    ):
        rows = []
        for row, kind in zip(page.isotropy, kinds, strict=True):
            value = row[key]
            if value is None:
                continue
            sd = None if spread is None else row[spread]
            rows.append(
                {
                    "label": f"{row['prompt']}\n{row['head']}",
                    "series": kind,
                    "value": value,
                    "low": None if sd is None else value - sd,
                    "high": None if sd is None else value + sd,
                    "system": row["name"],
                    key.replace("_", " "): with_minus_signs(format_number(value, 3)),
                }
            )
        if rows:
            specs.append(charts.interval_chart(rows, series, title, f"{title}, by template."))
    return (specs, _make_legend(series)) if specs else None
