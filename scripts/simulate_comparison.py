"""Do comparisons of prompts keep their promises? Data whose truth is known tells.

    python scripts/simulate_comparison.py                      # some minutes on one core
    python scripts/simulate_comparison.py --pairs 60 --trials 500 --percentiles --json

Rows come in sentence pairs with two conditions, which share half of all that is random. A rating,
1 to 5, is the truth with some error; a prediction is the truth with more of it, most of which all
prompts have in common. Two questions, at several numbers of sentence pairs:

* Prompts that are equally good: in how many trials is any of them called better or worse than the
  baseline? At most 5 % are allowed, over all prompts together, for each measure.
* A prompt that is better by a known difference: in how many trials does the interval hold it? It
  should be 95 %. How often it is seen (p at most 0.05), and the smallest difference that is said
  to be seen in 80 % of samples, are shown beside.

With ``--spread`` each prompt has three seeds, which are not equally good: their error varies by so
much.

Behind each ± is the standard error of the simulation.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from llmcond.evaluation.paired import bootstrap_metrics, holm, paired_differences
from llmcond.metrics import METRICS

Floats = NDArray[np.float64]

SIZES: Final = (20, 40, 60, 100, 300, 985)
MEASURES: Final = ("spearman", "accuracy")
METRICS_COMPARED: Final = [METRICS[name] for name in MEASURES]

#: Standard deviations, where the truth's is 1: EQUAL gives a Spearman of about 0.55.
RATING_ERROR: Final = 0.5
EQUAL: Final = 1.2
BETTER: Final = 1.05
SEEDS: Final = 3
#: Share of a prediction's error that all prompts have in common.
COMMON: Final = 0.7
#: Share of all ratings below 2, 3, 4 and 5: C-STS has few that are high.
BELOW: Final = (0.25, 0.5, 0.7, 0.88)


@dataclass(frozen=True)
class Rows:
    """Simulated rows: (prompts, seeds, n) predictions, (n,) ratings, numbers of sentence pairs."""

    predictions: Floats
    rating: Floats
    pair: NDArray[np.intp]


def simulate(
    rng: np.random.Generator, n_pairs: int, errors: Sequence[float], spread: float = 0.0
) -> Rows:
    """Draw rows, with a prompt for each size of error, which varies over seeds by ``spread``."""
    pair = np.repeat(np.arange(n_pairs), 2)

    def noise() -> Floats:
        shared, own = rng.standard_normal(n_pairs), rng.standard_normal(2 * n_pairs)
        return np.asarray(np.sqrt(0.5) * (shared[pair] + own))

    truth, common = noise(), noise()
    rated = truth + RATING_ERROR * rng.standard_normal(2 * n_pairs)
    # At quantiles of the distribution, not of the sample: a rating must not depend on other rows.
    cuts = norm.ppf(BELOW, scale=np.hypot(1, RATING_ERROR))
    rating = 1 + np.searchsorted(cuts, rated).astype(np.float64)
    own = (np.sqrt(COMMON) * common + np.sqrt(1 - COMMON) * noise() for _ in errors)
    seeds = (SEEDS if spread else 1, 1)
    predictions = [
        truth + (error + spread * rng.standard_normal(seeds)) * one
        for error, one in zip(errors, own, strict=True)
    ]
    return Rows(np.array(predictions), rating, pair)


def true_difference(seed: int, n_pairs: int, spread: float) -> Floats:
    """Return (2,) how much better BETTER is than EQUAL, in Spearman and accuracy."""
    rng = np.random.default_rng(seed)
    found = []
    # Rows are few where seeds are many: those are averaged over as well.
    parts = 1_000 if spread else 10
    for _ in range(parts):
        rows = simulate(rng, n_pairs // parts, (EQUAL, BETTER), spread)
        values = bootstrap_metrics(
            list(rows.predictions), rows.rating, rows.pair, METRICS_COMPARED, 0
        ).values
        found.append(values[:, 1] - values[:, 0])
    return np.asarray(np.mean(found, axis=0))


def share(hits: Sequence[bool]) -> dict[str, float]:
    """Return the share of trials that hit, and its standard error."""
    value = float(np.mean(hits))
    return {"share": value, "error": float(np.sqrt(value * (1 - value) / len(hits)))}


@dataclass(frozen=True)
class Found:
    """What a method says of one difference."""

    low: float
    high: float
    p: float
    alarm: bool
    minimum: float | None


def by_t(rows: Rows, options: argparse.Namespace, trial: int) -> list[list[Found]]:
    """Return, for each measure, what llmcond says of each candidate."""
    data = (rows.rating, rows.pair, METRICS_COMPARED, options.resamples, trial)
    found = bootstrap_metrics(list(rows.predictions), *data)
    compared = paired_differences(found, {0: range(1, len(rows.predictions))})
    by_measure = [[one[measure] for one in compared.values()] for measure in MEASURES]
    return [
        [Found(one.low, one.high, one.p, one.verdict != "no evidence", one.minimum) for one in by]
        for by in by_measure
    ]


def by_percentiles(rows: Rows, options: argparse.Namespace, trial: int) -> list[list[Found]]:
    """Return what percentiles of the same draws say."""
    data = (rows.rating, rows.pair, METRICS_COMPARED, options.resamples, trial)
    drawn = bootstrap_metrics(list(rows.predictions), *data).sampled
    drawn = drawn[:, 1:] - drawn[:, :1]
    low, high = np.nanquantile(drawn, [0.025, 0.975], axis=2)
    p = 2 * np.minimum((drawn <= 0).mean(axis=2), (drawn >= 0).mean(axis=2))
    return [
        [
            Found(float(a), float(b), float(own), bool(corrected <= 0.05), None)
            for a, b, own, corrected in zip(low[m], high[m], p[m], holm(p[m]), strict=True)
        ]
        for m in range(len(MEASURES))
    ]


METHODS: Final = {"t": by_t, "percentiles": by_percentiles}


def false_alarms(options: argparse.Namespace, method: str, n_pairs: int) -> list[dict[str, Any]]:
    """Return, for each measure, how often any of several equally good prompts is told apart."""
    rng = np.random.default_rng([options.seed, n_pairs, 0])
    alarms = []
    for trial in range(options.trials):
        rows = simulate(rng, n_pairs, (EQUAL,) * (1 + options.candidates), options.spread)
        found = METHODS[method](rows, options, trial)
        alarms.append([any(one.alarm for one in family) for family in found])
    return [share(hits) for hits in zip(*alarms, strict=True)]


def coverage(
    options: argparse.Namespace, method: str, n_pairs: int, truth: Floats
) -> list[dict[str, Any]]:
    """Return, for each measure, how often the interval holds the truth, and 0 is excluded."""
    rng = np.random.default_rng([options.seed, n_pairs, 1])
    found = []
    for trial in range(options.trials):
        rows = simulate(rng, n_pairs, (EQUAL, BETTER), options.spread)
        found.append([family[0] for family in METHODS[method](rows, options, trial)])
    return [
        {
            "coverage": share([one.low <= true <= one.high for one in differences]),
            "seen": share([one.p <= 0.05 for one in differences]),
            "minimum": _mean([one.minimum for one in differences]),
        }
        for true, differences in zip(truth, zip(*found, strict=True), strict=True)
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate, printing a line for each size, measure and method."""
    truth = true_difference(options.seed, options.truth, options.spread)
    known = ", ".join(f"{m} {d:.4f}" for m, d in zip(MEASURES, truth, strict=True))
    print(f"{options.trials} trials, {options.candidates} candidates; true difference: {known}")
    print(
        f"{'pairs':>5}  {'measure':8}  {'interval':11}  {'false alarms':>14}  {'coverage':>14}"
        f"  {'seen':>14}  {'minimum':>7}"
    )
    results = []
    for n_pairs in options.pairs:
        for method in METHODS if options.percentiles else ("t",):
            alarms = false_alarms(options, method, n_pairs)
            covered = coverage(options, method, n_pairs, truth)
            for measure, alarm, others in zip(MEASURES, alarms, covered, strict=True):
                row = {"pairs": n_pairs, "measure": measure, "interval": method}
                results.append({**row, "false_alarms": alarm, **others})
                print(_line(results[-1]), flush=True)
    return {"true_difference": dict(zip(MEASURES, truth.tolist(), strict=True)), "results": results}


