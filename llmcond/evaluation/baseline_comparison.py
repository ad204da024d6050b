"""Differences between prompts under the same head, corrected for the number of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmcond.evaluation.paired import paired_differences
from llmcond.evaluation.results import (
    ComparedResult,
    Results,
    Scored,
    add_metrics,
    best_first,
    bootstrap_results,
)
from llmcond.metrics import DEFAULT_METRICS, Metric


@dataclass(frozen=True, slots=True)
class ComparedSystem:
    """A prompt under one head, to be compared with the baseline prompt under the same head.

    Attributes:
        group: The key that it shares with the prompts that it is compared with.
        result: Its result without figures.
        similarity: (seeds, n) predictions of all rows.
    """

    group: tuple[str, bool]
    result: ComparedResult
    similarity: NDArray[np.float32]


def compare_with_baseline(
    systems: Sequence[ComparedSystem],
    baseline: str,
    rows: Scored,
    metrics: Sequence[Metric] = DEFAULT_METRICS,
) -> Results[ComparedResult]:
    """Compute the figures of each system and its difference to the baseline, best first.

    Holm's correction covers the differences of all groups. Controls form another family.
    """
    results = [system.result for system in systems]
    draws = bootstrap_results(results, [system.similarity for system in systems], rows, metrics)
    groups: dict[int, list[int]] = {}
    for group in dict.fromkeys(system.group for system in systems):
        members = [i for i, system in enumerate(systems) if system.group == group]
        base = next((i for i in members if results[i].prompt == baseline), None)
        if base is not None:
            groups[base] = [i for i in members if i != base]
    tested = [metric for metric in metrics if not metric.secondary]
    controls = [i for i, result in enumerate(results) if result.control]
    compared = paired_differences(draws, groups, tested, controls)
    against = {i: results[base].name for base, others in groups.items() for i in others}
    return best_first(
        replace(result, difference=compared.get(i), against=against.get(i))
        for i, result in enumerate(add_metrics(results, draws, rows))
    )
