"""The content of a page of results, gathered from a run, and its tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmcond.base.errors import UserError
from llmcond.base.output import Column, Table
from llmcond.base.system import provenance
from llmcond.data.rows import QueryRows, Rows
from llmcond.evaluation.analyses import MAX_VECTORS, measure_isotropy
from llmcond.evaluation.results import Result
from llmcond.heads import PairArrays
from llmcond.prompts import Prompt
from llmcond.report.tables import (
    find_baselines,
    interval_column,
    number_column,
    text_column,
)
from llmcond.runs import Run, RunEmbeddingHead
from llmcond.runs.examples import RowFeatures, zero_shot_heads

if TYPE_CHECKING:
    from llmcond.features.store import FeatureStore

#: The kinds of subsets of queries in results, and what they are called on the page.
SUBSET_TITLES = {
    "parts": "part",
    "by_category": "category of relations",
    "by_relation": "relation",
    "by_history": "number of turns before",
    "cells": "turns before + turns to the goal",
}


@dataclass(frozen=True)
class Page:
    """The content of a page of results.

    Attributes:
        title: the page's title.
        summary: sentences in plain words, the most important first.
        results: one result for each system, best first. All have the same metrics, and unique
            names.
        rows: the n scored rows: rated rows, or queries whose answers were ranked.
        scale: the lowest and the highest rating on the data's scale.
        similarity: predictions by the result's name, (n,), or (seeds, n) of several seeds; NaN
            where a row has none. For queries they are ranks.
        isotropy: name, head, prompt, subtract, mean_cosine, std_cosine and partition_ratio of each
            set of vectors, and ``cosines``, those of its vectors to their mean, (m,).
        provenance: the provenance of the page, as nested JSON.
        dev_metric: the metric by which heads are selected on dev.

    Raises:
        UserError: two results have the same name.
    """

    title: str
    summary: Sequence[str]
    results: Sequence[Result]
    rows: Rows | QueryRows
    scale: tuple[float, float] = (0.0, 1.0)
    similarity: Mapping[str, NDArray[np.floating]] = field(default_factory=dict)
    isotropy: Sequence[Mapping[str, Any]] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    dev_metric: str = "spearman"

    def __post_init__(self) -> None:
        # Recipes of the same name may come from different folders.
        names = Counter(result.name for result in self.results)
        repeated = [name for name, count in names.items() if count > 1]
        if repeated:
            raise UserError(
                f"{len(repeated)} names of results occur more than once, such as {repeated[0]!r}. "
                "Each result needs its own name."
            )

    @property
    def ranked(self) -> bool:
        """Whether the rows are queries whose answers were ranked, instead of rated rows."""
        return isinstance(self.rows, QueryRows)

    @cached_property
    def systems(self) -> list[str]:
        """The names of the results that have predictions, in the order of the results."""
        return [r.name for r in self.results if len(self.similarity.get(r.name, ()))]

    def mean_prediction(self, name: str) -> NDArray[np.float64]:
        """Return the predictions of a system, (n,), averaged over its seeds."""
        mean: NDArray[np.float64] = np.atleast_2d(self.similarity[name]).mean(axis=0, dtype=float)
        return mean

    @cached_property
    def baselines(self) -> Mapping[str, Result]:
        """The results that others are compared with, by name, first that of the best result."""
        return find_baselines(self.results)

    def initial_systems(self) -> tuple[str, str | None]:
        """Return the two systems selected at first: the best, and the baseline or the next best.

        The second is None if only one system has predictions.
        """
        known = [result for result in self.results if result.name in self.systems]
        # The results are sorted, best first; controls are moved to the end.
        ranked = [
            r.name for r in sorted(known, key=lambda result: bool(result.about.get("control")))
        ]
        others = (*list(self.baselines)[:1], *ranked[1:])
        second = (name for name in others if name in self.systems and name != ranked[0])
        return ranked[0], next(second, None)


def make_page(
    run: Run,
    rows: Rows | QueryRows,
    results: Sequence[Result],
    similarity: Mapping[str, NDArray[np.floating]],
    store: FeatureStore | None,
    *,
    title: str,
    summary: Sequence[str],
    settings: Mapping[str, Any],
) -> Page:
    """Gather the page of some results of a run.

    Args:
        run: the run.
        rows: the scored rows.
        results: the results, best first.
        similarity: the predictions by the result's name, as in ``Page``.
        store: the store of the features of rated rows; None: there are none.
        title: the page's title.
        summary: the sentences of the summary.
        settings: the settings of the evaluation, for the page's provenance.

    Raises:
        UserError: two results have the same name.
    """
    names = dict.fromkeys(name for result in results for name in result.prompts)
    prompts = [run.prompt(name) for name in names]
    isotropy: Sequence[Mapping[str, Any]] = ()
    if isinstance(rows, Rows) and store is not None:
        rated, read = np.flatnonzero(rows.rated)[:MAX_VECTORS], partial(RowFeatures, rows, store)
        heads = (head for prompt in prompts for head in zero_shot_heads(run, prompt))
        # New features for each head, so that memory holds one prompt's features at a time.
        isotropy = measure_predictors(heads, lambda head: read().pairs(head.view).take(rated))
    return Page(
        title=title,
        summary=summary,
        results=results,
        rows=rows,
        scale=run.rating_range,
        similarity=similarity,
        isotropy=isotropy,
        provenance={**describe_run(run, prompts), "settings": settings, **provenance()},
        dev_metric=run.dev_metric,
    )


def describe_run(run: Run, prompts: Iterable[Prompt]) -> dict[str, Any]:
    """Return the encoder, the data and the prompts of a run for a page's provenance."""
    described = {key: run.manifest[key] for key in ("encoder", "store_dtype", "data")}
    return described | {"prompts": {prompt.name: prompt.to_json() for prompt in prompts}}


