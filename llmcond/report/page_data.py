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
from llmcond.metrics import Floats
from llmcond.report import page_charts
from llmcond.report.page_tables import Baselines, Result, figure, hundred, interval, known


@dataclass(frozen=True)
class Page:
    """What a page tells, computed elsewhere.

    Attributes:
        title: of the page.
        summary: sentences in plain words, the most important first.
        results: one for each way of predicting, best first: name (unique), head ("none" is
            zero-shot), prompt, subtract, split, n, n_pairs, spearman, spearman_ci, pearson,
            accuracy, accuracy_ci, dim, seeds, spearman_sd, control ("" if it is none) and
            difference: None for a baseline and where nothing is compared, or for spearman and
            accuracy value, low, high, p, p_holm, minimum and verdict ("better", "worse", "no
            evidence"); against: the name of the result that it is a difference to. Any figure may
            be None.
        number: (n,) the row's number in its file.
        sentence1, sentence2, condition: (n,) texts.
        rating: (n,) on 0 to 1; NaN where the row is unrated.
        scale: the lowest and the highest rating as the data has them.
        similarity: for each result's name (n,) predictions, in the mean over seeds; NaN where
            there is none.
        isotropy: for each set of vectors name, mean_cosine, std_cosine and partition_ratio.
        curves: by name and seed, epochs of epoch, loss and dev_spearman.
        made: what made the page, as nested JSON.
        baseline: the name of the result that comes first of those that others are compared with;
            None: nothing is compared.
    """

    title: str
    summary: Sequence[str]
    results: Sequence[Result]
    number: Sequence[int]
    sentence1: Sequence[str]
    sentence2: Sequence[str]
    condition: Sequence[str]
    rating: Floats
    scale: tuple[float, float] = (0.0, 1.0)
    similarity: Mapping[str, NDArray[np.floating]] = field(default_factory=dict)
    isotropy: Sequence[Mapping[str, Any]] = ()
    curves: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]] = field(default_factory=dict)
    made: Mapping[str, Any] = field(default_factory=dict)
    baseline: str | None = None

    def __post_init__(self) -> None:
        names = [result["name"] for result in self.results]
        if not names:
            raise UserError("a page was asked for without results; give one at least.")
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise UserError(f"{len(twice)} names occur more than once, such as {twice[0]!r}.")
        against = [result["against"] for result in self.results if result["difference"]]
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
    def ways(self) -> list[str]:
        """Return the names of the results whose predictions are there, in their order."""
        return [r["name"] for r in self.results if len(self.similarity.get(r["name"], ()))]

    def chosen(self) -> tuple[str, str | None]:
        """Return the two ways to begin with: the best, and the baseline or the next best."""
        control = {result["name"]: bool(result["control"]) for result in self.results}
        score = {result["name"]: result["spearman"] for result in self.results}
        ranked = sorted(self.ways, key=lambda way: (control[way], -_or(score[way], -math.inf)))
        first = ranked[0]
        others = [self.baseline, *ranked[1:]]
        return first, next((way for way in others if way in self.ways and way != first), None)


def _or(value: float | None, instead: float) -> float:
    return instead if value is None or not math.isfinite(value) else value


def counts(results: Sequence[Result]) -> list[str]:
    """Return what was scored, once for each set of rows."""
    found = (
        f"{result['split']}: {result['n']:,} rated rows of {result['n_pairs']:,} sentence pairs"
        for result in results
    )
    return list(dict.fromkeys(found))


def embedded(page: Page) -> dict[str, Any]:
    """Return what the page's script needs, as JSON has it; every text is there once."""
    data: dict[str, Any] = {"config": page_charts.CONFIG, "charts": {}, "curves": _curves(page)}
    data |= {"ways": [], "chosen": (None, None), "conditions": None}
    if page.ways:
        texts: dict[str, int] = {}
        low, high = page.scale
        data["scale"] = [low, high]
        errors = {name: _errors(page, name) for name in page.ways}
        data["ways"] = [_way(page, name, error) for name, error in errors.items()]
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
    epochs = [epoch for way in data["curves"] for seed in way["seeds"] for epoch in seed]
    for place, name, title in ((1, "loss", "loss"), (2, "dev", "Spearman on dev × 100")):
        if any(epoch[place] is not None for epoch in epochs):
            data["charts"][name] = page_charts.curves(name, title)
    return data


