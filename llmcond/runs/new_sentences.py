"""The score on rows that share no sentence with the training rows."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmcond.data.rows import Rows, shares_sentence
from llmcond.evaluation.results import Result, Subset, score_results
from llmcond.metrics import Metric
from llmcond.runs.run_heads import RunFittedHead
from llmcond.runs.task_runs import Run


def collect_training_sentences(
    run: Run, heads: Sequence[RunFittedHead], split: str | None
) -> set[str]:
    """Return the folded sentences of the rated rows that the encoder or a head was trained on.

    ``split`` is the split of the run that is scored; its sentences are not included.
    """
    splits = {"train", *run.trained_on, *(name for head in heads for name in head.trained_on)}
    sentences: set[str] = set()
    for name in splits - {split}:
        rows = run.rows(name)
        sentences |= rows.take(rows.rated).folded_sentences()
    return sentences


def add_new_sentences(
    results: Sequence[Result],
    similarity: Sequence[NDArray[np.floating]],
    rows: Rows,
    sentences: Set[str],
    metrics: Sequence[Metric],
) -> list[Result]:
    """Add the scores on rows with none, and with any, of the ``sentences`` to each result.

    Results are unchanged if no row contains any of them. ``similarity`` holds, for each result, the
    (seeds, n) predictions of all rows, including unrated ones.
    """
    is_new = rows.rated & ~shares_sentence(rows, sentences)
    if is_new.sum() == rows.rated.sum():
        return list(results)
    new, shared = (
        score_results(
            results, [predictions[:, mask] for predictions in similarity], rows.take(mask), metrics
        )
        for mask in (is_new, rows.rated & ~is_new)
    )
    return [
        replace(
            result,
            subsets={
                **result.subsets,
                "sentences": {
                    name: Subset(part.counts.n, part.metrics, {"n_pairs": part.counts.n_pairs})
                    for name, part in (
                        ("unseen_sentences", new_part),
                        ("shared_sentences", shared_part),
                    )
                },
            },
        )
        for result, new_part, shared_part in zip(results, new, shared, strict=True)
    ]
