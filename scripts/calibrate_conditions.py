"""Fit the calibration of ``llmcond check-condition`` on texts with known attributes.

    python scripts/calibrate_conditions.py --data FOLDER [FOLDER ...] [--model minilm-conditions]
    python scripts/calibrate_conditions.py --data FOLDER --model RUN --figures figures.jsonl
        --family requests=snips,hwu --family reviews=hotel_reviews,restaurant_reviews

FOLDER contains NAME.json of each dataset, as docs/aspects.md describes. For every condition with
enough texts, the script samples 50 texts. It computes their indicators, which need no labels, and
the accuracy of paired triples among them, which the indicators have to predict. The fitted
coefficients are written to conditions.json in the folder of the model, where the commands look for
them.

Rank correlations are those of predictions for sets, or families of sets, that the fit left out. The
same data and seed give the same figures. ``--figures`` stores the figures of each condition, so
that an interrupted command resumes.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import Options
from numpy.typing import NDArray
from scipy.optimize import lsq_linear
from scipy.stats import ConstantInputWarning, pearsonr, rankdata
from scipy.stats import t as student

from llmcond import load_embedder
from llmcond.base.errors import LlmcondError, UserError
from llmcond.base.files import write_json
from llmcond.base.metrics import Estimate
from llmcond.base.output import log, log_to_terminal
from llmcond.base.package import DEFAULT_MODEL
from llmcond.data.guides import AspectSample, read_aspect_datasets
from llmcond.evaluation import CALIBRATION
from llmcond.evaluation.analyses import INDICATORS, Calibration, indicators
from llmcond.runs.open import resolve_run

#: Number of sampled texts of a condition, and minimum numbers of its texts, triples and anchors.
TEXTS, LEAST_TEXTS, LEAST_TRIPLES, LEAST_ANCHORS = 50, 30, 50, 10
#: Minimum number of texts of a value.
LEAST_OF_VALUE = 3
#: Maximum number of triples of an anchor and another condition, and of all triples of a condition.
TRIPLES_OF_ANCHOR, MOST_TRIPLES = 12, 600
#: Minimum number of conditions of all sets together, for a fit that leaves sets out.
LEAST_CONDITIONS = 10
#: Bootstrap samples of the intervals of rank correlations.
RESAMPLES = 2_000
#: Texts with this many characters or more are not sampled.
LONGEST_TEXT = 600

Triples = list[tuple[int, int, int]]
Floats = NDArray[np.float64]


class ConditionSample(NamedTuple):
    """Sampled texts with a condition, and the positions of paired triples among them."""

    set: str
    key: str
    condition: str
    texts: Sequence[str]
    triples: Triples


@dataclass(frozen=True)
class Figures:
    """The accuracy and the indicators of one condition; ``model`` identifies the vectors."""

    model: str
    set: str
    key: str
    condition: str
    n_texts: int
    n_triples: int
    accuracy: float
    indicators: Mapping[str, float]


# -- figures of conditions ---------------------------------------------------------------------


def sample_condition(sample: AspectSample, key: str, seed: int = 0) -> ConditionSample | None:
    """Sample texts of a condition, about equally many per value; None if there are too few."""
    rng = random.Random(f"{seed} {key}")
    by_value = defaultdict(list)
    for text in sample.texts:
        if key in text.attributes and len(text.text) < LONGEST_TEXT:
            by_value[text.attributes[key]].append(text)
    values = [value for value in sorted(by_value) if len(by_value[value]) >= LEAST_OF_VALUE]
    if len(values) < 2:
        return None
    rng.shuffle(values)
    of_each = max(4, TEXTS // len(values))
    sampled = []
    for value in values:
        texts_of_value = by_value[value]
        sampled += rng.sample(texts_of_value, min(len(texts_of_value), of_each))
    sampled = sampled[:TEXTS]
    attributes = [
        {k: v for k, v in text.attributes.items() if k in sample.conditions} for text in sampled
    ]
    triples = paired_triples(attributes, key, rng)
    anchors = {anchor for anchor, _, _ in triples}
    if len(sampled) < LEAST_TEXTS or len(triples) < LEAST_TRIPLES or len(anchors) < LEAST_ANCHORS:
        return None
    texts = [text.text for text in sampled]
    return ConditionSample(sample.name, key, sample.conditions[key].text, texts, triples)


def paired_triples(
    attributes: Sequence[Mapping[str, str]], key: str, rng: random.Random
) -> Triples:
    """Sample paired triples of anchor, nearer and further text.

    The nearer text has the anchor's value of ``key`` and another value of a second condition. The
    further text has another value of ``key`` and the anchor's value of the second condition.
    """
    triples: Triples = []
    for anchor, anchor_attributes in enumerate(attributes):
        for other in sorted(anchor_attributes.keys() - {key}):
            both = [i for i, text_attributes in enumerate(attributes) if other in text_attributes]
            same = [i for i in both if attributes[i][key] == anchor_attributes[key]]
            nearer = [i for i in same if attributes[i][other] != anchor_attributes[other]]
            further = [
                i
                for i in both
                if i not in same and attributes[i][other] == anchor_attributes[other]
            ]
            pairs = [(anchor, i, j) for i in nearer for j in further]
            triples += rng.sample(pairs, min(len(pairs), TRIPLES_OF_ANCHOR))
    return rng.sample(triples, min(len(triples), MOST_TRIPLES))


def accuracy_of(vectors: NDArray[Any], triples: Triples) -> float:
    """Return the share of triples that the vectors judge correctly; a tie counts one half."""
    points = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    anchor, nearer, further = np.array(triples).T
    cosines = points @ points.T
    difference = cosines[anchor, nearer] - cosines[anchor, further]
    return float(np.where(np.abs(difference) <= 1e-7, 0.5, difference > 0).mean())


def measure(options: argparse.Namespace, folder: Path) -> list[Figures]:
    """Return the figures of all conditions; those in the file of figures are not recomputed."""
    embedder = load_embedder(folder, device=options.device)
    model = f"{embedder.encoder.identity.fingerprint} {embedder.view.name} {embedder.name}"
    known = read_figures(options.figures, model)
    figures_of_conditions = []
    for dataset in (dataset for data in options.data for dataset in read_aspect_datasets(data)):
        keys = sorted(dataset.conditions)
        random.Random(options.seed).shuffle(keys)
        samples = [sample_condition(dataset, key, options.seed) for key in keys]
        complete = [sample for sample in samples if sample is not None]
        log.info(f"{dataset.name}: {len(complete)} of {len(keys)} conditions have enough texts")
        for sample in complete[: options.most]:
            figures = known.get((sample.set, sample.key))
            if figures is None:
                began = time.process_time()
                vectors = embedder.encode(sample.texts, sample.condition)
                figures = Figures(
                    *(model, sample.set, sample.key, sample.condition),
                    n_texts=len(sample.texts),
                    n_triples=len(sample.triples),
                    accuracy=accuracy_of(vectors, sample.triples),
                    indicators=indicators(vectors),
                )
                if options.figures is not None:
                    with options.figures.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps(asdict(figures)) + "\n")
                log.info(
                    f"{figures.set}, {figures.condition}: accuracy {100 * figures.accuracy:.1f}; "
                    f"{time.process_time() - began:.1f} s of CPU time"
                )
            figures_of_conditions.append(figures)
    return figures_of_conditions


def read_figures(path: Path | None, model: str) -> dict[tuple[str, str], Figures]:
    """Return a model's figures in a file of figures, by set and condition."""
    if path is None or not path.is_file():
        return {}
    rows = [Figures(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    complete = [row for row in rows if row.indicators.keys() == INDICATORS.keys()]
    return {(row.set, row.key): row for row in complete if row.model == model}


# -- the fit -----------------------------------------------------------------------------------


def fit(rows: Sequence[Figures]) -> tuple[float, dict[str, float]]:
    """Return the intercept and the non-negative coefficients of a least-squares fit."""
    inputs = np.array([[row.indicators[name] for name in INDICATORS] for row in rows])
    design = np.column_stack([np.ones(len(rows)), inputs])
    bounds = [-np.inf, *(0 for _ in INDICATORS)], np.inf
    intercept, *others = lsq_linear(design, [row.accuracy for row in rows], bounds).x.tolist()
    return intercept, dict(zip(INDICATORS, others, strict=True))


def predict(rows: Sequence[Figures], groups: Sequence[str]) -> Floats:
    """Return the accuracy of each condition as predicted by a fit of the other groups."""
    predicted = np.empty(len(rows))
    for group in sorted(set(groups)):
        intercept, coefficients = fit(
            [row for row, group_of_row in zip(rows, groups, strict=True) if group_of_row != group]
        )
        for i, row in enumerate(rows):
            if groups[i] == group:
                terms = [c * row.indicators[name] for name, c in coefficients.items()]
                predicted[i] = intercept + sum(terms)
    return predicted


def rank_correlation(values: Floats, accuracies: Floats, seed: int) -> Estimate:
    """Return Spearman's correlation with a 95 % bootstrap interval over conditions."""
    rng = np.random.default_rng(seed)
    samples = rng.integers(0, len(values), (RESAMPLES, len(values)))
    # The first row is all conditions.
    samples = np.vstack([np.arange(len(values)), samples])
    ranks = [rankdata(numbers[samples], axis=1) for numbers in (values, accuracies)]
    with warnings.catch_warnings():  # NaN if all values of a sample are equal
        warnings.simplefilter("ignore", ConstantInputWarning)
        value, *correlations = pearsonr(*ranks, axis=1).statistic.tolist()
    low, high = np.nanquantile(correlations, [0.025, 0.975]).tolist()
    return Estimate(value, low, high)


def parse_families(options: argparse.Namespace) -> dict[str, str]:
    """Return the family of each set that ``--family`` names."""
    families: dict[str, str] = {}
    for text in options.family:
        name, equals, sets = text.partition("=")
        if not (name and equals and sets):
            raise UserError(f"--family is {text!r}. Use --family NAME=SET,SET,...")
        families |= dict.fromkeys(sets.split(","), name)
    return families


def calibrate(rows: Sequence[Figures], families: Mapping[str, str], seed: int) -> Calibration:
    """Fit the calibration on all conditions.

    The interval and the rank correlations are those of predictions for sets that were left out.

    Raises:
        UserError: There are too few conditions or families.
    """
    sets = [row.set for row in rows]
    groups = [families.get(name, name) for name in sets]
    if len(set(groups)) < 2 or len(rows) < LEAST_CONDITIONS:
        raise UserError(
            f"{len(rows)} conditions of {len(set(groups))} families have enough texts; at least "
            f"{LEAST_CONDITIONS} conditions of 2 families are needed."
        )
    accuracies = np.array([row.accuracy for row in rows])
    left_out = {"set": predict(rows, sets), "family": predict(rows, groups)}
    figures = {
        name: asdict(rank_correlation(predicted, accuracies, seed))
        for name, predicted in left_out.items()
    }
    single_indicators = {
        name: rank_correlation(np.array([row.indicators[name] for row in rows]), accuracies, seed)
        for name in INDICATORS
    }
    residuals = accuracies - left_out["family"]
    error = float(np.sqrt(np.mean(residuals**2)))
    freedom = max(1, len(rows) - len(INDICATORS) - 1)
    intercept, coefficients = fit(rows)
    return Calibration(
        intercept=round(intercept, 6),
        coefficients={name: round(value, 6) for name, value in coefficients.items()},
        half_width=round(float(student.ppf(0.975, freedom)) * error, 6),
        measured={
            "model": rows[0].model,
            "conditions": len(rows),
            "sets": dict(sorted(Counter(sets).items())),
            "families": sorted(set(groups)),
            "mean_accuracy": round(float(accuracies.mean()), 4),
            "error": round(error, 4),
            "spearman_left_out": {
                name: {key: round(value, 4) for key, value in estimate.items()}
                for name, estimate in figures.items()
            },
            "spearman_alone": {
                name: round(estimate.value, 4) for name, estimate in single_indicators.items()
            },
        },
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = Options(__doc__)
    add = parser.option
    add("--data", Path, "folders of datasets", nargs="+", required=True, metavar="FOLDER")
    add("--model", DEFAULT_MODEL, "bundled model, or run folder")
    add("--most", 30, "maximum number of conditions of each set", metavar="N")
    family = "sets that are left out together; repeatable (default: each set separately)"
    parser.add_argument(
        "--family", action="append", default=[], metavar="NAME=SET,SET", help=family
    )
    add("--figures", Path, "file to store figures of conditions in", metavar="FILE.jsonl")
    coefficients = f"{CALIBRATION} in the folder of the model"
    add("--out", Path, "file of the coefficients", coefficients, metavar="FILE.json")
    add("--device", "auto", "device: auto, cpu, cuda or cuda:N")
    add("--seed", 0, "random seed of texts and bootstrap")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure, fit, write the coefficients, and print them as JSON."""
    options = parse(arguments)
    log_to_terminal()
    try:
        folder = resolve_run(options.model)
        calibration = calibrate(measure(options, folder), parse_families(options), options.seed)
        out = options.out or folder / CALIBRATION
        write_json(out, calibration.to_json())
    except LlmcondError as error:
        log.error(str(error))
        return error.exit_code
    log.info(f"-> {out}")
    print(json.dumps(calibration.to_json()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
