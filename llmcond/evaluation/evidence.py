"""Differences between prompts under the same head, corrected for the number of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llmcond.data.rows import Rows
from llmcond.evaluation.paired import Candidate, Difference, compare, corrected
from llmcond.evaluation.results import ComparedResult, Results, best_first, score
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
    """Return the figures of each system and its difference to the baseline, best first."""
    similarity = [system.similarity for system in systems]
    scored = score([system.result for system in systems], similarity, rows, metrics)
    found = _differences(systems, baseline, rows, metrics)
    bases = {one.group: one.result.name for one in systems if one.result.prompt == baseline}
    return best_first(
        replace(result, difference=found[i], against=bases[system.group]) if i in found else result
        for i, (system, result) in enumerate(zip(systems, scored, strict=True))
    )


def _differences(
    systems: Sequence[System], baseline: str, rows: Rows, metrics: Sequence[Metric]
) -> dict[int, dict[str, Difference]]:
    """Return the differences by a system's position; Holm's correction is over all of them."""
    tested = [metric for metric in metrics if not metric.secondary]
    rated = rows.rated
    found: dict[int, dict[str, Difference]] = {}
    for group in dict.fromkeys(system.group for system in systems):
        members = {
            i: Candidate(system.result.name, system.similarity[:, rated])
            for i, system in enumerate(systems)
            if system.group == group
        }
        base = next((i for i in members if systems[i].result.prompt == baseline), None)
        if base is None:
            continue
        reference = members.pop(base)
        if members:
            compared = compare(
                list(members.values()), reference, rows.rating[rated], rows.pair[rated], tested
            )
            found |= dict(zip(members, compared, strict=True))
    return dict(zip(found, corrected(list(found.values()), tested), strict=True))
