"""A sweep as a table and as pictures (CASE, figures 3 and 4)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from llmcond.errors import UserError
from llmcond.files import check_writable
from llmcond.log import log
from llmcond.report.figures import plot_curve
from llmcond.report.terminal import hundred

Results = Sequence[Mapping[str, Any]]
#: x, a score, and both ends of its interval.
_Point = tuple[float, float, float, float]


def sweep_table(results: Results, run: object) -> Table:
    """Return a sweep's results, a row for each combination; figures are times 100."""
    first = results[0]
    title = (
        f"{run}, {first['split']}: {first['n']:,} rows. Mean over seeds, times 100; deviation, and "
        "95 % interval of the mean."
    )
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("head", "prompt", "settings"):
        table.add_column(heading, overflow="fold")
    for heading in ("dim", "seeds", "Spearman", "deviation", "interval", "accuracy"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in results:
        low, high = row["spearman_ci"]
        table.add_row(
            Text(str(row["head"])),
            Text(str(row["prompt"]) + (" +c" if str(row["name"]).endswith("+c") else "")),
            Text(_settings(row["settings"])),
            str(row["dim"]),
            str(len(row["seeds"])),
            hundred(row["spearman"]),
            hundred(row["spearman_sd"]),
            "–" if low is None else f"{hundred(low)} to {hundred(high)}",
            hundred(row["accuracy"]),
        )
    return table


def _settings(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())


def check_plot(path: Path) -> None:
    """Refuse, before hours of work, a picture that could not be made.

    Raises:
        UserError: no place, another type of file, or nothing to draw with.
    """
    if path.suffix.lower() not in (".png", ".svg"):
        raise UserError(f"{path} ends in {path.suffix or 'nothing'}; name a .png or .svg file.")
    if find_spec("matplotlib") is None:
        raise UserError("pictures need matplotlib: pip install 'llmcond[plots]'.")
    check_writable(path)


def plot_settings(results: Results, path: Path) -> None:
    """Draw Spearman against the first setting that has several numbers (CASE, figure 4).

    A line for each head, prompt and value of the other settings, with the interval over seeds.
    """
    key = _numeric(results)
    if key is None:
        log.info(f"{path} is not drawn: no setting with several numbers was varied")
        return
    series: dict[str, list[_Point]] = {}
    for row in results:
        if row["spearman"] is None or key not in row["settings"]:
            continue
        rest = {name: value for name, value in row["settings"].items() if name != key}
        name = " ".join(filter(None, (str(row["name"]), _settings(rest))))
        # What was asked for, but no more than there is: sizes are cut to the features'.
        place = row["dim"] if key == "dim" else row["settings"][key]
        low, high = (None if bound is None else 100 * bound for bound in row["spearman_ci"])
        value = 100 * row["spearman"]
        bounds = (value, value) if low is None or high is None else (low, high)
        series.setdefault(name, []).append((place, value, *bounds))
    if not series:
        log.info(f"{path} is not drawn: no score is defined")
        return
    places = sorted({point[0] for points in series.values() for point in points})
    log_x = places[0] > 0 and places[-1] / places[0] > 8
    _draw(series, path, key.replace("_", " "), "Spearman x 100", log_x)


def _numeric(results: Results) -> str | None:
    for key in results[0]["settings"]:
        values = {row["settings"].get(key) for row in results}
        if len(values) > 1 and all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in values
        ):
            return str(key)
    return None


def plot_steps(results: Results, path: Path) -> None:
    """Draw Spearman on dev against steps of training, with the range over seeds (figure 3)."""
    series: dict[str, list[_Point]] = {}
    for row in results:
        curves = [curve for curve in row["curves"] if curve]
        if not curves:
            continue
        points = []
        # As far as every seed went.
        for epoch in range(min(len(curve) for curve in curves)):
            values = [curve[epoch]["dev_spearman"] for curve in curves]
            if None not in values:
                steps = (epoch + 1) * row["steps_per_epoch"]
                mean, low, high = statistics.fmean(values), min(values), max(values)
                points.append((steps, 100 * mean, 100 * low, 100 * high))
        if points:
            name = " ".join(filter(None, (str(row["name"]), _settings(row["settings"]))))
            series[name] = points
    if not series:
        log.info(
            f"{path} is not drawn: no head of the sweep is trained by steps, or there is no dev"
        )
        return
    _draw(series, path, "steps", "Spearman on dev x 100", log_x=False)


def _draw(
    series: Mapping[str, Sequence[_Point]], path: Path, xlabel: str, ylabel: str, log_x: bool
) -> None:
    columns = {name: np.array(sorted(set(points))).T for name, points in series.items()}
    lines = {name: (x, y, low, high) for name, (x, y, low, high) in columns.items()}
    plot_curve(lines, path, xlabel, ylabel, log_x=log_x)
    log.info(f"picture -> {path}")
