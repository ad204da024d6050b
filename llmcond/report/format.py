"""How figures are written: intervals, differences and p-values, the same in every report."""

from __future__ import annotations

from collections.abc import Sequence

from llmcond.evaluation.folds import Folded
from llmcond.evaluation.paired import LEAST_PAIRS
from llmcond.evaluation.results import Result
from llmcond.metrics import Estimate, Metric, finite, number

MINUS = "\N{MINUS SIGN}"
#: What intervals are, in every title.
INTERVALS = "95 % intervals over {groups} and, of several fits, seeds."


def estimate_text(metric: Metric, estimate: Estimate) -> str:
    """Return a figure with its interval, if it has one: ``58.7 [55.5, 61.9]``."""
    if finite(estimate.value) is None:
        return "undefined"
    if finite(estimate.low) is None:
        return metric.show(estimate.value)
    return f"{metric.show(estimate.value)} {interval_text(metric, estimate.low, estimate.high)}"


def folds_text(found: Folded) -> str:
    """Return what training on dev brings, by its folds, in a line."""
    metric, gain = found.gain.metric, found.gain
    parts = [
        f"; {name} conditions ({gain.n:,} rows) {metric.show(gain.trained.value)}, with no row of "
        f"dev {metric.show(gain.without.value)}"
        for name, gain in found.by_condition.items()
    ]
    return (
        f"{found.folds} folds of dev, each predicted without it ({gain.n:,} rows): "
        f"{metric.heading} {estimate_text(metric, gain.trained)}; with no row of dev "
        f"{estimate_text(metric, gain.without)}; difference "
        f"{metric.show(gain.difference.value, signed=True)} "
        f"({range_text(metric, gain.difference.low, gain.difference.high, signed=True)})"
        f"{''.join(parts)}"
    )


def extreme(metric: Metric) -> str:
    """Return what the first of some results is called where nothing shows that it is the best."""
    return "Highest" if metric.higher_is_better else "Lowest"


def interval_text(metric: Metric, low: float, high: float) -> str:
    """Return an interval in brackets."""
    return f"[{metric.show(low)}, {metric.show(high)}]"


def range_text(metric: Metric, low: float, high: float, signed: bool = False) -> str:
    """Return an interval as its two ends; nothing where it is undefined."""
    if finite(low) is None or finite(high) is None:
        return ""
    return f"{metric.show(low, signed)} to {metric.show(high, signed)}"


def probability(p: float) -> str:
    """Return a p-value with three decimals, a very small one as what it is below."""
    return "< 0.001" if p < 0.001 else number(p, 3)


def caveats(results: Sequence[Result]) -> str:
    """Return what titles say beside figures: what intervals are, or why there are none."""
    first = results[0]
    n_pairs = first.counts.n_pairs
    chosen = any(fit.get("selected_on") == "dev" for result in results for fit in result.fits)
    text = INTERVALS.format(groups=first.counts.groups)
    if n_pairs < LEAST_PAIRS:
        text = (
            f"No intervals: {n_pairs:,} {first.counts.groups} are too few, {LEAST_PAIRS} at least."
        )
    if chosen and first.split == "dev":
        return f"{text} Dev chose the epochs of fitted heads: their figures are optimistic."
    text = f"{text} Epochs were chosen on dev." if chosen else text
    with_dev = [
        result.name
        for result in results
        if any("dev" in fit.get("trained_on", ()) for fit in result.fits)
    ]
    return f"{text} Trained on dev as well: {', '.join(with_dev)}." if with_dev else text


def sentences_text(result: Result) -> str:
    """Return how many rows share a sentence with those trained on; nothing where none does."""
    if result.new_sentences is None:
        return ""
    n, n_new = result.counts.n, result.new_sentences.counts.n
    return f"{n - n_new:,} rows share a sentence with training, {n_new:,} do not. "


def new_sentences_heading(result: Result) -> str:
    """Return what the score on rows that share no sentence with training is called."""
    return f"{result.primary.heading}, unseen sentences"


def factors_text(metrics: Sequence[Metric]) -> str:
    """Return what figures are multiplied by, as titles say it."""
    factors = {metric.factor for metric in metrics} - {1.0}
    if not factors:
        return ""
    if len(factors) == 1:
        plain = ", ".join(metric.heading for metric in metrics if metric.factor == 1.0)
        return f"Times {factors.pop():g}{f', but for {plain}' if plain else ''}. "
    named = (f"{metric.heading} times {metric.factor:g}" for metric in metrics)
    return f"{', '.join(named)}. "
