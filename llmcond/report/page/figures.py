"""The charts of a page as figures for papers, in separate files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmcond.data.rows import Rows
from llmcond.evaluation.results import ComparedResult
from llmcond.metrics import Estimate, Metric
from llmcond.report.analyses import plot_isotropy
from llmcond.report.figures import Interval, check_figure, plot_intervals, plot_predictions
from llmcond.report.page.gather import Page
from llmcond.report.sweeps import plot_steps
from llmcond.report.tables import axis_label

#: The names of the figures, without suffix.
FIGURES = ("scores", "differences", "predictions", "isotropy", "steps")

_NO_INTERVAL = "; no bar: two seeds or few rows give no interval"


def check_figures(folder: Path, form: str) -> None:
    """Check, before hours of work, that all figures can be written.

    Raises:
        UserError: a file cannot be written, or matplotlib is not installed.
    """
    for name in FIGURES:
        check_figure(folder / f"{name}.{form}")


def write_figures(page: Page, folder: Path, form: str) -> None:
    """Write the charts of a page as figures, each with its numbers as CSV.

    Scores and differences to the baseline have their intervals. For rated pairs there are also
    predictions against ratings and isotropy, and for heads that are trained in steps their learning
    curves. A figure without content is not written.

    Args:
        page: the page.
        folder: the folder to write to.
        form: the suffix of the files, one of png, svg and pdf.
    """

    def path(name: str) -> Path:
        return folder / f"{name}.{form}"

    _plot_scores(page.results, path("scores"))
    _plot_differences(page.results, path("differences"))
    if page.systems and isinstance(page.rows, Rows) and page.rows.rated.any():
        _plot_predictions(page, page.rows, path("predictions"))
    if page.isotropy:
        plot_isotropy(page.isotropy, path("isotropy"))
    if any(fit.get("curve") for result in page.results for fit in result.fits):
        plot_steps(page.results, path("steps"))


def _interval(metric: Metric, result: ComparedResult, estimate: Estimate) -> Interval:
    figures = (estimate.value, estimate.low, estimate.high)
    shown = (metric.in_display_unit(figure) for figure in figures)
    value, low, high = (math.nan if figure is None else figure for figure in shown)
    label = f"{result.prompt}{' - c' if result.subtract else ''}"
    return Interval(label, result.head, value, low, high)


def _describe_bars(rows: Sequence[Interval], bars: str) -> str:
    missing = [math.isnan(row.low) for row in rows]
    if all(missing):
        return "no bars, because two seeds or few rows give no interval"
    return bars + (_NO_INTERVAL if any(missing) else "")


def _plot_scores(results: Sequence[ComparedResult], path: Path) -> None:
    metric = results[0].primary
    rows = [_interval(metric, result, result.main) for result in results]
    rows = [row for row in rows if not math.isnan(row.value)]
    if rows:
        over = "rows and seeds" if any(len(result.seeds) > 1 for result in results) else "rows"
        bars = _describe_bars(rows, f"bar: 95 % confidence interval over {over}")
        label = axis_label(metric)
        plot_intervals(rows, path, label, f"- c: the unconditional vector is subtracted; {bars}")


def _plot_differences(results: Sequence[ComparedResult], path: Path) -> None:
    metric = results[0].primary
    differences = [
        (result, result.difference[metric.name])
        for result in results
        if result.difference and metric.name in result.difference
    ]
    rows = [
        _interval(metric, result, Estimate(paired.value, paired.low, paired.high))
        for result, paired in differences
    ]
    rows = [row for row in rows if not math.isnan(row.value)]
    if rows:
        bars = _describe_bars(
            rows,
            "bar: 95 % confidence interval of this paired difference over rows and seeds, not "
            "corrected for several comparisons",
        )
        label = f"difference to the baseline, {axis_label(metric)}"
        plot_intervals(rows, path, label, bars, reference=0.0)


def _plot_predictions(page: Page, rows: Rows, path: Path) -> None:
    from llmcond.evaluation.breakdown import calibration  # which imports scipy

    low, high = page.scale
    rating = low + (high - low) * rows.rating
    systems = {}
    for name in filter(None, page.initial_systems()):
        similarity = np.asarray(page.similarity[name], dtype=np.float64)
        scored = rows.rated & np.isfinite(similarity)
        systems[name] = calibration(similarity[scored], rating[scored])
    caption = "line and mark: mean over rows; bar: middle half of the rows; dash: median"
    plot_predictions(systems, path, "rating", "predicted similarity", caption)
