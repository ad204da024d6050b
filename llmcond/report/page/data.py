"""The numbers that a page's script draws and sorts, and the charts of all systems."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.data.queries import QueryRows
from llmcond.data.rows import Rows
from llmcond.evaluation.breakdown import (
    by_condition,
    calibration,
    chance_error,
    rank_error,
    rank_share,
    rating_span,
)
from llmcond.heads.pairs import SCORE
from llmcond.metrics import Floats, finite, metric_of, number
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
    data |= {"primary": page.results[0].primary.heading, "ranked": page.ranked}
    data |= {"systems": [], "chosen": (None, None), "conditions": None}
    if page.systems:
        texts: dict[str, int] = {}
        rows = page.rows
        if isinstance(rows, QueryRows):
            drawn = _ranked(page, rows, texts)
        else:
            drawn = _rated(page, rows, texts)
        data["charts"] |= drawn.pop("charts")
        data |= {**drawn, "chosen": page.chosen(), "texts": list(texts)}
    epochs = [epoch for curve in curves for seed in curve["seeds"] for epoch in seed]
    metric = metric_of(page.dev_metric)
    data["dev"] = f"{metric.heading} on dev"
    scale = "" if metric.factor == 1 else f" × {metric.factor:g}"
    for place, name, title in ((1, "loss", "loss"), (2, "dev", f"{data['dev']}{scale}")):
        if any(epoch[place] is not None for epoch in epochs):
            data["charts"][name] = charts.curves(name, title)
    return data


def _rated(page: Page, rows: Rows, texts: dict[str, int]) -> dict[str, Any]:
    """Return what is drawn of rated rows; texts are added to ``texts``, with their numbers."""
    errors = {name: _errors(page, rows, name) for name in page.systems}
    columns = {"condition": "condition", "sentence1": "sentence 1", "sentence2": "sentence 2"}
    rated = rows.rated
    # For each rating the places that its rows take in a perfect order.
    places = (_rounded(1000 * end, 0) for end in rating_span(rows.rating[rated]))
    spans = zip(_on_scale(page, rows.rating[rated]), *places, strict=True)
    return {
        "scale": list(page.scale),
        "systems": [_system(page, rows, name, error) for name, error in errors.items()],
        "columns": list(columns.items()),
        "rows": {
            "number": rows.number.tolist(),
            "rating": _on_scale(page, rows.rating),
            **{key: _numbered(getattr(rows, key), texts) for key in reversed(columns)},
        },
        "conditions": (
            _conditions(page, rows, rated, texts, list(errors.values())) if rated.any() else None
        ),
        "spans": [list(span) for span in dict.fromkeys(spans)],
        "charts": {"scatter": charts.scatter(), "levels": charts.calibration()},
    }


def _ranked(page: Page, rows: QueryRows, texts: dict[str, int]) -> dict[str, Any]:
    """Return what is drawn of ranks; texts are added to ``texts``, with their numbers."""
    ranks = {name: np.asarray(page.similarity[name], dtype=np.float64) for name in page.systems}
    lowest = max(own.max() for own in ranks.values())
    steps = [k * 10**power for power in range(8) for k in (1, 2, 3, 5) if k * 10**power < lowest]
    systems = [
        {
            "name": name,
            "score": _score(page, name),
            "rank": _rounded(own, 2),
            # From the first to the last rank of all, of which tenfold ones are as far apart.
            "place": _rounded(1000 * np.log(own) / (np.log(lowest) or 1), 0),
            "hits": [[k, round(float((own <= k).mean()), 4)] for k in [*steps, float(lowest)]],
        }
        for name, own in ranks.items()
    ]
    metric, by = page.results[0].primary, by_condition(rows.columns[rows.by])
    one = rows.by.removesuffix("_text")
    return {
        "systems": systems,
        "columns": [
            ("heading", "asked"),
            *((key, key.removesuffix("_text").replace("_", " ")) for key in rows.texts),
        ],
        "rows": {
            "number": list(range(1, len(rows) + 1)),
            "heading": _numbered(rows.headings, texts),
            **{key: _numbered(rows.columns[key], texts) for key in rows.texts},
        },
        "conditions": metric.by_row
        and {
            "what": [one, f"{one.removesuffix('y')}ies" if one.endswith("y") else f"{one}s"],
            "text": _numbered(by.label, texts),
            "n": by.count.tolist(),
            "figure": [
                _rounded(metric.factor * by.mean(metric.by_row(own)), metric.decimals)
                for own in ranks.values()
            ],
            "decimals": metric.decimals,
            "better": "above" if metric.higher_is_better else "below",
        },
        "charts": {"hits": charts.hits()},
    }


def _numbered(column: Sequence[str], texts: dict[str, int]) -> list[int]:
    """Return texts as their numbers; new ones get the next."""
    return [texts.setdefault(text, len(texts)) for text in column]


def _score(page: Page, name: str) -> str:
    """Return a system's main figure with its interval."""
    result = next(result for result in page.results if result.name == name)
    metric, found = result.primary, result.main
    bounds = minus(range_text(metric, found.low, found.high))
    score = f"{metric.heading} {minus(metric.show(found.value))}"
    return f"{score} ({bounds})" if bounds else score


