"""The pictures of a sweep (CASE, figures 3 and 4)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from llmcond.evaluation.results import ComparedResult, Result, SweptResult
from llmcond.heads.pairs import score_key
from llmcond.log import log
from llmcond.report.figures import Point, check_figure, plot_curve
from llmcond.report.tables import axis_label, settings_text

Swept = Sequence[SweptResult]


def _line_name(result: Result, settings: Mapping[str, Any]) -> str:
    return f"{result.name} {settings_text(settings)}".rstrip()


def check_plots(plot: str | Path | None, plot_steps: str | Path | None) -> None:
    """Check, before hours of work, that the figures of --plot and --plot-steps can be written.

    Raises:
        UserError: a path cannot be written or has another suffix, or matplotlib is not installed.
    """
    for path in (plot, plot_steps):
        if path is not None:
            check_figure(Path(path))


def write_plots(
    results: Swept,
    settings_path: str | Path | None,
    steps_path: str | Path | None,
    split: str = "dev",
) -> None:
    """Write the figures of --plot and --plot-steps, as far as they are requested.

    ``split`` is the split of the scores against training steps.
    """
    if settings_path is not None:
        plot_settings(results, Path(settings_path))
    if steps_path is not None:
        plot_steps(results, Path(steps_path), split)


def plot_settings(results: Swept, path: Path) -> None:
    """Plot the primary metric against the first setting with several numbers (CASE, figure 4).

    There is one line for each head, prompt and value of the other settings, with its interval.
    """
    key = _find_numeric_setting(results)
    if key is None:
        log.info(f"{path} was not written: no numeric setting was varied")
        return
    metric = results[0].primary
    series: dict[str, list[Point]] = {}
    for result in results:
        value, low, high = (metric.in_display_unit(figure) for figure in astuple(result.main))
        if value is None or key not in result.settings:
            continue
        name = _line_name(result, {k: v for k, v in result.settings.items() if k != key})
        # A requested dimension is limited to the size of the features, so plot the actual one.
        x = result.dim if key == "dim" else result.settings[key]
        bounds = (math.nan, math.nan) if low is None or high is None else (low, high)
        series.setdefault(name, []).append((x, value, *bounds))
    if not series:
        log.info(f"{path} was not written: no score is defined")
        return
    x_values = sorted({point[0] for points in series.values() for point in points})
    log_x = x_values[0] > 0 and x_values[-1] / x_values[0] > 8
    missing = [math.isnan(low) for points in series.values() for _, _, low, _ in points]
    plot_curve(
        series,
        path,
        key.replace("_", " "),
        axis_label(metric),
        log_x,
        _describe_intervals(results, missing),
    )


def _describe_intervals(results: Swept, missing: Sequence[bool]) -> str:
    """Return the caption of a plot of intervals, some or all of which may be missing."""
    one_seed = all(len(result.seeds) <= 1 for result in results)
    line = "line: one seed" if one_seed else "line: mean over seeds"
    if all(missing):
        return f"{line}; no band, because two seeds or few rows give no interval"
    rows = "rows" if one_seed else "rows and seeds"
    band = f"{line}; band: 95 % confidence interval over {rows}"
    return f"{band}; no band: two seeds or few rows give no interval" if any(missing) else band


def _find_numeric_setting(results: Swept) -> str | None:
    for key in results[0].settings:
        values = {result.settings.get(key) for result in results}
        if len(values) > 1 and all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in values
        ):
            return str(key)
    return None


def plot_steps(results: Swept | Sequence[ComparedResult], path: Path, split: str = "dev") -> None:
    """Plot the score on a split against training steps, with the range over seeds (CASE, figure 3).

    The learning curves of the fits must have the scores on this split.
    """
    series: dict[str, list[Point]] = {}
    for result in results:
        fits = [fit for fit in result.fits if fit.get("curve")]
        # A curve ends where its shortest seed ends.
        for epoch, epoch_logs in enumerate(zip(*(fit["curve"] for fit in fits), strict=False)):
            key, general_key = score_key(split, result.primary.name), score_key(split)
            values = [epoch_log.get(key, epoch_log.get(general_key)) for epoch_log in epoch_logs]
            if None not in values:
                steps = epoch_logs[0].get("step") or (epoch + 1) * fits[0]["steps_per_epoch"]
                figures = (statistics.fmean(values), min(values), max(values))
                mean, low, high = (result.primary.factor * figure for figure in figures)
                settings = result.settings if isinstance(result, SweptResult) else {}
                line = series.setdefault(_line_name(result, settings), [])
                line.append((steps, mean, low, high))
    if not series:
        log.info(f"{path} was not written: no head is trained in steps, or there is no dev split")
        return
    one_seed = all(len(result.fits) <= 1 for result in results)
    band = "line: one seed" if one_seed else "line: mean over seeds; band: range over seeds"
    plot_curve(series, path, "steps", axis_label(results[0].primary, f" on {split}"), band=band)