def _line(row: dict[str, Any]) -> str:
    shares = "  ".join(
        f"{row[key]['share']:6.3f} ± {row[key]['error']:.3f}"
        for key in ("false_alarms", "coverage", "seen")
    )
    begin = f"{row['pairs']:5}  {row['measure']:8}  {row['interval']:11}"
    minimum = "" if row["minimum"] is None else f"{row['minimum']:7.4f}"
    return f"{begin}  {shares}  {minimum}".rstrip()


def main() -> None:
    """Parse, simulate, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=2_000, help="at each size (%(default)s)")
    parser.add_argument(
        "--pairs", type=int, nargs="+", default=SIZES, help=f"({' '.join(map(str, SIZES))})"
    )
    parser.add_argument("--candidates", type=int, default=8, help="of the false alarms (8)")
    parser.add_argument("--resamples", type=int, default=400, help="of each bootstrap (400)")
    parser.add_argument(
        "--truth", type=int, default=2_000_000, help="pairs for the true difference"
    )
    parser.add_argument("--spread", type=float, default=0.0, help="of seeds (0: one seed)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--percentiles", action="store_true", help="percentile intervals as well")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    began = time.perf_counter()
    result = run(options)
    print(f"{time.perf_counter() - began:.0f} s")
    if options.json:
        print(json.dumps({**result, "options": vars(options)}))


if __name__ == "__main__":
    main()
