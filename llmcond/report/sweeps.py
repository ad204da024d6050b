"""A sweep as a table and as pictures (CASE, figures 3 and 4)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from rich.table import Table

from llmcond.evaluation.results import SweptResult
from llmcond.files import check_output
from llmcond.heads.pairs import SCORE
from llmcond.log import log
from llmcond.metrics import Metric, metric_of
from llmcond.report.figures import Point, check_matplotlib, plot_curve
from llmcond.report.format import caveats, factors_text, range_text
from llmcond.report.terminal import add_figures, identity_cells, identity_table, plain

Swept = Sequence[SweptResult]


def sweep_table(results: Swept, run: object) -> Table:
    """Return a sweep's results, a row for each combination."""
    first, primary = results[0], results[0].primary
    metrics = [metric for name in first.metrics if not (metric := metric_of(name)).secondary]
    title = (
        f"{run}, {first.split}: {first.counts.text}. {factors_text(metrics)}Mean over seeds; "
        f"standard deviation over seeds (sd). {caveats(results)}"
    )
    table = identity_table(title)
    table.add_column("settings", overflow="fold")
    others = [metric for metric in metrics if metric.name != primary.name]
    headings = ("dim", "seeds", primary.heading, "sd", "interval")
    add_figures(table, *headings, *(metric.heading for metric in others))
    for result in results:
        table.add_row(
            *identity_cells(result, result.head),
            plain(_settings(result.settings)),
            str(result.dim),
            str(len(result.seeds)),
            primary.show(result.main.value),
            primary.show(result.seed_sd[primary.name]),
            range_text(primary, result.main.low, result.main.high) or "–",
            *(metric.show(result.metrics[metric.name].value) for metric in others),
        )
    return table


def _settings(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


def _line_name(row: SweptResult, settings: Mapping[str, Any]) -> str:
    return f"{row.name} {_settings(settings)}".rstrip()


def check_plot(path: Path) -> None:
    """Check, before hours of work, that a picture can be made.

    Raises:
        UserError: no place, another type of file, or nothing to draw with.
    """
    check_output(path, (".png", ".svg"))
    check_matplotlib()


def plot_settings(results: Swept, path: Path) -> None:
    """Draw the primary metric against the first setting that has several numbers (CASE, figure 4).

    A line for each head, prompt and value of the other settings, with the interval over seeds.
    """
    key = _numeric(results)
    if key is None:
        log.info(f"{path} is not drawn: no setting with several numbers was varied")
        return
    metric = results[0].primary
    series: dict[str, list[Point]] = {}
    for row in results:
        value, low, high = (metric.scaled(figure) for figure in astuple(row.main))
        if value is None or key not in row.settings:
            continue
        name = _line_name(row, {k: v for k, v in row.settings.items() if k != key})
        # What was asked for, but no more than there is: sizes are cut to the features'.
        place = row.dim if key == "dim" else row.settings[key]
        bounds = (value, value) if low is None or high is None else (low, high)
        series.setdefault(name, []).append((place, value, *bounds))
    if not series:
        log.info(f"{path} is not drawn: no score is defined")
        return
    places = sorted({point[0] for points in series.values() for point in points})
    log_x = places[0] > 0 and places[-1] / places[0] > 8
    band = "line: mean over seeds; band: 95 % interval over rows and seeds"
    plot_curve(series, path, key.replace("_", " "), _on_axis(metric), log_x, band)


def _on_axis(metric: Metric, where: str = "") -> str:
    factor = "" if metric.factor == 1 else f" x {metric.factor:g}"
    return f"{metric.heading}{where}{factor}"


def _numeric(results: Swept) -> str | None:
    for key in results[0].settings:
        values = {row.settings.get(key) for row in results}
        if len(values) > 1 and all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in values
        ):
            return str(key)
    return None


def plot_steps(results: Swept, path: Path) -> None:
    """Draw the score on dev against steps of training, with the range over seeds (figure 3)."""
    series: dict[str, list[Point]] = {}
    for row in results:
        fits = [fit for fit in row.fits if fit.get("curve")]
        # As far as every seed went.
        for epoch, reached in enumerate(zip(*(fit["curve"] for fit in fits), strict=False)):
            key = f"dev_{row.primary.name}"
            values = [one.get(key, one.get(SCORE)) for one in reached]
            if None not in values:
                steps = (epoch + 1) * fits[0]["steps_per_epoch"]
                figures = (statistics.fmean(values), min(values), max(values))
                mean, low, high = (row.primary.factor * figure for figure in figures)
                line = series.setdefault(_line_name(row, row.settings), [])
                line.append((steps, mean, low, high))
    if not series:
        log.info(
            f"{path} is not drawn: no head of the sweep is trained by steps, or there is no dev"
        )
        return
    band = "line: mean over seeds; band: lowest to highest seed"
    plot_curve(series, path, "steps", _on_axis(results[0].primary, " on dev"), band=band)
