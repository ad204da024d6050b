"""The score on rows that share no sentence with those that were trained on."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcond.data.rows import Rows, shares_sentence
from llmcond.evaluation.results import Result, score
from llmcond.metrics import Metric
from llmcond.runs.saved import SavedHead
from llmcond.runs.task_runs import Run

R = TypeVar("R", bound=Result)


def trained_sentences(run: Run, heads: Sequence[SavedHead], split: str | None) -> set[str]:
    """Return the folded sentences of the rated rows that the encoder or a head was trained on.

    Those of ``split``, the run's own rows that are scored, do not count.
    """
    splits = {"train", *run.trained_on, *(name for head in heads for name in head.trained_on)}
    sentences: set[str] = set()
    for name in splits - {split}:
        rows = run.rows(name)
        sentences |= rows.take(rows.rated).folded_sentences()
    return sentences


def with_new_sentences(
    results: Sequence[R],
    similarity: Sequence[NDArray[np.floating]],
    rows: Rows,
    sentences: Set[str],
    metrics: Sequence[Metric],
) -> list[R]:
    """Return results that also have the score on rows with none of the ``sentences``.

    Where no row has any of them, results are as they were. ``similarity`` are for each (seeds, n)
    predictions of all rows, unrated ones included.
    """
    new = rows.rated & ~shares_sentence(rows, sentences)
    if new.sum() == rows.rated.sum():
        return list(results)
    parts = score(results, [own[:, new] for own in similarity], rows.take(new), metrics)
    return [
        replace(result, new_sentences=part) for result, part in zip(results, parts, strict=True)
    ]
