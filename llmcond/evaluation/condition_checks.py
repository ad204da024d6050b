"""Whether a condition works on texts, as far as that shows without labels.

Texts are embedded under the condition, under rewordings of it, and under unrelated conditions.
Where a condition works, its rewordings arrange the texts alike, and unrelated conditions arrange
them otherwise. A calibration, fitted on conditions whose accuracy is known, turns such indicators
into an expected accuracy (``scripts/calibrate_conditions.py``).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from llmcond.bundled import PRETRAINED, bundled
from llmcond.conditions import Condition, condition_json, condition_text
from llmcond.errors import LlmcondError
from llmcond.files import check_format
from llmcond.metrics import Estimate, Floats
from llmcond.records import RECORD, read_record

#: Distinct texts that are sampled: by the command, and for a line of other commands. Fewer than the
#: last number tell nothing.
MOST_TEXTS, FEW_TEXTS, LEAST_TEXTS = 200, 100, 20
#: Conditions that a condition is compared with: the first ones that share no word with it.
_UNRELATED = (
    "the colour",
    "the number of people",
    "the weather",
    "the price",
    "the animal",
    "the year",
)
_N_UNRELATED, _N_REWORDINGS = 3, 2
#: Expected accuracies from which a condition works, and works in part.
WORKS, WORKS_IN_PART = 0.70, 0.58
#: The file of a run or a bundled model that holds its calibration.
CALIBRATION = "conditions.json"

_FORMAT = 1
_ARTICLE = re.compile(r"^(the|an?)\s+", re.IGNORECASE)
_ASKS_FOR = re.compile(r"^(what|which|who)\s+(is|are|was|were)\s+(?=(the|an?)\s)", re.IGNORECASE)
_INTERROGATIVE = re.compile(r"(how|where|what|who|when|why|which|whether)\b", re.IGNORECASE)

Verdict = Literal["works", "works in part", "not expected to work", "too few texts to tell"]
#: From n (text, condition) rows to (n, d) vectors.
Encode = Callable[[Sequence[tuple[str, str]]], NDArray[Any]]

ADVICE = "give example values (--values), labelled texts (--guide), or a larger encoder"


# -- wordings ----------------------------------------------------------------------------------


def rewordings(condition: str) -> list[str]:
    """Return two other wordings of a condition, made by templates; they have its values.

    >>> rewordings("the city")
    ['What is the city?', 'city']
    """
    text = condition_text(condition).strip().rstrip("?").strip()
    core = _ARTICLE.sub("", _ASKS_FOR.sub("", text))
    if _INTERROGATIVE.match(core):
        lowered = core[:1].lower() + core[1:]
        made = [f"{core[:1].upper()}{core[1:]}?", f"it says {lowered}", lowered]
    else:
        made = [f"What is the {core}?", core, f"the {core}"]
    others = [one for one in made if one != condition_text(condition)][:_N_REWORDINGS]
    if not isinstance(condition, Condition):
        return others
    return [Condition(one.rstrip("?"), condition.values) for one in others]


def unrelated(condition: str) -> list[str]:
    """Return three conditions that share no word with a condition but for articles."""
    words = set(re.findall(r"\w+", condition.lower())) - {"the", "of"}
    others = [one for one in _UNRELATED if not words & set(one.split())]
    return others[:_N_UNRELATED]


def sample_texts(texts: Sequence[str], most: int, seed: int = 0) -> list[str]:
    """Return distinct texts, ``most`` at most, in their order; the same seed draws the same."""
    distinct = list(dict.fromkeys(texts))
    if len(distinct) <= most:
        return distinct
    drawn = random.Random(seed).sample(range(len(distinct)), most)  # noqa: S311  # no secret
    return [distinct[i] for i in sorted(drawn)]


# -- indicators --------------------------------------------------------------------------------


#: Indicators, by their keys in JSON, with what tables call them.
INDICATORS = {
    "rewordings": "agreement with rewordings",
    "unrelated": "agreement with unrelated conditions",
    "effect": "share of variance due to the condition",
    "effect_rewordings": "agreement of that part with rewordings",
    "spread": "spread of cosines",
    "spread_above": "spread above that under unrelated conditions",
}


def indicators(
    under: NDArray[Any], reworded: Sequence[NDArray[Any]], others: Sequence[NDArray[Any]]
) -> dict[str, float]:
    """Return the indicators of a condition on n texts, whose keys are those of INDICATORS.

    The agreement of two sets of vectors is the correlation of the cosines that they have between
    all pairs of texts, once their mean is subtracted. The part of a vector that is due to the
    condition is its difference from the text's mean vector under unrelated conditions. The spread
    is the standard deviation of the cosines: it is high where few directions hold the variance, as
    where texts fall into groups, and does not depend on the number of texts.

    Args:
        under: (n, d) vectors of the texts under the condition.
        reworded: the same under each of its rewordings.
        others: the same under each of the unrelated conditions.
    """
    vectors = _centred(under)
    common = np.mean([_centred(one) for one in others], axis=0)
    effect = vectors - common
    cosines, effect_cosines = _cosines(vectors), _cosines(effect)
    other_cosines = [_cosines(_centred(one)) for one in others]
    variance = float(np.square(vectors).sum())
    return {
        "rewordings": _agreement(cosines, [_cosines(_centred(one)) for one in reworded]),
        "unrelated": _agreement(cosines, other_cosines),
        "effect": float(np.square(effect).sum()) / variance if variance else 0.0,
        "effect_rewordings": _agreement(
            effect_cosines, [_cosines(_centred(one) - common) for one in reworded]
        ),
        "spread": float(cosines.std()),
        "spread_above": float(cosines.std() - np.mean([one.std() for one in other_cosines])),
    }


def _centred(vectors: NDArray[Any]) -> Floats:
    points = np.asarray(vectors, dtype=np.float64)
    return np.asarray(points - points.mean(axis=0))


def _cosines(vectors: Floats) -> Floats:
    """Return the cosines of all pairs of n vectors, (n (n - 1) / 2,)."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return np.asarray((unit @ unit.T)[np.triu_indices(len(unit), 1)])


