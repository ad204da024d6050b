"""Formatting of figures, intervals, differences and p-values, shared by all reports."""

from __future__ import annotations

from collections.abc import Sequence

from llmcond.evaluation.dev_gain import CrossValidatedGain
from llmcond.evaluation.paired import MIN_PAIRS
from llmcond.evaluation.results import Result
from llmcond.metrics import Estimate, Metric, finite_or_none, format_number

MINUS = "\N{MINUS SIGN}"
#: The sentence of a title that says what the intervals are.
INTERVAL_NOTE = "95 % confidence intervals over {groups} and, with several fits, over seeds."


def head_text(name: str) -> str:
    """Return the name of a head for readers: zero-shot embeddings have no head."""
    return "no head" if name.partition("@")[0] == "none" else name


def estimate_text(metric: Metric, estimate: Estimate) -> str:
    """Format a figure with its interval, if it has one: ``58.7 [55.5, 61.9]``."""
    if finite_or_none(estimate.value) is None:
        return "undefined"
    if finite_or_none(estimate.low) is None:
        return metric.format(estimate.value)
    return f"{metric.format(estimate.value)} {interval_text(metric, estimate.low, estimate.high)}"


def dev_gain_text(cross_validated: CrossValidatedGain) -> str:
    """Summarise in one line how much training on dev improves the score, estimated by folds."""
    metric, gain = cross_validated.gain.metric, cross_validated.gain
    parts = [
        f"; {name} conditions ({gain.n:,} rows) {metric.format(gain.trained.value)}, without dev "
        f"{metric.format(gain.without.value)}"
        for name, gain in cross_validated.by_condition.items()
    ]
    return (
        f"{cross_validated.folds} folds of dev, each predicted by a fit on the other folds "
        f"({gain.n:,} rows): {metric.heading} {estimate_text(metric, gain.trained)}; without dev "
        f"{estimate_text(metric, gain.without)}; difference "
        f"{metric.format(gain.difference.value, signed=True)} "
        f"({range_text(metric, gain.difference.low, gain.difference.high, signed=True)})"
        f"{''.join(parts)}"
    )


def highest_or_lowest(metric: Metric) -> str:
    """Return "Highest" or "Lowest", the word for a best score that may not be significant."""
    return "Highest" if metric.higher_is_better else "Lowest"


def interval_text(metric: Metric, low: float, high: float) -> str:
    """Format an interval in brackets: ``[55.5, 61.9]``."""
    return f"[{metric.format(low)}, {metric.format(high)}]"


def range_text(metric: Metric, low: float, high: float, signed: bool = False) -> str:
    """Format an interval as ``55.5 to 61.9``; empty if it is undefined."""
    if finite_or_none(low) is None or finite_or_none(high) is None:
        return ""
    return f"{metric.format(low, signed)} to {metric.format(high, signed)}"


def p_value_text(p: float) -> str:
    """Format a p-value with three decimals, or as ``< 0.001``."""
    return "< 0.001" if p < 0.001 else format_number(p, 3)


def interval_notes(results: Sequence[Result]) -> str:
    """Return the notes for a title: what the intervals are, or why there are none.

    The notes also name the role of dev: whether epochs were chosen, or heads trained, on it.
    """
    first = results[0]
    n_groups = first.counts.n_resampled
    selected_on_dev = any(
        fit.get("selected_on") == "dev" for result in results for fit in result.fits
    )
    text = INTERVAL_NOTE.format(groups=first.counts.resampled)
    if n_groups < MIN_PAIRS:
        text = (
            f"No intervals: {n_groups:,} {first.counts.resampled} are too few, they need at least "
            f"{MIN_PAIRS}."
        )
    if selected_on_dev and first.split == "dev":
        text = f"{text} The epochs of fitted heads were chosen on dev: their figures are optimistic"
        if any(result.held_out for result in results):
            return (
                f"{text}. Held-out figures are not: each tenth of dev is predicted by the epoch "
                "that the rest of dev chooses (early stopping uses all of dev)."
            )
        return f"{text}."
    text = f"{text} Epochs were chosen on dev." if selected_on_dev else text
    with_dev = [
        result.name
        for result in results
        if any("dev" in fit.get("trained_on", ()) for fit in result.fits)
    ]
    return f"{text} Also trained on dev: {', '.join(with_dev)}." if with_dev else text


def held_out_text(result: Result) -> str:
    """Format the held-out score on dev of a result; a dash if there is none."""
    return "–" if result.held_out is None else estimate_text(result.primary, result.held_out)


def sentences_text(result: Result) -> str:
    """Say how many rows share a sentence with the training data; empty if that is not scored."""
    if result.new_sentences is None:
        return ""
    n, n_new = result.counts.n, result.new_sentences.counts.n
    return f"{n - n_new:,} rows share a sentence with training, {n_new:,} do not. "


def new_sentences_heading(result: Result) -> str:
    """Return the heading of the score on rows that share no sentence with the training data."""
    return f"{result.primary.heading}, unseen sentences"


def factors_text(metrics: Sequence[Metric]) -> str:
    """Return the sentence of a title that says by what the figures are multiplied."""
    factors = {metric.factor for metric in metrics} - {1.0}
    if not factors:
        return ""
    if len(factors) == 1:
        unscaled = ", ".join(metric.heading for metric in metrics if metric.factor == 1.0)
        return f"Times {factors.pop():g}{f', except {unscaled}' if unscaled else ''}. "
    parts = (f"{metric.heading} times {metric.factor:g}" for metric in metrics)
    return f"{', '.join(parts)}. "
