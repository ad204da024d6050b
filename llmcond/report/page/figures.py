"""The charts of a page as figures for papers, in separate files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmcond.data.rows import Rows
from llmcond.report.figures import (
    check_figure,
    plot_differences,
    plot_isotropy,
    plot_predictions,
    plot_scores,
    plot_steps,
)
from llmcond.report.page.gather import Page

#: The names of the figures, without suffix.
FIGURES = ("scores", "differences", "predictions", "isotropy", "steps")


def check_figures(folder: Path, form: str) -> None:
    """Check, before hours of work, that all figures can be written.

    Raises:
        UserError: a file cannot be written, or a library is not installed.
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

    plot_scores(page.results, path("scores"))
    plot_differences(page.results, path("differences"))
    if page.systems and isinstance(page.rows, Rows) and page.rows.rated.any():
        _plot_predictions(page, page.rows, path("predictions"))
    if page.isotropy:
        plot_isotropy(page.isotropy, path("isotropy"))
    if any(fit.get("curve") for result in page.results for fit in result.fits):
        plot_steps(page.results, path("steps"))


def _plot_predictions(page: Page, rows: Rows, path: Path) -> None:
    from llmcond.evaluation.analyses import calibration  # which imports scipy

    low, high = page.scale
    rating = low + (high - low) * rows.rating
    systems = {}
    for name in filter(None, page.initial_systems()):
        similarity = np.asarray(page.similarity[name], dtype=np.float64)
        scored = rows.rated & np.isfinite(similarity)
        systems[name] = calibration(similarity[scored], rating[scored])
    caption = "line and mark: mean over rows; bar: middle half of the rows; dash: median"
    plot_predictions(systems, path, "rating", "predicted similarity", caption)