def _system(page: Page, rows: Rows, name: str, error: Floats) -> dict[str, Any]:
    similarity = np.asarray(page.similarity[name], dtype=np.float64)
    there, rated = np.isfinite(similarity), ~np.isnan(error)
    place = np.full(len(similarity), np.nan)
    place[there] = rank_share(similarity[there])
    levels = calibration(similarity[rated], rows.rating[rated])
    ratings = _on_scale(page, np.array([level.rating for level in levels]))
    return {
        "name": name,
        "score": _score(page, name),
        "similarity": _rounded(similarity, 4),
        "place": _rounded(1000 * place, 0),
        "error": _rounded(1000 * error, 0),
        "levels": [
            [rating, one.n, *_rounded(np.array([one.mean, one.low, one.median, one.high]), 4)]
            for rating, one in zip(ratings, levels, strict=True)
        ],
    }


def _errors(page: Page, rows: Rows, name: str) -> Floats:
    """Return (n,) the rank errors of a system; NaN where a row is unrated or not predicted."""
    similarity = np.asarray(page.similarity[name], dtype=np.float64)
    rated = np.isfinite(similarity) & rows.rated
    error = np.full(len(similarity), np.nan)
    error[rated] = rank_error(similarity[rated], rows.rating[rated])
    return error


def _conditions(
    page: Page,
    rows: Rows,
    rated: NDArray[np.bool_],
    texts: dict[str, int],
    errors: Sequence[Floats],
) -> dict[str, Any]:
    groups = by_condition([text for text, kept in zip(rows.condition, rated, strict=True) if kept])
    rating = rows.rating[rated]
    return {
        "what": ["condition", "conditions"],
        "text": _numbered(groups.label, texts),
        "n": groups.count.tolist(),
        "rating": _on_scale(page, groups.mean(rating), 2),
        "chance": _rounded(1000 * groups.mean(chance_error(rating)), 0),
        "error": [_rounded(1000 * groups.mean(np.abs(error[rated])), 0) for error in errors],
    }


def _curves(page: Page) -> list[dict[str, Any]]:
    found = []
    for result in page.results:
        curves = [
            [_epoch(epoch, page) for epoch in fit["curve"]]
            for fit in result.fits
            if fit.get("curve")
        ]
        if any(epoch[1:] != [None, None] for curve in curves for epoch in curve):
            same = len(result.seeds) == len(curves)
            labels = list(result.seeds) if same else list(range(len(curves)))
            found.append({"name": result.name, "labels": labels, "seeds": curves})
    return found


def _epoch(epoch: Mapping[str, Any], page: Page) -> list[float | None]:
    # Heads that rank know no metric.
    key = SCORE if SCORE in epoch else f"dev_{page.dev_metric}"
    # Of a head that another metric chose the epoch of, dev has no curve here.
    loss, dev = (np.array([epoch.get(name)], np.float64) for name in ("loss", key))
    factor = metric_of(page.dev_metric).factor
    return [epoch["epoch"], *_rounded(loss, 5), *_rounded(factor * dev, 5)]


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
    for i, result in enumerate(page.results):
        if finite(result.main.value) is None:
            continue
        about = [("c kept", "minus c")[result.subtract]] if page.subtracts else []
        about += [page.variants[1][i]] if page.variants else []
        about += ["control"] if result.control else []
        about += ["baseline"] if result.name in page.baselines else []
        label = f"{result.prompt or result.name}\n{', '.join(filter(None, about))}"
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
