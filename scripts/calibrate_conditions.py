"""Fit what ``llmcond check-condition`` expects of conditions, on texts with known attributes.

    python scripts/calibrate_conditions.py --data FOLDER [FOLDER ...] [--model minilm-conditions]
    python scripts/calibrate_conditions.py --data FOLDER --model RUN --figures figures.jsonl
        --family requests=snips,hwu --family reviews=hotel_reviews,restaurant_reviews

FOLDER holds NAME.json of each data set, as docs/aspects.md describes. Of every condition with
enough texts, 50 texts are drawn. Their indicators, computed without labels, are compared with the
accuracy of paired triples among them. The fitted coefficients are written to conditions.json in the
folder of the model, where the commands look for them.

Rank correlations are those of predictions for sets, or families of sets, that were not fitted. The
same data and seed give the same figures. ``--figures`` keeps those of each condition, so that an
interrupted command resumes.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear
from scipy.stats import spearmanr
from scipy.stats import t as student

from llmcond import load_embedder
from llmcond.bundled import DEFAULT_MODEL
from llmcond.data.aspects import AspectSample, read_aspect_datasets
from llmcond.errors import LlmcondError, UserError
from llmcond.evaluation.condition_checks import (
    CALIBRATION,
    INDICATORS,
    Calibration,
    indicators,
)
from llmcond.files import write_json
from llmcond.log import log, log_to_terminal
from llmcond.metrics import Estimate
from llmcond.runs.open import resolve_run

#: Texts of a condition, and how many texts, triples and anchors it must have at least.
TEXTS, LEAST_TEXTS, LEAST_TRIPLES, LEAST_ANCHORS = 50, 30, 50, 10
#: Texts that a value must have, and triples of each anchor and other condition, and in all.
LEAST_OF_VALUE, TRIPLES_OF_ANCHOR, MOST_TRIPLES = 3, 12, 600
#: Conditions that a set must have on average for leaving sets out.
LEAST_CONDITIONS = 10
RESAMPLES = 2_000
LONGEST_TEXT = 600

#: From n (text, condition) rows to (n, d) vectors.
Encode = Callable[[Sequence[tuple[str, str]]], NDArray[Any]]
Triples = list[tuple[int, int, int]]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Drawn:
    """Texts that have a condition, and paired triples of positions: anchor, nearer, further."""

    set: str
    key: str
    condition: str
    texts: Sequence[str]
    triples: Triples


@dataclass(frozen=True)
class Figures:
    """The accuracy of one condition, and its indicators; ``model`` is what made the vectors."""

    model: str
    set: str
    key: str
    condition: str
    n_texts: int
    n_triples: int
    accuracy: float
    indicators: Mapping[str, float]


# -- figures of conditions ---------------------------------------------------------------------


def draw(sample: AspectSample, key: str, seed: int = 0) -> Drawn | None:
    """Draw texts of a condition, about as many of each value; None if there are too few."""
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
    drawn = []
    for value in values:
        texts_of_value = by_value[value]
        drawn += rng.sample(texts_of_value, min(len(texts_of_value), of_each))
    drawn = drawn[:TEXTS]
    own = [{k: v for k, v in text.attributes.items() if k in sample.conditions} for text in drawn]
    triples = paired_triples(own, key, rng)
    anchors = {anchor for anchor, _, _ in triples}
    if len(drawn) < LEAST_TEXTS or len(triples) < LEAST_TRIPLES or len(anchors) < LEAST_ANCHORS:
        return None
    texts = [text.text for text in drawn]
    return Drawn(sample.name, key, sample.conditions[key].text, texts, triples)


def paired_triples(
    attributes: Sequence[Mapping[str, str]], key: str, rng: random.Random
) -> Triples:
    """Draw paired triples of texts with these attributes.

    The first other text has the anchor's value of ``key`` and another value of a further condition,
    the second one the reverse.
    """
    found: Triples = []
    for anchor, own in enumerate(attributes):
        for other in sorted(own.keys() - {key}):
            both = [i for i, one in enumerate(attributes) if other in one]
            same = [i for i in both if attributes[i][key] == own[key]]
            nearer = [i for i in same if attributes[i][other] != own[other]]
            further = [i for i in both if i not in same and attributes[i][other] == own[other]]
            pairs = [(anchor, i, j) for i in nearer for j in further]
            found += rng.sample(pairs, min(len(pairs), TRIPLES_OF_ANCHOR))
    return rng.sample(found, min(len(found), MOST_TRIPLES))


def accuracy_of(vectors: NDArray[Any], triples: Triples) -> float:
    """Return the share of triples whose first other text is the nearer one; ties count half."""
    points = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    anchor, nearer, further = np.array(triples).T
    cosines = points @ points.T
    difference = cosines[anchor, nearer] - cosines[anchor, further]
    return float(np.where(np.abs(difference) <= 1e-7, 0.5, difference > 0).mean())


def figures_of(drawn: Drawn, encode: Encode, model: str) -> Figures:
    """Measure one condition."""
    vectors = encode([(text, drawn.condition) for text in drawn.texts])
    return Figures(
        model=model,
        set=drawn.set,
        key=drawn.key,
        condition=drawn.condition,
        n_texts=len(drawn.texts),
        n_triples=len(drawn.triples),
        accuracy=accuracy_of(vectors, drawn.triples),
        indicators=indicators(vectors),
    )


def conditions_of(sample: AspectSample, most: int, seed: int) -> Iterator[Drawn]:
    """Yield at most so many conditions of a set that have enough texts, in a random order."""
    keys = sorted(sample.conditions)
    random.Random(seed).shuffle(keys)
    drawn = (draw(sample, key, seed) for key in keys)
    found = [one for one in drawn if one is not None]
    log.info(f"{sample.name}: {len(found)} of {len(keys)} conditions have enough texts")
    yield from found[:most]


def measure(options: argparse.Namespace, folder: Path) -> list[Figures]:
    """Return the figures of all conditions, from the file of figures as far as it has them."""
    embedder = load_embedder(folder, device=options.device)
    model = f"{embedder.encoder.identity.fingerprint} {embedder.view.name} {embedder.name}"
    known = read_figures(options.figures, model)

    def encode(rows: Sequence[tuple[str, str]]) -> NDArray[Any]:
        return embedder.encode([text for text, _ in rows], [condition for _, condition in rows])

    found = []
    for sample in (own for data in options.data for own in read_aspect_datasets(data)):
        if options.only and sample.name not in options.only:
            continue
        for drawn in conditions_of(sample, options.most, options.seed):
            figures = known.get((drawn.set, drawn.key))
            if figures is None and not options.fit_only:
                began = time.process_time()
                figures = figures_of(drawn, encode, model)
                keep_figures(options.figures, figures)
                log.info(
                    f"{drawn.set}, {drawn.condition}: accuracy {100 * figures.accuracy:.1f}; "
                    f"{time.process_time() - began:.1f} s of CPU time"
                )
            found += [figures] if figures is not None else []
    return found


def read_figures(path: Path | None, model: str) -> dict[tuple[str, str], Figures]:
    """Return what a file of figures holds of a model, by set and condition."""
    if path is None or not path.is_file():
        return {}
    rows = [Figures(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    complete = [row for row in rows if row.indicators.keys() == INDICATORS.keys()]
    return {(row.set, row.key): row for row in complete if row.model == model}


def keep_figures(path: Path | None, figures: Figures) -> None:
    """Add a line to the file of figures."""
    if path is not None:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(figures)) + "\n")


# -- the fit -----------------------------------------------------------------------------------


def fit(rows: Sequence[Figures]) -> tuple[float, dict[str, float]]:
    """Return the intercept and the coefficients of least squares; no coefficient is negative."""
    inputs = np.array([[row.indicators[name] for name in INDICATORS] for row in rows])
    design = np.column_stack([np.ones(len(rows)), inputs])
    bounds = [-np.inf, *(0 for _ in INDICATORS)], np.inf
    intercept, *others = lsq_linear(design, [row.accuracy for row in rows], bounds).x.tolist()
    return intercept, dict(zip(INDICATORS, others, strict=True))


def predict(rows: Sequence[Figures], groups: Sequence[str]) -> Floats:
    """Return the predicted accuracy of each condition, fitted on the other groups."""
    predicted = np.empty(len(rows))
    for group in sorted(set(groups)):
        intercept, coefficients = fit(
            [row for row, own in zip(rows, groups, strict=True) if own != group]
        )
        for i, row in enumerate(rows):
            if groups[i] == group:
                terms = [c * row.indicators[name] for name, c in coefficients.items()]
                predicted[i] = intercept + sum(terms)
    return predicted


def rank_correlation(values: Floats, accuracies: Floats, seed: int) -> Estimate:
    """Return Spearman's correlation with a 95 % interval by resampling conditions."""
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(RESAMPLES):
        rows = rng.integers(0, len(values), len(values))
        if np.ptp(values[rows]) and np.ptp(accuracies[rows]):
            drawn.append(float(spearmanr(values[rows], accuracies[rows]).statistic))
    low, high = np.quantile(drawn, [0.025, 0.975]).tolist()
    return Estimate(float(spearmanr(values, accuracies).statistic), low, high)