def _way(page: Page, name: str, error: Floats) -> dict[str, Any]:
    similarity = np.asarray(page.similarity[name], dtype=np.float64)
    there = np.isfinite(similarity)
    rated = there & ~np.isnan(page.rating)
    place = np.full(len(similarity), np.nan)
    place[there] = rank_share(similarity[there])
    result = next(result for result in page.results if result["name"] == name)
    low, high = page.scale
    return {
        "name": name,
        "told": _told(result),
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


def _told(result: Result) -> str:
    bounds = interval(result["spearman_ci"])
    return f"Spearman {hundred(result['spearman'])}" + (f" ({bounds})" if bounds else "")


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
    seeds = {result["name"]: list(result["seeds"]) for result in page.results}
    found = []
    for name, runs in page.curves.items():
        curves = [[_epoch(epoch) for epoch in run] for run in runs if run]
        if any(epoch[1:] != [None, None] for curve in curves for epoch in curve):
            numbers = seeds.get(name, [])
            labels = numbers if len(numbers) == len(curves) else list(range(len(curves)))
            found.append({"name": name, "labels": labels, "seeds": curves})
    return found


def _epoch(epoch: Mapping[str, Any]) -> list[float | None]:
    dev = epoch["dev_spearman"]
    loss, score = _rounded(
        np.array([_or(epoch["loss"], math.nan), 100 * _or(dev, math.nan)], dtype=np.float64), 5
    )
    return [epoch["epoch"], loss, score]


def _rounded(values: NDArray[np.floating], digits: int) -> list[Any]:
    """Return values as short JSON: None for NaN, whole numbers without a decimal point."""
    rounded = (round(float(v), digits) if math.isfinite(v) else None for v in values)
    return [int(v) if v is not None and v.is_integer() else v for v in rounded]


# -- charts that are the same whichever ways are looked at ---------------------------------------


@dataclass(frozen=True, slots=True)
class Legend:
    """The looks of a chart's series: name, colour and mark."""

    entries: tuple[tuple[str, str, str], ...]


def _legend(names: Sequence[str]) -> Legend:
    return Legend(tuple((name, *page_charts.look(i)) for i, name in enumerate(names)))


def by_head(page: Page) -> tuple[dict[str, Any], Legend] | None:
    """Return Spearman by head and template as a chart, best template first; None for one alone."""
    defined = [result for result in page.results if result["spearman"] is not None]
    if len(defined) < 2:
        return None
    series = list(dict.fromkeys(_series(result) for result in defined))
    heads = list(dict.fromkeys(str(result["head"]) for result in defined))
    rows = []
    used: Counter[tuple[str, str]] = Counter()
    for result in sorted(defined, key=lambda r: -r["spearman"]):
        label, head = _label(result), str(result["head"])
        # Several fits of one head and template stand beside each other, too.
        slot = heads.index(head) + len(heads) * used[label, head]
        used[label, head] += 1
        low, high = known(result["spearman_ci"])
        rows.append(
            {
                "label": label,
                "slot": slot,
                "series": _series(result),
                "value": 100 * result["spearman"],
                "low": None if low is None else 100 * low,
                "high": None if high is None else 100 * high,
                "way": result["name"],
                "Spearman": hundred(result["spearman"]),
                "95 % interval": interval(result["spearman_ci"]) or "undefined",
            }
        )
    baselines = Baselines.of(page.results, page.baseline)
    one = baselines.named if len(baselines.all) == 1 else None
    reference = None if one is None or one["spearman"] is None else 100 * one["spearman"]
    description = "Spearman of each way of predicting with its 95 % interval, by template and head."
    spec = page_charts.intervals(rows, series, "Spearman × 100", description, reference)
    return spec, _legend(series)


def _series(result: Result) -> str:
    return f"{result['head']}, control" if result["control"] else str(result["head"])


def _label(result: Result) -> str:
    return f"{result['prompt']}\n{'minus c' if result['subtract'] else 'c kept'}"


def isotropy_charts(page: Page) -> tuple[list[dict[str, Any]], Legend] | None:
    """Return the mean cosine and the partition ratio of each set of vectors as charts."""
    parts = [(row, *_split_name(str(row["name"]))) for row in page.isotropy]
    series = [name for name in ("minus c", "c kept") if any(part[2] == name for part in parts)]
    charts = []
    for key, spread, title in (
        ("mean_cosine", "std_cosine", "mean cosine ± sd"),
        ("partition_ratio", None, "partition ratio"),
    ):
        rows = []
        for row, label, kind in parts:
            value = row[key]
            if value is None:
                continue
            sd = None if spread is None else row[spread]
            rows.append(
                {
                    "label": label,
                    "slot": series.index(kind),
                    "series": kind,
                    "value": value,
                    "low": None if sd is None else value - sd,
                    "high": None if sd is None else value + sd,
                    "way": row["name"],
                    key.replace("_", " "): figure(value, ".3f"),
                }
            )
        if rows:
            charts.append(page_charts.intervals(rows, series, title, f"{title}, by template."))
    return (charts, _legend(series)) if charts else None


def _split_name(name: str) -> tuple[str, str]:
    """Return what vectors are called apart from subtraction, in two lines, and which it is."""
    kept = name.removesuffix("+c")
    head, _, template = kept.partition("@")
    label = f"{template}\n{head}" if template else kept
    return label, "c kept" if kept != name else "minus c"
