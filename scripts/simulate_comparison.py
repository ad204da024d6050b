"""Check the error rates of comparisons of prompts on simulated data whose truth is known.

    python scripts/simulate_comparison.py                      # some minutes on one core
    python scripts/simulate_comparison.py --pairs 60 --trials 500 --percentiles --json

Each sentence pair has two rows with different conditions, which share half of the random variance.
A rating from 1 to 5 is the truth plus a small error. A prediction is the truth plus a larger error,
most of which all prompts have in common. The script answers two questions, at several numbers of
sentence pairs:

* False alarms: if all prompts are equally good, in how many trials is any of them reported as
  better or worse than the baseline? At most 5 % are allowed, over all prompts together, for each
  measure.
* Coverage: if a prompt is better by a known difference, in how many trials does the interval
  contain that difference? It should be 95 %. The table also shows how often the difference is seen
  (p at most 0.05), and the mean of the reported minimum: the smallest difference that would be seen
  in 80 % of samples.

    python scripts/simulate_comparison.py --graph --pairs 500 2000 --trials 400 --candidates 1

With ``--graph`` the rows are two queries for each of ``--pairs`` triples of a graph, whose few
popular entities are in many triples. The difficulty of a query depends on both of its entities, in
another way for each system. The intervals over head and tail entities are compared with those that
take triples as independent. The measure is MRR.

With ``--spread`` each prompt has three seeds of different quality: SPREAD is the standard deviation
of their error.

The number after ± is the standard error of the simulation.
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

#: Standard deviation of the error of ratings; that of the truth is 1.
RATING_ERROR: Final = 0.5
#: Standard deviation of the error of the baseline and of equally good prompts: gives a Spearman of
#: about 0.55.
EQUAL: Final = 1.2
#: Standard deviation of the error of a better prompt.
BETTER: Final = 1.05
#: Number of seeds of a prompt with ``--spread``.
SEEDS: Final = 3
#: Share of the variance of a prediction's error that all prompts have in common.
COMMON: Final = 0.7
#: Mean logarithm of ranks with ``--graph``, of the baseline and of a better system.
EQUAL_RANK: Final = 2.0
BETTER_RANK: Final = 1.8
#: The popularity of entities falls with this power of their place, for heads and for tails.
HEAD_POWER: Final = 0.5
TAIL_POWER: Final = 0.8
#: Shares of the ratings below 2, 3, 4 and 5; as in C-STS, few ratings are high.
BELOW: Final = (0.25, 0.5, 0.7, 0.88)


@dataclass(frozen=True)
class Rows:
    """Simulated rows.

    Attributes:
        predictions: (prompts, seeds, n) predictions.
        rating: (n,) ratings.
        pair: (n,) number of each row's sentence pair.
    """

    predictions: Floats
    rating: Floats
    pair: NDArray[np.intp]


def simulate(
    rng: np.random.Generator, n_pairs: int, errors: Sequence[float], spread: float = 0.0
) -> Rows:
    """Simulate rows with a prompt for each error.

    Args:
        rng: random generator.
        n_pairs: number of sentence pairs.
        errors: standard deviation of each prompt's error.
        spread: standard deviation of that error over seeds; 0 for a single seed.
    """
    pair = np.repeat(np.arange(n_pairs), 2)

    def noise() -> Floats:
        shared, independent = rng.standard_normal(n_pairs), rng.standard_normal(2 * n_pairs)
        return np.asarray(np.sqrt(0.5) * (shared[pair] + independent))

    truth, common = noise(), noise()
    rated = truth + RATING_ERROR * rng.standard_normal(2 * n_pairs)
    # The thresholds are quantiles of the distribution, not of the sample: a rating must not depend
    # on other rows.
    cuts = norm.ppf(BELOW, scale=np.hypot(1, RATING_ERROR))
    rating = 1 + np.searchsorted(cuts, rated).astype(np.float64)
    prompt_errors = (np.sqrt(COMMON) * common + np.sqrt(1 - COMMON) * noise() for _ in errors)
    seeds = (SEEDS if spread else 1, 1)
    predictions = [
        truth + (error + spread * rng.standard_normal(seeds)) * prompt_error
        for error, prompt_error in zip(errors, prompt_errors, strict=True)
    ]
    return Rows(np.array(predictions), rating, pair)


@dataclass(frozen=True)
class Graph:
    """Simulated queries of a graph: both directions of each triple.

    Attributes:
        ranks: (systems, 1, 2n) ranks of the right answers.
        triple: (2n,) number of each query's triple.
        entities: head and tail of each query's triple, (2n,) each.
    """

    ranks: Floats
    triple: NDArray[np.intp]
    entities: tuple[NDArray[np.intp], NDArray[np.intp]]


def simulate_graph(
    rng: np.random.Generator, n_triples: int, difficulties: Sequence[float]
) -> Graph:
    """Simulate the ranks of systems, whose mean logarithms are ``difficulties``.

    A third of the variance of a logarithm is that of the head, and a third that of the tail, half
    of which all systems have in common.
    """
    heads = rng.choice(n_triples, n_triples, p=_popularity(n_triples, HEAD_POWER))
    tails = rng.choice(n_triples, n_triples, p=_popularity(n_triples, TAIL_POWER))

    def effects(n: int) -> Floats:
        common = rng.standard_normal(n)
        individual = rng.standard_normal((len(difficulties), n))
        return np.asarray(np.sqrt(0.5) * (common + individual))

    by_head, by_tail = effects(n_triples)[:, heads], effects(n_triples)[:, tails]
    both = np.concatenate([by_head + by_tail] * 2, axis=1) + effects(2 * n_triples)
    ranks = np.ceil(np.exp(np.array(difficulties)[:, None] + both))
    triple = np.tile(np.arange(n_triples), 2)
    return Graph(ranks[:, None], triple, (np.tile(heads, 2), np.tile(tails, 2)))


def _popularity(n: int, power: float) -> Floats:
    weights = np.arange(1, n + 1) ** -power
    return np.asarray(weights / weights.sum())


def run_graph(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate graphs, and print a line for each size and kind of interval."""
    truth_rng = np.random.default_rng(options.seed)
    levels = (EQUAL_RANK, BETTER_RANK)
    # The expectation over entities and triples, without dependence between queries.
    noise = np.sqrt(3) * truth_rng.standard_normal(options.truth)
    harder, easier = (float((1 / np.ceil(np.exp(level + noise))).mean()) for level in levels)
    mrr, results = METRICS["mrr"], []
    difference = f"difference {easier - harder:.4f}"
    print(f"{options.trials} trials, {options.candidates} candidates; {difference}")
    print(f"{'triples':>7}  {'interval':8}  {'false alarms':>14}  {'coverage':>14}  {'width':>6}")
    for n_triples in options.pairs:
        rng = np.random.default_rng([options.seed, n_triples])
        for name in ("triples", "entities"):
            alarms, covered, widths = [], [], []
            for trial in range(options.trials):
                # The equally good systems come first, and the better one is last.
                difficulties = [EQUAL_RANK] * (1 + options.candidates) + [BETTER_RANK]
                graph = simulate_graph(rng, n_triples, difficulties)
                crossed = graph.entities if name == "entities" else ()
                data = (np.zeros(2 * n_triples), graph.triple, [mrr], options.resamples, trial)
                resampled = bootstrap_metrics(list(graph.ranks), *data, crossed=crossed)
                last = len(difficulties) - 1
                equal = paired_differences(resampled, {0: range(1, last)})
                better = paired_differences(resampled, {0: [last]})[last]["mrr"]
                alarms.append(any(d["mrr"].verdict != "no evidence" for d in equal.values()))
                covered.append(better.low <= easier - harder <= better.high)
                widths.append(better.high - better.low)
            figures = {"false_alarms": share(alarms), "coverage": share(covered)}
            row = {"triples": n_triples, "interval": name, **figures}
            results.append({**row, "width": float(np.mean(widths))})
            print(
                f"{n_triples:7}  {name:8}  "
                + "  ".join(f"{f['share']:6.3f} ± {f['error']:.3f}" for f in figures.values())
                + f"  {results[-1]['width']:6.4f}",
                flush=True,
            )
    return {"true_difference": {"mrr": easier - harder}, "results": results}