def _agreement(cosines: Floats, others: Sequence[Floats]) -> float:
    """Return the mean correlation with others; 0 where one of both does not vary."""
    return float(np.mean([_correlation(cosines, other) for other in others]))


def _correlation(first: Floats, second: Floats) -> float:
    first, second = first - first.mean(), second - second.mean()
    scale = float(np.linalg.norm(first) * np.linalg.norm(second))
    return float(first @ second) / scale if scale else 0.0


# -- what they predict -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Record:
    """What conditions.json of a model holds at least."""

    __pydantic_config__: ClassVar[dict[str, Any]] = RECORD

    intercept: float
    coefficients: Mapping[str, float]
    half_width: float
    measured: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Calibration:
    """A linear prediction of the accuracy of paired triples from indicators.

    Attributes:
        intercept, coefficients: of the indicators that are used; figures are fractions.
        half_width: half of the 95 % interval of a condition of a set that was not fitted.
        measured: what it was fitted on, and how well it predicted conditions of other sets.
        is_own: whether it was fitted on the model that it is used for.
    """

    intercept: float
    coefficients: Mapping[str, float]
    half_width: float
    measured: Mapping[str, Any]
    is_own: bool = True

    def expect(self, values: Mapping[str, float]) -> Estimate:
        """Return the expected accuracy, with the interval of a condition of other texts."""
        accuracy = self.intercept + sum(
            coefficient * values[name] for name, coefficient in self.coefficients.items()
        )
        low, value, high = (
            min(max(accuracy + shift, 0.0), 1.0) for shift in (-self.half_width, 0, self.half_width)
        )
        return Estimate(value, low, high)

    @property
    def tells_apart(self) -> bool:
        """Return whether it ranked conditions of unseen families better than chance, by 95 %."""
        left_out = self.measured.get("spearman_left_out", {})
        return bool(left_out.get("family", {}).get("low", 0) > 0)

    def to_json(self) -> dict[str, Any]:
        """Return what conditions.json holds."""
        return {
            "format": _FORMAT,
            "intercept": self.intercept,
            "coefficients": dict(self.coefficients),
            "half_width": self.half_width,
            "measured": dict(self.measured),
        }


