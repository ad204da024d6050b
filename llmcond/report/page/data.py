"""The numbers that a page's script draws and sorts, and the charts of all systems."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.evaluation.breakdown import (
    by_condition,
    calibration,
    chance_error,
    rank_error,
    rank_share,
    rating_span,
)
from llmcond.metrics import Floats, finite, number
from llmcond.report.format import range_text
from llmcond.report.page import charts
from llmcond.report.page.gather import Page
from llmcond.report.page.tables import known, minus

#: The looks of a chart's series: name, colour and mark.
Legend = Sequence[tuple[str, str, str]]


def embedded(page: Page) -> dict[str, Any]:
    """Return what the page's script needs, as JSON has it; every text is there once."""
    curves = _curves(page)
    data: dict[str, Any] = {"config": charts.CONFIG, "charts": {}, "curves": curves}
    data["primary"] = page.results[0].primary.heading
    data |= {"systems": [], "chosen": (None, None), "conditions": None}
    if page.systems:
        texts: dict[str, int] = {}
        data["scale"] = list(page.scale)
        errors = {name: _errors(page, name) for name in page.systems}
        data["systems"] = [_system(page, name, error) for name, error in errors.items()]
        data["chosen"] = page.chosen()
        data["rows"] = {
            "number": page.rows.number.tolist(),
            "rating": _on_scale(page, page.rows.rating),
            **{
                key: [texts.setdefault(text, len(texts)) for text in getattr(page.rows, key)]
                for key in ("sentence1", "sentence2", "condition")
            },
        }
        rated = page.rows.rated
        if rated.any():
            data["conditions"] = _conditions(page, rated, texts, list(errors.values()))
        # For each rating the places that its rows take in a perfect order.
        places = (_rounded(1000 * end, 0) for end in rating_span(page.rows.rating[rated]))
        spans = zip(_on_scale(page, page.rows.rating[rated]), *places, strict=True)
        data["spans"] = [list(span) for span in dict.fromkeys(spans)]
        data["texts"] = list(texts)
        data["charts"] |= {"scatter": charts.scatter(), "levels": charts.calibration()}
    epochs = [epoch for curve in curves for seed in curve["seeds"] for epoch in seed]
    for place, name, title in ((1, "loss", "loss"), (2, "dev", "Spearman on dev × 100")):
        if any(epoch[place] is not None for epoch in epochs):
            data["charts"][name] = charts.curves(name, title)
    return data


def _system(page: Page, name: str, error: Floats) -> dict[str, Any]:
    similarity = np.asarray(page.similarity[name], dtype=np.float64)
    there, rated = np.isfinite(similarity), ~np.isnan(error)
    place = np.full(len(similarity), np.nan)
    place[there] = rank_share(similarity[there])
    result = next(result for result in page.results if result.name == name)
    metric, found = result.primary, result.main
    bounds = minus(range_text(metric, found.low, found.high))
    score = f"{metric.heading} {minus(metric.show(found.value))}"
    levels = calibration(similarity[rated], page.rows.rating[rated])
    ratings = _on_scale(page, np.array([level.rating for level in levels]))
    return {
        "name": name,
        "score": f"{score} ({bounds})" if bounds else score,
        "similarity": _rounded(similarity, 4),
        "place": _rounded(1000 * place, 0),
        "error": _rounded(1000 * error, 0),
        "levels": [
            [rating, one.n, *_rounded(np.array([one.mean, one.low, one.median, one.high]), 4)]
            for rating, one in zip(ratings, levels, strict=True)
        ],
    }


def _errors(page: Page, name: str) -> Floats:
    """Return (n,) the rank errors of a system; NaN where a row is unrated or not predicted."""
    similarity = np.asarray(page.similarity[name], dtype=np.float64)
    rated = np.isfinite(similarity) & page.rows.rated
    error = np.full(len(similarity), np.nan)
    error[rated] = rank_error(similarity[rated], page.rows.rating[rated])
    return error


def _conditions(
    page: Page, rated: NDArray[np.bool_], texts: dict[str, int], errors: Sequence[Floats]
) -> dict[str, Any]:
    groups = by_condition(
        [text for text, kept in zip(page.rows.condition, rated, strict=True) if kept]
    )
    rating = page.rows.rating[rated]
    return {
        "text": [texts.setdefault(label, len(texts)) for label in groups.label],
        "n": groups.count.tolist(),
        "rating": _on_scale(page, groups.mean(rating), 2),
        "chance": _rounded(1000 * groups.mean(chance_error(rating)), 0),
        "error": [_rounded(1000 * groups.mean(np.abs(error[rated])), 0) for error in errors],
    }


