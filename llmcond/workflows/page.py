"""The page of a comparison or an evaluation: what a run holds, gathered for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import as_matrix
from llmcond.data.rows import Rows
from llmcond.evaluation.isotropy import MOST_VECTORS, measure_isotropy
from llmcond.prompts import Prompt
from llmcond.report.page import Page
from llmcond.runs import Run
from llmcond.runs.features import RowFeatures
from llmcond.runs.predictors import label, zeroshots
from llmcond.runs.provenance import provenance

#: What results of evaluations lack beside those of comparisons.
_DEFAULTS: Mapping[str, Any] = {
    "seeds": (),
    "spearman_sd": None,
    "control": "",
    "difference": None,
    "against": None,
}


def page_of(
    run: Run,
    rows: Rows,
    results: Sequence[Mapping[str, Any]],
    similarity: Mapping[str, NDArray[np.floating]],
    curves: Mapping[str, Sequence[Any]],
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
        results: one for each way of predicting, best first.
        similarity: result's name -> (n,) predictions of all rows.
        curves: result's name -> learning curves, by seed.
        title: of the page.
        summary: sentences.
        settings: what was asked for.
        baseline: a result's name.

    Raises:
        UserError: no results.
    """
    names = list(dict.fromkeys(str(result["prompt"]) for result in results))
    prompts = [run.prompt(part) for part in dict.fromkeys("+".join(names).split("+")) if part]
    manifest = run.manifest
    return Page(
        title=title,
        summary=summary,
        results=[{**_DEFAULTS, **result} for result in results],
        number=rows.number.tolist(),
        sentence1=rows.sentence1,
        sentence2=rows.sentence2,
        condition=rows.condition,
        rating=rows.rating,
        scale=(run.scale.low, run.scale.high),
        similarity=similarity,
        isotropy=_isotropy(run, prompts, rows),
        curves={name: found for name, found in curves.items() if any(found)},
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
            found.append(measure_isotropy(label(zeroshot), np.concatenate(sides)))
    return found
