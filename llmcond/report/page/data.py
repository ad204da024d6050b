"""What a page is made of, checked, and the numbers that its script draws and sorts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError
from llmcond.evaluation.breakdown import (
    by_condition,
    calibration,
    chance_error,
    rank_error,
    rank_share,
    rating_span,
)
from llmcond.evaluation.results import ComparedResult
from llmcond.metrics import Floats, finite, number
from llmcond.report.format import range_text
from llmcond.report.page import charts as page_charts
from llmcond.report.page.tables import Baselines, known, minus


@dataclass(frozen=True)
class Page:
    """What a page tells, computed elsewhere.

    Attributes:
        title: of the page.
        summary: sentences in plain words, the most important first.
        results: one for each system, best first, all of the same metrics; names are unique.
        number: (n,) the row's number in its file.
        sentence1, sentence2, condition: (n,) texts.
        rating: (n,) on 0 to 1; NaN where the row is unrated.
        scale: the lowest and the highest rating as the data has them.
        similarity: for each result's name (n,) predictions, in the mean over seeds; NaN where
            there is none.
        isotropy: for each set of vectors name, head, prompt, subtract, mean_cosine, std_cosine and
            partition_ratio.
        made: what made the page, as nested JSON.
        baseline: the name of the result that comes first of those that others are compared with;
            None: nothing is compared.
    """

    title: str
    summary: Sequence[str]
    results: Sequence[ComparedResult]
    number: Sequence[int]
    sentence1: Sequence[str]
    sentence2: Sequence[str]
    condition: Sequence[str]
    rating: Floats
    scale: tuple[float, float] = (0.0, 1.0)
    similarity: Mapping[str, NDArray[np.floating]] = field(default_factory=dict)
    isotropy: Sequence[Mapping[str, Any]] = ()
    made: Mapping[str, Any] = field(default_factory=dict)
    baseline: str | None = None

    def __post_init__(self) -> None:
        names = [result.name for result in self.results]
        if not names:
            raise UserError("a page was asked for without results; give one at least.")
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise UserError(f"{len(twice)} names occur more than once, such as {twice[0]!r}.")
        against = [result.against for result in self.results if result.against]
        for name in () if self.baseline is None else (self.baseline, *against):
            if name not in names:
                raise UserError(f"the baseline {name!r} is none of the results.")
        n = len(self.rating)
        columns: dict[str, Any] = {
            "numbers": self.number,
            "first sentences": self.sentence1,
            "second sentences": self.sentence2,
            "conditions": self.condition,
            **{f"predictions of {name}": column for name, column in self.similarity.items()},
        }
        for what, column in columns.items():
            if len(column) != n:
                raise UserError(f"{len(column)} {what} came with {n} ratings.")

    @cached_property
    def systems(self) -> list[str]:
        """Return the names of the results whose predictions are there, in their order."""
        return [one.name for one in self.results if len(self.similarity.get(one.name, ()))]

    def chosen(self) -> tuple[str, str | None]:
        """Return the two systems to begin with: the best, and the baseline or the next best."""
        known = [result for result in self.results if result.name in self.systems]
        # They come best first: controls go last.
        ranked = [one.name for one in sorted(known, key=lambda result: bool(result.control))]
        others = (self.baseline, *ranked[1:])
        second = (name for name in others if name in self.systems and name != ranked[0])
        return ranked[0], next(second, None)


def counts(results: Sequence[ComparedResult]) -> list[str]:
    """Return what was scored, once for each set of rows."""
    found = (
        f"{one.split}: {one.counts.n:,} rated rows of {one.counts.n_pairs:,} sentence pairs"
        for one in results
    )
    return list(dict.fromkeys(found))


def embedded(page: Page) -> dict[str, Any]:
    """Return what the page's script needs, as JSON has it; every text is there once."""
    data: dict[str, Any] = {"config": page_charts.CONFIG, "charts": {}, "curves": _curves(page)}
    data["primary"] = page.results[0].primary.heading
    data |= {"systems": [], "chosen": (None, None), "conditions": None}
    if page.systems:
        texts: dict[str, int] = {}
        low, high = page.scale
        data["scale"] = [low, high]
        errors = {name: _errors(page, name) for name in page.systems}
        data["systems"] = [_system(page, name, error) for name, error in errors.items()]
        data["chosen"] = page.chosen()
        data["rows"] = {
            "number": [int(number) for number in page.number],
            "rating": _rounded(low + (high - low) * page.rating, 4),
            **{
                key: [texts.setdefault(text, len(texts)) for text in getattr(page, key)]
                for key in ("sentence1", "sentence2", "condition")
            },
        }
        data["conditions"] = _conditions(page, texts, errors)
        data["spans"] = _spans(page)
        data["texts"] = list(texts)
        data["charts"] |= {"scatter": page_charts.scatter(), "levels": page_charts.calibration()}
    epochs = [epoch for curve in data["curves"] for seed in curve["seeds"] for epoch in seed]
    for place, name, title in ((1, "loss", "loss"), (2, "dev", "Spearman on dev × 100")):
        if any(epoch[place] is not None for epoch in epochs):
            data["charts"][name] = page_charts.curves(name, title)
    return data