def families_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the family of each set that is named in one."""
    found: dict[str, str] = {}
    for text in options.family:
        name, equals, sets = text.partition("=")
        if not (name and equals and sets):
            raise UserError(f"--family is {text!r}; expected NAME=SET,SET,...")
        found |= dict.fromkeys(sets.split(","), name)
    return found


def calibrate(rows: Sequence[Figures], families: Mapping[str, str], seed: int) -> Calibration:
    """Fit all conditions; the interval and the rank correlations are those of unseen sets."""
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
    alone = {
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
                name: {key: round(value, 4) for key, value in own.items()}
                for name, own in figures.items()
            },
            "spearman_alone": {name: round(own.value, 4) for name, own in alone.items()},
        },
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--data", type=Path, nargs="+", required=True, metavar="FOLDER", help="folders of data sets"
    )
    add("--model", default=DEFAULT_MODEL, help="bundled model, or folder of a run")
    add("--only", nargs="+", default=[], metavar="NAME", help="data sets to take (default: all)")
    add("--most", type=int, default=30, metavar="N", help="conditions of each set (default: 30)")
    add(
        "--family",
        action="append",
        default=[],
        metavar="NAME=SET,SET",
        help="sets that are left out together; may be repeated (default: each set by itself)",
    )
    add("--figures", type=Path, metavar="FILE.jsonl", help="file that keeps figures of conditions")
    add("--fit-only", action="store_true", help="take only conditions that --figures holds")
    add("--out", type=Path, metavar="FILE.json", help=f"default: {CALIBRATION} of the model")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--seed", type=int, default=0, help="random seed of the texts and the bootstrap")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure, fit, write the coefficients, and print them as JSON."""
    options = parse(arguments)
    log_to_terminal()
    try:
        folder = resolve_run(options.model)
        calibration = calibrate(measure(options, folder), families_of(options), options.seed)
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