def find_calibration(folder: Path) -> Calibration | None:
    """Read the calibration of a run or a bundled model; that of the default one where it has none.

    None: neither has one.

    Raises:
        UserError, LlmcondError: the file cannot be read, or holds something else.
    """
    places = [folder, bundled("models") / PRETRAINED]
    paths = [one / CALIBRATION for one in places if (one / CALIBRATION).is_file()]
    if not paths:
        return None
    path = paths[0]
    remedy = "Make it anew: python scripts/calibrate_conditions.py"
    record = read_record(path, _Record, remedy)
    check_format(record, _FORMAT, str(path))
    unknown = sorted(record["coefficients"].keys() - INDICATORS.keys())
    if unknown:
        raise LlmcondError(f"{path} has a coefficient of {unknown[0]!r}, no indicator. {remedy}")
    names = ("intercept", "coefficients", "half_width", "measured")
    fitted = {name: record[name] for name in names}
    return Calibration(**fitted, is_own=path.parent == folder)


@dataclass(frozen=True, slots=True)
class ConditionCheck:
    """What is expected of a condition on some texts.

    Attributes:
        n_texts: distinct texts that were looked at.
        verdict: in words, see WORKS and WORKS_IN_PART.
        expected: accuracy of paired triples, a fraction, with its 95 % interval; None: too few
            texts.
        indicators: by name; empty: too few texts.
    """

    condition: str
    n_texts: int
    verdict: Verdict
    expected: Estimate | None
    indicators: Mapping[str, float]

    @classmethod
    def of(
        cls, condition: str, n_texts: int, values: Mapping[str, float], calibration: Calibration
    ) -> ConditionCheck:
        """Return what indicators say; there are none of too few texts."""
        if not values:
            return cls(condition, n_texts, "too few texts to tell", None, {})
        expected = calibration.expect(values)
        return cls(condition, n_texts, _verdict(expected.value), expected, values)

    def to_json(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it."""
        expected = self.expected
        return {
            **condition_json(self.condition),
            "verdict": self.verdict,
            "expected_accuracy": None if expected is None else round(expected.value, 4),
            "expected_accuracy_ci": None
            if expected is None
            else [round(expected.low, 4), round(expected.high, 4)],
            "texts": self.n_texts,
            "indicators": {name: round(value, 4) for name, value in self.indicators.items()},
        }

    def sentence(self) -> str:
        """Return the verdict in a sentence, with advice where it is needed."""
        if self.expected is None:
            return (
                f"{self.n_texts} distinct texts are too few to tell whether the condition works; "
                f"give at least {LEAST_TEXTS}"
            )
        low, value, high = (
            f"{100 * one:.0f}"
            for one in (self.expected.low, self.expected.value, self.expected.high)
        )
        accuracy = f"expected accuracy {value} % [{low}, {high}]; 50 % is chance"
        if self.verdict == "not expected to work":
            return f"this condition is not expected to work ({accuracy}); {ADVICE}"
        return f"this condition {self.verdict} ({accuracy})"


def check_conditions(
    texts: Sequence[str],
    conditions: Sequence[str],
    encode: Encode,
    calibration: Calibration,
    *,
    most: int = MOST_TEXTS,
    seed: int = 0,
) -> list[ConditionCheck]:
    """Check conditions on a sample of texts.

    Args:
        texts: at least 20 distinct ones, or nothing is told.
        conditions: they may have example values.
        encode: called once, with every row that is needed.
        calibration: of the model that encodes.
        most: distinct texts that are sampled.
        seed: random seed of the sample.
    """
    sample = sample_texts(texts, most, seed)
    n = len(sample)
    if n < LEAST_TEXTS:
        return [ConditionCheck.of(one, n, {}, calibration) for one in conditions]
    parts = [([one], rewordings(one), unrelated(one)) for one in conditions]
    asked = list(dict.fromkeys(one for lists in parts for own in lists for one in own))
    vectors = encode([(text, one) for one in asked for text in sample])
    under = dict(zip(asked, np.split(vectors, len(asked)), strict=True))
    checks = []
    for condition, lists in zip(conditions, parts, strict=True):
        own, reworded, others = ([under[one] for one in names] for names in lists)
        values = indicators(own[0], reworded, others)
        checks.append(ConditionCheck.of(condition, n, values, calibration))
    return checks


def _verdict(accuracy: float) -> Verdict:
    if accuracy >= WORKS:
        return "works"
    return "works in part" if accuracy >= WORKS_IN_PART else "not expected to work"
