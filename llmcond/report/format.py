"""How figures are written: intervals, differences and p-values, the same in every report."""

from __future__ import annotations

from collections.abc import Sequence

from llmcond.metrics import Estimate, Metric, finite, number

MINUS = "\N{MINUS SIGN}"


def estimate_text(metric: Metric, estimate: Estimate) -> str:
    """Return a figure with its interval: ``58.7 [55.5, 61.9]``."""
    if finite(estimate.value) is None:
        return "undefined"
    return f"{metric.show(estimate.value)} {interval_text(metric, estimate.low, estimate.high)}"


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


def factors_text(metrics: Sequence[Metric]) -> str:
    """Return what figures are multiplied by, as titles say it."""
    factors = {metric.factor for metric in metrics} - {1.0}
    if not factors:
        return ""
    if len(factors) == 1 and all(metric.factor != 1.0 for metric in metrics):
        return f"Times {factors.pop():g}. "
    named = (f"{metric.heading} times {metric.factor:g}" for metric in metrics)
    return f"{', '.join(named)}. "
