"""Checks how clearly texts form groups under a condition, without labels.

If a condition works, texts that agree in it are close together and far from the others. This is
visible in the cosines of their embeddings under the condition. A calibration, fitted on conditions
whose accuracy is known, maps such indicators to an expected accuracy
(``scripts/calibrate_conditions.py``). It does not show by which aspect the texts are grouped, so no
verdict says that a condition works.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from llmcond.bundled import DEFAULT_MODEL, bundled_folder
from llmcond.conditions import Condition, condition_json
from llmcond.errors import LlmcondError
from llmcond.metrics import Estimate
from llmcond.records import RECORD, fields_as_json, read_record

#: The largest number of distinct texts that are sampled, and the smallest that is enough.
MOST_TEXTS, LEAST_TEXTS = 200, 20
#: The smallest expected accuracies of the verdicts "clear groups" and "some groups".
CLEAR_GROUPS, SOME_GROUPS = 0.70, 0.58
#: The name of the calibration file in the folder of a run or a bundled model.
CALIBRATION = "conditions.json"

_FORMAT = 1
#: The fraction of the other texts that count as the nearest ones.
_NEAREST = 0.02

Verdict = Literal[
    "clear groups", "some groups", "unclear", "hardly any groups", "too few texts to tell"
]


# -- indicators --------------------------------------------------------------------------------


#: The indicators by their keys in JSON, with their names in tables.
INDICATORS = {"nearest": "cosine with the nearest texts", "bimodality": "bimodality of the cosines"}


def sample_texts(texts: Sequence[str], seed: int = 0) -> list[int]:
    """Sample the positions of at most MOST_TEXTS distinct texts, in ascending order."""
    # Backwards, so that the first position of each text wins.
    positions = sorted({text: i for i, text in reversed(list(enumerate(texts)))}.values())
    if len(positions) <= MOST_TEXTS:
        return positions
    return sorted(random.Random(seed).sample(positions, MOST_TEXTS))  # noqa: S311  # no secret


def indicators(vectors: NDArray[Any]) -> dict[str, float]:
    """Compute the indicators of a condition, with the keys of INDICATORS.

    Both are computed from the cosines of the vectors after subtracting their mean. ``nearest`` is
    the mean over texts of the cosine that a text exceeds with 2 % of the others. ``bimodality`` is
    Sarle's coefficient, (skewness² + 1) / kurtosis, of all cosines; it is 5/9 for a uniform
    distribution, and larger if some pairs are close and all others are not.

    Args:
        vectors: (n, d), embeddings of n distinct texts under the condition.
    """
    points = np.asarray(vectors, dtype=np.float64)
    points = points - points.mean(axis=0)
    norms = np.linalg.norm(points, axis=1, keepdims=True)
    unit = np.divide(points, norms, out=np.zeros_like(points), where=norms > 1e-9)
    n = len(unit)
    cosines = (unit @ unit.T)[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    deviations = cosines - cosines.mean()
    variance, bimodality = np.square(deviations).mean(), 0.0
    if variance:
        third, fourth = (np.power(deviations, power).mean() for power in (3, 4))
        bimodality = (third**2 / variance**3 + 1) / (fourth / variance**2)
    return {
        "nearest": float(np.quantile(cosines, 1 - _NEAREST, axis=1).mean()),
        "bimodality": float(bimodality),
    }


# -- expected accuracy -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Calibration:
    """A linear prediction of the accuracy of paired triples from indicators (conditions.json).

    Attributes:
        intercept: The intercept; accuracies are fractions.
        coefficients: The coefficients of the indicators that are used.
        half_width: Half the width of the 95 % interval for a condition of an unseen set.
        measured: What it was fitted on, and how well it predicted conditions of unseen sets.
        is_of_model: Whether it was fitted on the model that it is used for.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    intercept: float
    coefficients: Mapping[str, float]
    half_width: float
    measured: Mapping[str, Any]
    is_of_model: bool = field(default=True, metadata={"json": ""})

    def expect(self, values: Mapping[str, float]) -> Estimate:
        """Return the expected accuracy, with the 95 % interval for a condition of unseen texts."""
        accuracy = self.intercept + sum(
            coefficient * values[name] for name, coefficient in self.coefficients.items()
        )
        low, value, high = (
            min(max(accuracy + shift, 0.0), 1.0) for shift in (-self.half_width, 0, self.half_width)
        )
        return Estimate(value, low, high)

    @property
    def ranks_conditions(self) -> bool:
        """Whether it ranks conditions of unseen families better than chance (95 % confidence)."""
        left_out = self.measured.get("spearman_left_out", {})
        return bool(left_out.get("family", {}).get("low", 0) > 0)

    def to_json(self) -> dict[str, Any]:
        """Return the content of conditions.json."""
        return {"format": _FORMAT, **fields_as_json(self)}


