"""The content of a page of results, checked, and how it is gathered from a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import as_matrix
from llmcond.data.rows import QueryRows, Rows
from llmcond.errors import UserError
from llmcond.evaluation.analyses import MAX_VECTORS, measure_isotropy
from llmcond.evaluation.results import Result, Subset
from llmcond.prompts import Prompt
from llmcond.runs import Run
from llmcond.runs.examples import RowFeatures, zero_shot_heads
from llmcond.system import provenance

#: The kinds of subsets of queries in results, and what they are called on the page.
_SUBSET_TITLES = {
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
        similarity: (n,) predictions by the result's name, averaged over seeds; NaN where a row has
            none. For queries they are ranks.
        isotropy: name, head, prompt, subtract, mean_cosine, std_cosine and partition_ratio of each
            set of vectors, and ``cosines``, those of its vectors to their mean, (m,).
        provenance: the provenance of the page, as nested JSON.
        baseline: the name of the first of the results that others are compared with; None if
            nothing is compared.
        variants: a heading, and each result's value under it, which distinguish results of the
            same head and prompt; None if there is nothing to distinguish.
        subsets: the scores of each result on subsets of the rows, by the kind of subset.
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
    baseline: str | None = None
    variants: tuple[str, Sequence[str]] | None = None
    subsets: Mapping[str, Sequence[Mapping[str, Subset]]] = field(default_factory=dict)
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

    @property
    def subtracts(self) -> bool:
        """Whether the page shows if the unconditional vector is subtracted."""
        return not self.ranked or any(result.subtract for result in self.results)

    @cached_property
    def systems(self) -> list[str]:
        """The names of the results that have predictions, in the order of the results."""
        return [r.name for r in self.results if len(self.similarity.get(r.name, ()))]

    @cached_property
    def baselines(self) -> Mapping[str, Result]:
        """The results that others are compared with, by name, the page's baseline first."""
        if self.baseline is None:
            return {}
        by_name = {result.name: result for result in self.results}
        against = (result.against for result in self.results if result.against)
        return {name: by_name[name] for name in (self.baseline, *against)}

    def initial_systems(self) -> tuple[str, str | None]:
        """Return the two systems selected at first: the best, and the baseline or the next best.

        The second is None if only one system has predictions.
        """
        known = [result for result in self.results if result.name in self.systems]
        # The results are sorted, best first; controls are moved to the end.
        ranked = [
            r.name for r in sorted(known, key=lambda result: bool(result.about.get("control")))
        ]
        others = (self.baseline, *ranked[1:])
        second = (name for name in others if name in self.systems and name != ranked[0])
        return ranked[0], next(second, None)


def make_page(
    run: Run,
    rows: Rows | QueryRows,
    results: Sequence[Result],
    similarity: Mapping[str, NDArray[np.floating]],
    *,
    title: str,
    summary: Sequence[str],
    settings: Mapping[str, Any],
) -> Page:
    """Gather the page of some results of a run.

    Args:
        run: the run; its store has the features of rated rows.
        rows: the scored rows.
        results: the results, best first.
        similarity: the predictions by the result's name, as in ``Page``.
        title: the page's title.
        summary: the sentences of the summary.
        settings: the settings of the evaluation, for the page's provenance.

    Raises:
        UserError: two results have the same name.
    """
    names = dict.fromkeys(name for result in results for name in result.prompts)
    prompts = [run.prompt(name) for name in names]
    manifest = run.manifest
    ranked = [result for result in results if "ties" in result.about]
    variants = [result.variant[1] for result in ranked]
    return Page(
        title=title,
        summary=summary,
        results=results,
        rows=rows,
        scale=run.rating_range,
        similarity=similarity,
        isotropy=_measure_isotropy(run, prompts, rows) if isinstance(rows, Rows) else (),
        provenance={
            "encoder": manifest["encoder"],
            "store_dtype": manifest["store_dtype"],
            "data": manifest["data"],
            "settings": settings,
            "prompts": {prompt.name: prompt.to_json() for prompt in prompts},
            **provenance(),
        },
        variants=(ranked[0].variant[0], variants) if any(variants) else None,
        subsets={
            title: [result.subsets[kind] for result in ranked]
            for kind, title in _SUBSET_TITLES.items()
            if ranked and kind in ranked[0].subsets
        },
        dev_metric=run.dev_metric,
    )


def _measure_isotropy(run: Run, prompts: Sequence[Prompt], rows: Rows) -> list[dict[str, Any]]:
    """Measure the isotropy of every prompt's features, with and without subtraction."""
    rated, store = np.flatnonzero(rows.rated)[:MAX_VECTORS], run.store()
    measurements = []
    for prompt in prompts:
        # New features for each prompt, so that memory holds one prompt's features at a time.
        features = RowFeatures(rows, store)
        for zeroshot in zero_shot_heads(run, prompt):
            pairs = features.pairs(zeroshot.view).take(rated)
            sides = [as_matrix(side).read() for side in (pairs.first, pairs.second)]
            identity = {"head": "none", "prompt": prompt.name, "subtract": zeroshot.view.subtracts}
            figures, cosines = measure_isotropy(zeroshot.name, np.concatenate(sides))
            measurements.append({**figures, **identity, "cosines": cosines})
    return measurements
