"""What a page of results shows, gathered from a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import as_matrix
from llmcond.data.rows import Rows
from llmcond.evaluation.isotropy import MOST_VECTORS, measure_isotropy
from llmcond.evaluation.results import ComparedResult, Result
from llmcond.prompts import Prompt
from llmcond.report.page.data import Page
from llmcond.runs import Run
from llmcond.runs.features import RowFeatures
from llmcond.runs.predictors import zeroshots
from llmcond.runs.provenance import provenance


def page_of(
    run: Run,
    rows: Rows,
    results: Sequence[Result],
    similarity: Mapping[str, NDArray[np.floating]],
    *,
    title: str,
    summary: Sequence[str],
    settings: Mapping[str, Any],
    baseline: str | None = None,
) -> Page:
    """Return the page of some results.

    Args:
        run: what the results are of.
        rows: what was scored, extracted into the run's store.
        results: one for each system, best first.
        similarity: result's name -> (n,) predictions of all rows.
        title: of the page.
        summary: sentences.
        settings: what was asked for.
        baseline: a result's name.

    Raises:
        UserError: no results.
    """
    names = dict.fromkeys(name for result in results for name in result.prompts)
    prompts = [run.prompt(name) for name in names]
    manifest = run.manifest
    return Page(
        title=title,
        summary=summary,
        results=[_compared(result) for result in results],
        number=rows.number.tolist(),
        sentence1=rows.sentence1,
        sentence2=rows.sentence2,
        condition=rows.condition,
        rating=rows.rating,
        scale=(run.scale.low, run.scale.high),
        similarity=similarity,
        isotropy=_isotropy(run, prompts, rows),
        made={
            "encoder": manifest["encoder"],
            "store_dtype": manifest["store_dtype"],
            "data": manifest["data"],
            "settings": settings,
            "prompts": {prompt.name: prompt.to_json() for prompt in prompts},
            **provenance(),
        },
        baseline=baseline,
    )


def _compared(result: Result) -> ComparedResult:
    if isinstance(result, ComparedResult):
        return result
    return ComparedResult(**{field.name: getattr(result, field.name) for field in fields(result)})


def _isotropy(run: Run, prompts: Sequence[Prompt], rows: Rows) -> list[dict[str, Any]]:
    """Return the isotropy of every prompt's features, with and without subtraction."""
    rated, store = np.flatnonzero(rows.rated)[:MOST_VECTORS], run.store()
    found = []
    for prompt in prompts:
        # Anew for each prompt: memory holds one prompt's features at a time.
        features = RowFeatures(rows, store)
        for zeroshot in zeroshots(prompt):
            pairs = features.pairs(zeroshot.view).take(rated)
            sides = [as_matrix(side).read() for side in (pairs.first, pairs.second)]
            about = {"head": "none", "prompt": prompt.name, "subtract": zeroshot.view.subtracts}
            measured = measure_isotropy(zeroshot.name, np.concatenate(sides))
            found.append({**measured, **about})
    return found