def measure_predictors(
    predictors: Iterable[RunEmbeddingHead],
    pairs_of: Callable[[RunEmbeddingHead], PairArrays],
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Measure the isotropy of the embeddings of both sides of pairs by each predictor."""
    rows = []
    for predictor in predictors:
        pairs, view = pairs_of(predictor), predictor.view
        vectors = [
            predictor.head.transform(side, pairs.condition) for side in (pairs.first, pairs.second)
        ]
        figures, cosines = measure_isotropy(predictor.name, np.concatenate(vectors), seed)
        identity = {"head": predictor.recipe, "prompt": view.name, "subtract": view.subtracts}
        rows.append({**figures, **identity, "cosines": cosines})
    return rows


#: With more subsets than this, the subsets become rows and the systems become columns.
_MAX_SUBSET_COLUMNS = 12


def subsets_table(kind: str, results: Sequence[Result]) -> Table:
    """Return the primary metric of each result on subsets of the queries, on a common axis.

    Args:
        kind: the kind of the subsets in the results.
        results: the results, each a row, or a column if there are many subsets.
    """
    metric, parts = results[0].primary, [result.subsets[kind] for result in results]
    first = parts[0]
    flat = [subsets[name].metrics[metric.name] for subsets in parts for name in first]
    cells = interval_column("", metric, flat).cells
    rows = [cells[i : i + len(first)] for i in range(0, len(cells), len(first))]
    if len(first) <= _MAX_SUBSET_COLUMNS:
        figures = zip(first.items(), zip(*rows, strict=True), strict=True)
        return Table(
            [
                text_column("system", [result.name for result in results]),
                *(
                    Column(name, column, "figures", detail=f"{part.n:,} queries")
                    for (name, part), column in figures
                ),
            ]
        )
    return Table(
        [
            text_column(SUBSET_TITLES[kind], list(first)),
            number_column("queries", [part.n for part in first.values()]),
            *(Column(r.name, row, "figures") for r, row in zip(results, rows, strict=True)),
        ]
    )
