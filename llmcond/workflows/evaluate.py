"""Scoring the predictions of fitted heads and zero-shot against ratings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.data.formats import ReadOptions
from llmcond.data.readers import IN_MEMORY
from llmcond.data.rows import QueryRows, Rows
from llmcond.errors import UserError
from llmcond.evaluation.results import Results, best_first
from llmcond.files import check_output, write_csv
from llmcond.log import log
from llmcond.metrics import get_metric
from llmcond.report.content import make_page
from llmcond.report.page import check_page, write_page
from llmcond.report.tables import estimate_text, highest_or_lowest
from llmcond.runs import Run, open_any_run
from llmcond.runs.examples import (
    Evaluation,
)
from llmcond.workflows.options.ranking import DialogueOptions, RankingOptions, TiesOption
from llmcond.workflows.options.scoring import EvaluateOptions


def evaluate(options: EvaluateOptions) -> Results:
    """Score a run's heads, and zero-shot under their prompts.

    Raises:
        UserError: there is no such run, head or split, or no rated row.
    """
    run = open_any_run(Path(options.run), cross=True)
    _check_options(run, options)
    if options.predictions is not None:
        sources = [options.data, run.manifest["data"]["source"]]
        check_output(Path(options.predictions), (".csv",), sources)
    if options.report is not None:
        check_page(Path(options.report))
    evaluation = run.kind.evaluate(run, options)
    results: Results = evaluation.results
    _write_files(evaluation, run, options)
    return results


def _write_files(evaluation: Evaluation, run: Run, options: EvaluateOptions) -> None:
    """Write the files that the options name: the predictions or ranks of each example, a page."""
    examples, results = evaluation.examples, evaluation.results
    if examples is None:
        return
    predictions = {
        result.name: values for result, values in zip(results, evaluation.predictions, strict=True)
    }
    is_rows = isinstance(examples, Rows)
    if options.predictions is not None:
        digits = ".6f" if is_rows else "g"
        columns: list[tuple[str, Iterable[Any]]]
        if isinstance(examples, Rows):
            rating = ["" if np.isnan(value) else f"{value:g}" for value in examples.rating]
            columns = [("row", examples.number), *examples.texts.items(), ("rating", rating)]
        else:
            columns = [("row", range(1, len(examples) + 1)), *examples.columns.items()]
        columns += [
            (name, [format(value, digits) for value in values])
            for name, values in predictions.items()
        ]
        _write_table(Path(options.predictions), columns, "rows" if is_rows else "queries")
    if options.report is None:
        return
    if isinstance(examples, Rows):
        source = examples.file
        settings: dict[str, Any] = {"heads": [row.name for row in results if row.seeds]}
    else:
        data = options.data if isinstance(options.data, str | Path | None) else IN_MEMORY
        source = str(run.manifest["data"]["source"] if data is None else data)
        settings = {"data": data, "heads": list(options.head)}
        for option_class in _kind_options(run):
            settings |= asdict(options.select(option_class))
    _write_page(Path(options.report), run, examples, results, predictions, source, settings)


def _kind_options(run: Run) -> list[type[TiesOption]]:
    """Return the classes of options that are for the run's kind of task only."""
    classes = (RankingOptions, DialogueOptions)
    return [option_class for option_class in classes if option_class.task_kind[0] == run.kind.kind]


def _check_options(run: Run, options: EvaluateOptions) -> None:
    """Raise a UserError for options that another kind of task than the run's has."""
    data = options.data_options()
    run.task.check_options(data)
    has_reading = data.reading != ReadOptions() and options.candidates is None
    if data.source is None and (data.columns or data.scale or has_reading):
        raise UserError(
            "--columns, --rating-range, --unrated, --encoding, --delimiter and --skip-empty say "
            "how the file of --data is read, and --data was not given. Leave them out, or add it."
        )
    option_classes = RankingOptions, DialogueOptions
    allowed = {f.name for option_class in _kind_options(run) for f in fields(option_class)}
    for option_class in option_classes:
        for item in fields(option_class):
            if item.name not in allowed and getattr(options, item.name) != item.default:
                purpose = (
                    TiesOption.task_kind[1] if item.name == "ties" else option_class.task_kind[1]
                )
                raise UserError(
                    f"--{item.name.replace('_', '-')} is for {purpose}, but {run.folder} is a run "
                    f"of the task {run.task.name}. Leave it out."
                )


def _write_page(
    path: Path,
    run: Run,
    examples: Rows | QueryRows,
    results: Results,
    predicted: Mapping[str, NDArray[Any]],
    source: str,
    settings: Mapping[str, Any],
) -> None:
    """Write a page of results on examples from ``source``."""
    best = best_first(results)
    first = best[0]
    if not first.counts.n:
        raise UserError("there are no ratings to report on. Leave out --report.")
    summary = []
    if not np.isnan(first.main.value):
        figures = ", ".join(
            f"{get_metric(name).heading} {estimate_text(get_metric(name), estimate)}"
            for name, estimate in first.metrics.items()
            if not get_metric(name).secondary
        )
        untested = (
            " Whether systems differ by more than chance is not tested; llmcond compare tests it."
        )
        summary.append(
            f"{highest_or_lowest(first.primary)}: {first.name}, {figures}."
            f"{untested if len(best) > 1 else ''}"
        )
    systems = "1 system" if len(best) == 1 else f"{len(best):,} systems"
    summary.append(f"{systems}, on {first.counts.text} of {source}.")
    title = f"Evaluation: {run.encoder_name}"
    page = make_page(
        run, examples, best, predicted, title=title, summary=summary, settings=settings
    )
    write_page(page, path)


def _write_table(path: Path, columns: Sequence[tuple[str, Iterable[Any]]], unit: str) -> None:
    """Write columns of equal length as CSV, completely or not at all."""
    headings, values = zip(*columns, strict=True)
    table = list(zip(*values, strict=True))
    write_csv(path, headings, table)
    log.info(f"predictions for {len(table):,} {unit} -> {path}")
