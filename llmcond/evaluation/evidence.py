"""Differences between prompts under the same head, corrected for the number of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmcond.data.rows import Rows
from llmcond.evaluation.paired import Difference, corrected, differences
from llmcond.evaluation.results import ComparedResult, Results, best_first, resampled, with_figures
from llmcond.metrics import DEFAULT, Metric


@dataclass(frozen=True, slots=True)
class System:
    """A prompt under one head, to be compared with the baseline prompt under the same.

    Attributes:
        group: what it has in common with the prompts that it is compared with.
        result: what it is, without figures.
        similarity: (seeds, n) predictions of all rows.
    """

    group: tuple[str, bool]
    result: ComparedResult
    similarity: NDArray[np.float32]


def with_evidence(
    systems: Sequence[System], baseline: str, rows: Rows, metrics: Sequence[Metric] = DEFAULT
) -> Results[ComparedResult]:
    """Return the figures of each system and its difference to the baseline, best first.

    Holm's correction is over the differences of all groups.
    """
    results = [system.result for system in systems]
    draws = resampled(results, [system.similarity for system in systems], rows, metrics)
    tested = [metric for metric in metrics if not metric.secondary]
    found: dict[int, dict[str, Difference]] = {}
    against: dict[int, str] = {}
    for group in dict.fromkeys(system.group for system in systems):
        members = [i for i, system in enumerate(systems) if system.group == group]
        base = next((i for i in members if results[i].prompt == baseline), None)
        if base is None:
            continue
        others = [i for i in members if i != base]
        compared = differences(draws, base, others, tested, computed=metrics)
        found |= dict(zip(others, compared, strict=True))
        against |= dict.fromkeys(others, results[base].name)
    whole = dict(zip(found, corrected(list(found.values()), tested), strict=True))
    return best_first(
        replace(result, difference=whole.get(i), against=against.get(i))
        for i, result in enumerate(with_figures(results, draws, rows, metrics))
    )