def _system(page: Page, name: str, error: Floats) -> dict[str, Any]:
    similarity = np.asarray(page.similarity[name], dtype=np.float64)
    there = np.isfinite(similarity)
    rated = there & ~np.isnan(page.rating)
    place = np.full(len(similarity), np.nan)
    place[there] = rank_share(similarity[there])
    result = next(result for result in page.results if result.name == name)
    low, high = page.scale
    return {
        "name": name,
        "score": _score_text(result),
        "similarity": _rounded(similarity, 4),
        "place": _rounded(1000 * place, 0),
        "error": _rounded(1000 * error, 0),
        "levels": [
            [
                round(low + (high - low) * level.rating, 4),
                level.n,
                *(round(v, 4) for v in (level.mean, level.low, level.median, level.high)),
            ]
            for level in calibration(similarity[rated], page.rating[rated])
        ],
    }


def _score_text(result: ComparedResult) -> str:
    metric, found = result.primary, result.main
    bounds = minus(range_text(metric, found.low, found.high))
    text = f"{metric.heading} {minus(metric.show(found.value))}"
    return f"{text} ({bounds})" if bounds else text


def _errors(page: Page, name: str) -> Floats:
    similarity = np.asarray(page.similarity[name], dtype=np.float64)
    rated = np.isfinite(similarity) & ~np.isnan(page.rating)
    error = np.full(len(similarity), np.nan)
    error[rated] = rank_error(similarity[rated], page.rating[rated])
    return error


def _conditions(
    page: Page, texts: dict[str, int], errors: Mapping[str, Floats]
) -> dict[str, Any] | None:
    rated = ~np.isnan(page.rating)
    if not rated.any():
        return None
    groups = by_condition([text for text, kept in zip(page.condition, rated, strict=True) if kept])
    low, high = page.scale
    return {
        "text": [texts.setdefault(label, len(texts)) for label in groups.label],
        "n": groups.count.tolist(),
        "rating": _rounded(low + (high - low) * groups.mean(page.rating[rated]), 2),
        "chance": _rounded(1000 * groups.mean(chance_error(page.rating[rated])), 0),
        "error": [
            _rounded(1000 * groups.mean(np.abs(error[rated])), 0) for error in errors.values()
        ],
    }


def _spans(page: Page) -> list[list[Any]]:
    """Return for each rating the places that its rows take in a perfect order."""
    rating = page.rating[~np.isnan(page.rating)]
    low, high = page.scale
    first, last = rating_span(rating)
    found = zip(
        _rounded(low + (high - low) * rating, 4),
        _rounded(1000 * first, 0),
        _rounded(1000 * last, 0),
        strict=True,
    )
    return [list(span) for span in dict.fromkeys(found)]


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
    dev = finite(epoch["dev_spearman"])
    figures = (finite(epoch["loss"]), None if dev is None else 100 * dev)
    rounded = _rounded(np.array(figures, dtype=np.float64), 5)
    return [epoch["epoch"], *rounded]


def _rounded(values: NDArray[np.floating], digits: int) -> list[Any]:
    """Return values as short JSON: None for NaN, whole numbers without a decimal point."""
    rounded = (round(float(v), digits) if math.isfinite(v) else None for v in values)
    return [int(v) if v is not None and v.is_integer() else v for v in rounded]


# -- charts that are the same whichever systems are chosen ---------------------------------------


@dataclass(frozen=True, slots=True)
class Legend:
    """The looks of a chart's series: name, colour and mark."""

    entries: tuple[tuple[str, str, str], ...]


def _legend(names: Sequence[str]) -> Legend:
    return Legend(tuple((name, *page_charts.look(i)) for i, name in enumerate(names)))


def by_head(page: Page) -> tuple[dict[str, Any], Legend] | None:
    """Return the primary metric by head and template as a chart, best template first.

    None where it is defined for fewer than two results.
    """
    metric = page.results[0].primary
    defined = [result for result in page.results if finite(result.main.value) is not None]
    if len(defined) < 2:
        return None
    series = list(dict.fromkeys(_series(result) for result in defined))
    heads = list(dict.fromkeys(result.head for result in defined))
    rows = []
    used: Counter[tuple[str, str]] = Counter()
    for result in defined:
        label = f"{result.prompt}\n{'minus c' if result.subtract else 'c kept'}"
        # Several fits of one head and template stand beside each other, too.
        slot = heads.index(result.head) + len(heads) * used[label, result.head]
        used[label, result.head] += 1
        found = result.main
        low, high = known(found.low, found.high)
        rows.append(
            {
                "label": label,
                "slot": slot,
                "series": _series(result),
                "value": metric.scaled(found.value),
                "low": metric.scaled(low),
                "high": metric.scaled(high),
                "system": result.name,
                metric.heading: minus(metric.show(found.value)),
                "95 % interval": minus(range_text(metric, found.low, found.high)) or "undefined",
            }
        )
    baselines = Baselines.of(page.results, page.baseline)
    one = baselines.named if len(baselines.all) == 1 else None
    reference = None if one is None else metric.scaled(one.main.value)
    description = f"{metric.heading} of each system with its 95 % interval, by template and head."
    factor = "" if metric.factor == 1 else f" × {metric.factor:g}"
    title = f"{metric.heading}{factor}"
    return page_charts.intervals(rows, series, title, description, reference), _legend(series)


def _series(result: ComparedResult) -> str:
    return f"{result.head}, control" if result.control else result.head


def isotropy_charts(page: Page) -> tuple[list[dict[str, Any]], Legend] | None:
    """Return the mean cosine and the partition ratio of each set of vectors as charts."""
    kinds: list[str] = ["minus c" if row["subtract"] else "c kept" for row in page.isotropy]
    series: list[str] = [name for name in ("minus c", "c kept") if name in kinds]
    charts = []
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
            charts.append(page_charts.intervals(rows, series, title, f"{title}, by template."))
    return (charts, _legend(series)) if charts else None