def true_difference(seed: int, n_pairs: int, spread: float) -> Floats:
    """Return the (2,) true differences between BETTER and EQUAL in Spearman and accuracy."""
    rng = np.random.default_rng(seed)
    differences_by_part = []
    # With several seeds, the difference is also averaged over many samples of seeds, of fewer rows.
    parts = 1_000 if spread else 10
    for _ in range(parts):
        rows = simulate(rng, n_pairs // parts, (EQUAL, BETTER), spread)
        values = bootstrap_metrics(
            list(rows.predictions), rows.rating, rows.pair, METRICS_COMPARED, 0
        ).values
        differences_by_part.append(values[:, 1] - values[:, 0])
    return np.asarray(np.mean(differences_by_part, axis=0))


def share(hits: Sequence[bool]) -> dict[str, float]:
    """Return the share of true values, and its standard error."""
    value = float(np.mean(hits))
    return {"share": value, "error": float(np.sqrt(value * (1 - value) / len(hits)))}


@dataclass(frozen=True)
class Verdict:
    """The result of a method for one difference.

    Attributes:
        low: lower end of the interval.
        high: upper end of the interval.
        p: p-value.
        alarm: whether the method reports a difference after its correction for several prompts.
        minimum: smallest detectable difference; None if the method does not compute it.
    """

    low: float
    high: float
    p: float
    alarm: bool
    minimum: float | None


def t_verdicts(rows: Rows, options: argparse.Namespace, trial: int) -> list[list[Verdict]]:
    """Return, for each measure, llmcond's result for each candidate."""
    data = (rows.rating, rows.pair, METRICS_COMPARED, options.resamples, trial)
    resampled = bootstrap_metrics(list(rows.predictions), *data)
    compared = paired_differences(resampled, {0: range(1, len(rows.predictions))})
    by_measure = [[difference[measure] for difference in compared.values()] for measure in MEASURES]
    return [
        [
            Verdict(
                difference.low,
                difference.high,
                difference.p,
                difference.verdict != "no evidence",
                difference.minimum,
            )
            for difference in row
        ]
        for row in by_measure
    ]


def percentile_verdicts(rows: Rows, options: argparse.Namespace, trial: int) -> list[list[Verdict]]:
    """Return the results of percentile intervals on the same bootstrap samples."""
    data = (rows.rating, rows.pair, METRICS_COMPARED, options.resamples, trial)
    samples = bootstrap_metrics(list(rows.predictions), *data).sampled
    samples = samples[:, 1:] - samples[:, :1]
    low, high = np.nanquantile(samples, [0.025, 0.975], axis=2)
    p = 2 * np.minimum((samples <= 0).mean(axis=2), (samples >= 0).mean(axis=2))
    return [
        [
            Verdict(float(a), float(b), float(p_value), bool(corrected <= 0.05), None)
            for a, b, p_value, corrected in zip(low[m], high[m], p[m], holm(p[m]), strict=True)
        ]
        for m in range(len(MEASURES))
    ]


METHODS: Final = {"t": t_verdicts, "percentiles": percentile_verdicts}


def false_alarms(options: argparse.Namespace, method: str, n_pairs: int) -> list[dict[str, Any]]:
    """Return, for each measure, how often any of several equally good prompts raises an alarm."""
    rng = np.random.default_rng([options.seed, n_pairs, 0])
    alarms = []
    for trial in range(options.trials):
        rows = simulate(rng, n_pairs, (EQUAL,) * (1 + options.candidates), options.spread)
        verdicts = METHODS[method](rows, options, trial)
        alarms.append([any(verdict.alarm for verdict in family) for family in verdicts])
    return [share(hits) for hits in zip(*alarms, strict=True)]


def coverage(
    options: argparse.Namespace, method: str, n_pairs: int, truth: Floats
) -> list[dict[str, Any]]:
    """Return, for each measure, how often the interval contains the truth, and excludes 0."""
    rng = np.random.default_rng([options.seed, n_pairs, 1])
    verdicts = []
    for trial in range(options.trials):
        rows = simulate(rng, n_pairs, (EQUAL, BETTER), options.spread)
        verdicts.append([family[0] for family in METHODS[method](rows, options, trial)])
    return [
        {
            "coverage": share(
                [verdict.low <= true <= verdict.high for verdict in measure_verdicts]
            ),
            "seen": share([verdict.p <= 0.05 for verdict in measure_verdicts]),
            "minimum": _mean([verdict.minimum for verdict in measure_verdicts]),
        }
        for true, measure_verdicts in zip(truth, zip(*verdicts, strict=True), strict=True)
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the simulation, and print a line for each size, measure and method."""
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
    """Run the simulation with the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trials", type=int, default=2_000, help="number of trials at each size (default: 2000)"
    )
    parser.add_argument(
        "--pairs",
        type=int,
        nargs="+",
        default=SIZES,
        help=f"numbers of sentence pairs (default: {' '.join(map(str, SIZES))})",
    )
    parser.add_argument(
        "--candidates", type=int, default=8, help="number of equally good prompts (default: 8)"
    )
    parser.add_argument(
        "--resamples", type=int, default=400, help="bootstrap samples per trial (default: 400)"
    )
    parser.add_argument(
        "--truth",
        type=int,
        default=2_000_000,
        help="sentence pairs to compute the true difference with (default: 2000000)",
    )
    parser.add_argument(
        "--spread",
        type=float,
        default=0.0,
        help="standard deviation of the error over seeds (default: 0, a single seed)",
    )
    parser.add_argument("--graph", action="store_true", help="simulate triples of a graph")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--percentiles", action="store_true", help="also test percentile intervals")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    options = parser.parse_args()
    began = time.perf_counter()
    result = run_graph(options) if options.graph else run(options)
    print(f"{time.perf_counter() - began:.0f} s")
    if options.json:
        print(json.dumps({**result, "options": vars(options)}))


if __name__ == "__main__":
    main()