def _curves(page: Page) -> list[dict[str, Any]]:
    found = []
    for result in page.results:
        curves = [
            [_epoch(epoch) for epoch in fit["curve"]] for fit in result.fits if fit.get("curve")
        ]
        if any(epoch[1:] != [None, None] for curve in curves for epoch in curve):
            same = len(result.seeds) == len(curves)
            labels = list(result.seeds) if same else list(range(len(curves)))
            found.append({"name": result.name, "labels": labels, "seeds": curves})
    return found


def _epoch(epoch: Mapping[str, Any]) -> list[float | None]:
    loss, dev = (np.array([epoch[key]], np.float64) for key in ("loss", "dev_spearman"))
    return [epoch["epoch"], *_rounded(loss, 5), *_rounded(100 * dev, 5)]


def _on_scale(page: Page, rating: Floats, digits: int = 4) -> list[Any]:
    """Return ratings on 0 to 1 as the data has them."""
    low, high = page.scale
    return _rounded(low + (high - low) * rating, digits)


def _rounded(values: NDArray[np.floating], digits: int) -> list[Any]:
    """Return values as short JSON: None for NaN, whole numbers without a decimal point."""
    rounded = (round(float(v), digits) if math.isfinite(v) else None for v in values)
    return [int(v) if v is not None and v.is_integer() else v for v in rounded]


# -- charts that are the same whichever systems are chosen ---------------------------------------


def _legend(names: Sequence[str]) -> Legend:
    return [(name, *charts.look(i)) for i, name in enumerate(names)]


def by_head(page: Page) -> tuple[dict[str, Any], Legend] | None:
    """Return the primary metric by head and template as a chart, best template first.

    None where it is defined for fewer than two results.
    """
    metric = page.results[0].primary
    defined = [result for result in page.results if finite(result.main.value) is not None]
    if len(defined) < 2:
        return None
    heads = list(dict.fromkeys(result.head for result in defined))
    rows = []
    used: Counter[tuple[str, str]] = Counter()
    for result in defined:
        about = "minus c" if result.subtract else "c kept"
        about += ", control" if result.control else ""
        about += ", baseline" if result.name in page.baselines else ""
        label = f"{result.prompt}\n{about}"
        # Several fits of one head and template stand beside each other, too.
        slot = heads.index(result.head) + len(heads) * used[label, result.head]
        used[label, result.head] += 1
        found = result.main
        low, high = known(found.low, found.high)
        rows.append(
            {
                "label": label,
                "slot": slot,
                "series": result.head,
                "value": metric.scaled(found.value),
                "low": metric.scaled(low),
                "high": metric.scaled(high),
                "system": result.name,
                metric.heading: minus(metric.show(found.value)),
                "95 % interval": minus(range_text(metric, found.low, found.high)) or "undefined",
            }
        )
    only = list(page.baselines.values()) if len(page.baselines) == 1 else []
    reference = metric.scaled(only[0].main.value) if only else None
    description = f"{metric.heading} of each system with its 95 % interval, by template and head."
    title = metric.heading + ("" if metric.factor == 1 else f" × {metric.factor:g}")
    return charts.intervals(rows, heads, title, description, reference), _legend(heads)


def isotropy_charts(page: Page) -> tuple[list[dict[str, Any]], Legend] | None:
    """Return the mean cosine and the partition ratio of each set of vectors as charts."""
    kinds: list[str] = ["minus c" if row["subtract"] else "c kept" for row in page.isotropy]
    series: list[str] = [name for name in ("minus c", "c kept") if name in kinds]
    found = []
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
                    "slot": series.index(kind),
                    "series": kind,
                    "value": value,
                    "low": None if sd is None else value - sd,
                    "high": None if sd is None else value + sd,
                    "system": row["name"],
                    key.replace("_", " "): minus(number(value, 3)),
                }
            )
        if rows:
            found.append(charts.intervals(rows, series, title, f"{title}, by template."))
    return (found, _legend(series)) if found else None