def find_calibration(folder: Path) -> Calibration | None:
    """Read the calibration of a run or a bundled model, or else of the default bundled model.

    Returns:
        The calibration; None if neither has one.

    Raises:
        UserError: The file cannot be read.
        LlmcondError: The file is damaged, or has an unknown indicator.
    """
    paths = (
        directory / CALIBRATION for directory in (folder, bundled_folder("models") / DEFAULT_MODEL)
    )
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        return None
    remedy = "Create it again: python scripts/calibrate_conditions.py"
    calibration = read_record(path, Calibration, remedy, version=_FORMAT)
    unknown = sorted(calibration.coefficients.keys() - INDICATORS.keys())
    if unknown:
        raise LlmcondError(
            f"{path} has a coefficient of {unknown[0]!r}, which is not an indicator. {remedy}"
        )
    return replace(calibration, is_of_model=path.parent == folder)


@dataclass(frozen=True, slots=True)
class ConditionCheck:
    """The check of a condition on texts.

    Attributes:
        condition: The condition.
        n_texts: The number of distinct texts that were used.
        verdict: The verdict in words, see CLEAR_GROUPS and SOME_GROUPS. A lower expected accuracy
            is "unclear" if its interval reaches CLEAR_GROUPS.
        expected: The expected accuracy of paired triples, a fraction, with its 95 % interval; None
            if there were too few texts.
        indicators: The indicators by name; empty if there were too few texts.
    """

    condition: str
    n_texts: int
    verdict: Verdict
    expected: Estimate | None
    indicators: Mapping[str, float]

    @classmethod
    def of(cls, condition: str, vectors: NDArray[Any], calibration: Calibration) -> ConditionCheck:
        """Check a condition with the embeddings, (n, d), of distinct sample texts under it."""
        n = len(vectors)
        if n < LEAST_TEXTS:
            return cls(condition, n, "too few texts to tell", None, {})
        values = indicators(vectors)
        expected = calibration.expect(values)
        return cls(condition, n, _verdict(expected), expected, values)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output."""
        accuracy, *ends = (round(v, 4) for v in astuple(self.expected)) if self.expected else [None]
        return {
            **condition_json(self.condition),
            "verdict": self.verdict,
            "expected_accuracy": accuracy,
            "expected_accuracy_ci": ends or None,
            "texts": self.n_texts,
            "indicators": {name: round(value, 4) for name, value in self.indicators.items()},
        }

    def sentence(self) -> str:
        """Return the verdict as a sentence, with advice.

        Example values are suggested only where a condition hardly works, because elsewhere they can
        harm (docs/clusters.md), and not if they are in use.
        """
        if self.expected is None:
            return (
                f"{self.n_texts} distinct texts are too few to tell how clearly they form groups; "
                f"give at least {LEAST_TEXTS}"
            )
        value, low, high = (f"{100 * figure:.0f}" for figure in astuple(self.expected))
        accuracy = f"predicted accuracy {value} % [{low}, {high}]; 50 % is chance"
        label = "label about 40 texts (--guide of cluster, index and embed)"
        if self.verdict == "unclear":
            return (
                "it is unclear how well the texts can be grouped by this condition "
                f"({accuracy}); read some results, and if they do not follow it, {label}"
            )
        if self.verdict == "hardly any groups":
            has_values = isinstance(self.condition, Condition) and bool(self.condition.values)
            first = "" if has_values else "give example values (--values), "
            return (
                f"the texts form hardly any groups under this condition ({accuracy}); {first}"
                f"{label}, or use a larger encoder"
            )
        return (
            f"the texts form {self.verdict} under this condition ({accuracy}), but perhaps by "
            f"another aspect; read some results, and if they do not follow it, {label}"
        )


def _verdict(expected: Estimate) -> Verdict:
    if expected.value >= CLEAR_GROUPS:
        return "clear groups"
    if expected.value >= SOME_GROUPS:
        return "some groups"
    return "unclear" if expected.high >= CLEAR_GROUPS else "hardly any groups"
