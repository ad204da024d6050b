"""What a page of results shows, checked, and gathered from a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import as_matrix
from llmcond.data.queries import QueryRows
from llmcond.data.rows import Rows
from llmcond.errors import UserError
from llmcond.evaluation.isotropy import MOST_VECTORS, measure_isotropy
from llmcond.evaluation.ranked import QueryResult
from llmcond.evaluation.ranking import Part
from llmcond.evaluation.results import ComparedResult, Result
from llmcond.prompts import Prompt
from llmcond.runs import AnyRun
from llmcond.runs.features import RowFeatures
from llmcond.runs.predictors import zeroshots
from llmcond.system import provenance


@dataclass(frozen=True)
class Page:
    """What a page tells, computed elsewhere.

    Attributes:
        title: of the page.
        summary: sentences in plain words, the most important first.
        results: one for each system, best first, all of the same metrics; names are unique.
        rows: what was scored, n of them: rated rows, or queries whose answers were ranked.
        scale: the lowest and the highest rating as the data has them.
        similarity: for each result's name (n,) predictions, in the mean over seeds; NaN where
            there is none. Of queries they are ranks.
        isotropy: for each set of vectors name, head, prompt, subtract, mean_cosine, std_cosine and
            partition_ratio.
        made: what made the page, as nested JSON.
        baseline: the name of the result that comes first of those that others are compared with;
            None: nothing is compared.
        variants: what tells results of one head and prompt from each other: of what kind, and of
            each result which; None: nothing.
        parts: figures of some of the rows: by what they are parted, of each result by part.
        dev_metric: what heads are chosen by on dev.
    """

    title: str
    summary: Sequence[str]
    results: Sequence[ComparedResult]
    rows: Rows | QueryRows
    scale: tuple[float, float] = (0.0, 1.0)
    similarity: Mapping[str, NDArray[np.floating]] = field(default_factory=dict)
    isotropy: Sequence[Mapping[str, Any]] = ()
    made: Mapping[str, Any] = field(default_factory=dict)
    baseline: str | None = None
    variants: tuple[str, Sequence[str]] | None = None
    parts: Mapping[str, Sequence[Mapping[str, Part]]] = field(default_factory=dict)
    dev_metric: str = "spearman"

    def __post_init__(self) -> None:
        # As of recipes of one name from different folders.
        names = Counter(result.name for result in self.results)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise UserError(f"{len(twice)} names occur more than once, such as {twice[0]!r}.")

    @property
    def ranked(self) -> bool:
        """Return whether answers were ranked, and nothing was rated."""
        return isinstance(self.rows, QueryRows)

    @property
    def subtracts(self) -> bool:
        """Return whether it says something that the unconditional vector is subtracted, or not."""
        return not self.ranked or any(result.subtract for result in self.results)

    @cached_property
    def systems(self) -> list[str]:
        """Return the names of the results whose predictions are there, in their order."""
        return [one.name for one in self.results if len(self.similarity.get(one.name, ()))]

    @cached_property
    def baselines(self) -> Mapping[str, ComparedResult]:
        """Return the results that others are compared with by name, the page's baseline first."""
        if self.baseline is None:
            return {}
        by_name = {result.name: result for result in self.results}
        against = (result.against for result in self.results if result.against)
        return {name: by_name[name] for name in (self.baseline, *against)}

    def chosen(self) -> tuple[str, str | None]:
        """Return the two systems to begin with: the best, and the baseline or the next best."""
        known = [result for result in self.results if result.name in self.systems]
        # They come best first: controls go last.
        ranked = [one.name for one in sorted(known, key=lambda result: bool(result.control))]
        others = (self.baseline, *ranked[1:])
        second = (name for name in others if name in self.systems and name != ranked[0])
        return ranked[0], next(second, None)


def page_of(
    run: AnyRun,
    rows: Rows | QueryRows,
    results: Sequence[Result],
    similarity: Mapping[str, NDArray[np.floating]],
    *,
    title: str,
    summary: Sequence[str],
    settings: Mapping[str, Any],
) -> Page:
    """Return the page of some results of a run, arguments as the attributes of :class:`Page`.

    Rated rows are in the run's store; ``settings`` are what was asked for.

    Raises:
        UserError: two results have one name.
    """
    names = dict.fromkeys(name for result in results for name in result.prompts)
    prompts = [run.prompt(name) for name in names]
    manifest = run.manifest
    ranked = [one for one in results if isinstance(one, QueryResult)]
    variants = [result.variant[1] for result in ranked]
    return Page(
        title=title,
        summary=summary,
        results=[
            one if isinstance(one, ComparedResult) else ComparedResult.of(one) for one in results
        ],
        rows=rows,
        scale=run.rating_range,
        similarity=similarity,
        isotropy=_isotropy(run, prompts, rows) if isinstance(rows, Rows) else (),
        made={
            "encoder": manifest["encoder"],
            "store_dtype": manifest["store_dtype"],
            "data": manifest["data"],
            "settings": settings,
            "prompts": {prompt.name: prompt.to_json() for prompt in prompts},
            **provenance(),
        },
        variants=(ranked[0].variant[0], variants) if any(variants) else None,
        parts={
            kind: [one.grouped[kind] for one in ranked]
            for kind in (ranked[0].grouped if ranked else ())
        },
        dev_metric=run.dev_metric,
    )


def _isotropy(run: AnyRun, prompts: Sequence[Prompt], rows: Rows) -> list[dict[str, Any]]:
    """Return the isotropy of every prompt's features, with and without subtraction."""
    rated, store = np.flatnonzero(rows.rated)[:MOST_VECTORS], run.store()
    found = []
    for prompt in prompts:
        # Anew for each prompt: memory holds one prompt's features at a time.
        features = RowFeatures(rows, store)
        for zeroshot in zeroshots(run, prompt):
            pairs = features.pairs(zeroshot.view).take(rated)
            sides = [as_matrix(side).read() for side in (pairs.first, pairs.second)]
            about = {"head": "none", "prompt": prompt.name, "subtract": zeroshot.view.subtracts}
            measured = measure_isotropy(zeroshot.name, np.concatenate(sides))
            found.append({**measured, **about})
    return found
