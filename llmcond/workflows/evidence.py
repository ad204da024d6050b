"""How sure a comparison is: each way of predicting beside the baseline's, on the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.data.rows import Rows
from llmcond.evaluation.paired import Candidate, Compared, compare, corrected, estimate
from llmcond.report.terminal import best_first, finite

#: Of a single fit: not said of several, or in another way.
_DROPPED = (
    "similarity",
    "recipe",
    "fit",
    "created",
    "versions",
    "seed",
    "selected_on",
    "pearson_ci",
)


@dataclass(frozen=True, slots=True)
class SeededWay:
    """One way of predicting: a prompt, with or without a head, with or without subtraction.

    Attributes:
        group: what it has in common with the prompts that it is compared with.
        prompt: its name.
        control: which control it is; empty for none.
        result: what results say of it, but for its figures.
        similarity: (seeds, n) predictions of all rows.
        curves: of each seed's fit.
    """

    group: tuple[str, bool]
    prompt: str
    control: str
    result: Mapping[str, Any]
    similarity: NDArray[np.float32]
    curves: Sequence[Any] = ()


def with_evidence(ways: Sequence[SeededWay], baseline: str, rows: Rows) -> list[dict[str, Any]]:
    """Return a row of results for each way, best Spearman first."""
    rated = rows.rated
    rating, pair = rows.rating[rated], rows.pair[rated]
    candidates = [Candidate(str(i), way.similarity[:, rated]) for i, way in enumerate(ways)]
    differences = _differences(ways, candidates, baseline, rating, pair)
    results = []
    bases = {way.group: way.result["name"] for way in ways if way.prompt == baseline}
    for way, own, found in zip(ways, estimate(candidates, rating, pair), differences, strict=True):
        result = {key: value for key, value in way.result.items() if key not in _DROPPED}
        result |= {
            "seeds": way.result.get("seeds", []),
            "spearman": finite(own.spearman.value),
            "spearman_ci": [finite(own.spearman.low), finite(own.spearman.high)],
            "spearman_sd": own.seed_sd,
            "accuracy": finite(own.accuracy.value),
            "accuracy_ci": [finite(own.accuracy.low), finite(own.accuracy.high)],
            "control": way.control,
            "difference": found and _difference_json(found),
            "against": bases[way.group] if found else None,
        }
        results.append(result)
    return best_first(results)


def _differences(
    ways: Sequence[SeededWay],
    candidates: Sequence[Candidate],
    baseline: str,
    rating: NDArray[np.float64],
    pair: NDArray[np.int64],
) -> list[Compared | None]:
    """Compare each way with the baseline's of its group; Holm's correction is over all of them."""
    found: dict[int, Compared] = {}
    for group in dict.fromkeys(way.group for way in ways):
        members = [i for i, way in enumerate(ways) if way.group == group]
        base = [i for i in members if ways[i].prompt == baseline]
        others = [i for i in members if ways[i].prompt != baseline]
        if base and others:
            compared = compare([candidates[i] for i in others], candidates[base[0]], rating, pair)
            found |= dict(zip(others, compared, strict=True))
    whole = dict(zip(found, corrected(list(found.values())), strict=True))
    return [whole.get(i) for i in range(len(ways))]


def _difference_json(compared: Compared) -> dict[str, Any]:
    measures = {"spearman": compared.spearman, "accuracy": compared.accuracy}
    return {
        name: {
            key: finite(value) if isinstance(value, float) else value
            for key, value in asdict(difference).items()
        }
        for name, difference in measures.items()
    }
