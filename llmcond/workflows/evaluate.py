"""Score predictions against ratings: fitted heads and zero-shot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.data.datasets import DataOptions
from llmcond.data.queries import QueryRows
from llmcond.data.rows import Rows
from llmcond.errors import UserError
from llmcond.evaluation.conditions import seen_unseen
from llmcond.evaluation.ranked import RankedResults
from llmcond.evaluation.results import Result, Results, best_first
from llmcond.files import check_output, write_csv
from llmcond.log import log
from llmcond.metrics import Metric, choose_metrics, metric_of
from llmcond.prompts import Prompt
from llmcond.prompts.inputs import SplitInputs
from llmcond.report.format import estimate_text, extreme
from llmcond.report.page import check_page, page_of, write_page
from llmcond.runs import AnyRun, Run, SavedHead, open_any_run
from llmcond.runs.cross import CrossEncoder, load_cross_encoder
from llmcond.runs.extraction import extract_others
from llmcond.runs.features import RowFeatures
from llmcond.runs.kind import find_kind
from llmcond.runs.new_sentences import trained_sentences, with_new_sentences
from llmcond.runs.predictors import (
    AnyPredictor,
    asked_for,
    check_scorable,
    predict,
    results_of,
    zeroshots,
)
from llmcond.tasks import OTHERS
from llmcond.workflows.options.ranking import DialogueOptions, RankingOptions, TiesOption
from llmcond.workflows.options.scoring import EvaluateOptions


def evaluate(asked: EvaluateOptions) -> Results[Result]:
    """Score a run's heads, and zero-shot under their prompts.

    Raises:
        UserError: no run, no such head or split, no rated rows.
    """
    run = open_any_run(Path(asked.run), cross=True)
    _check_options(run, asked)
    if asked.predictions is not None:
        sources = [asked.data, run.manifest["data"]["source"]]
        check_output(Path(asked.predictions), (".csv",), sources)
    if asked.report is not None:
        check_page(Path(asked.report))
    return find_kind(run.kind).evaluate(run, asked)


def evaluate_pairs(run: Run, asked: EvaluateOptions) -> Results[Result]:
    """Score a run of rated pairs; see :meth:`llmcond.runs.kind.Kind.evaluate`."""
    data = asked.data_options()
    computed = choose_metrics(run.task.metrics, asked.metric)
    if "dev" in run.trained_on:
        log.info(f"the encoder of {run.folder} was trained on dev as well as on train")
    rows, split = _rows(run, data, asked.split)
    other = data.source is not None
    if run.cross and asked.head:
        raise UserError(
            f"{run.folder} holds a cross-encoder, which is scored by itself. Leave out --head."
        )
    fitted: list[SavedHead] = []
    prompts: list[Prompt] = []
    if not run.cross:
        fitted, prompts = asked_for(run, asked.head, None if other else split)
    check_scorable(rows, run, other, predictions=asked.predictions is not None, heads=fitted)
    predictors: list[AnyPredictor | CrossEncoder]
    if run.cross:
        cross = load_cross_encoder(run.folder, device=asked.device)
        predictors, predicted = [cross], [cross.predict(rows)]
    else:
        store = run.store()
        if other:
            inputs = partial(SplitInputs, [rows])
            store = extract_others(run, prompts, inputs, asked.device)
        compared: list[AnyPredictor]
        compared = [*(one for prompt in prompts for one in zeroshots(run, prompt)), *fitted]
        features = RowFeatures(rows, store)
        predicted = [predict(one, features.pairs(one.view)) for one in compared]
        predictors = [*compared]
    similarity = {one.name: own for one, own in zip(predictors, predicted, strict=True)}
    if asked.predictions is not None:
        _write_predictions(Path(asked.predictions), rows, similarity)
    results = results_of(predictors, predicted, rows, split, computed, task=run.task.name)
    known = trained_sentences(run, fitted, None if other else split)
    seeded = [own[None] for own in predicted]
    results = Results(tuple(with_new_sentences(results, seeded, rows, known, computed)))
    results = _by_condition(results, predictors, predicted, rows, run, computed[0])
    if asked.report is not None:
        settings = {"heads": [one.name for one in predictors if one.is_fitted]}
        _write_page(Path(asked.report), run, rows, results, similarity, rows.file, settings)
    return results


def write_ranks(
    found: RankedResults[Any], run: AnyRun, asked: EvaluateOptions, kind: type[TiesOption]
) -> Results[Any]:
    """Write the files that are asked for of a ranking, each query's ranks and a page.

    Args:
        found: the results with the ranks.
        run: whose heads were scored.
        asked: which files are written.
        kind: options of the run's kind of task, which the page lists.

    Returns:
        The results without the ranks.
    """
    ranks = {one.name: own for one, own in zip(found, found.ranks, strict=True)}
    if asked.predictions is not None:
        numbers = ("row", range(1, len(found.queries) + 1))
        shown = ((name, [f"{rank:g}" for rank in own]) for name, own in ranks.items())
        columns = [numbers, *found.queries.columns.items(), *shown]
        _write_table(Path(asked.predictions), columns, "queries")
    if asked.report is not None:
        source = str(asked.data or run.manifest["data"]["source"])
        settings = {**asdict(asked.part(kind)), "data": asked.data, "heads": list(asked.head)}
        _write_page(Path(asked.report), run, found.queries, found, ranks, source, settings)
    return Results(found.rows)


def _rows(run: Run, data: DataOptions, split: str | None) -> tuple[Rows, str]:
    """Return the rows that are scored, and what split they are."""
    if data.source is not None:
        rows, split = run.task.read_split(data.like(run.read_by), split)
        log.info(f"scoring all {len(rows):,} rows of {rows.file}, as {split}")
        return rows, split
    split = run.scored_split(split)
    return run.rows(split), split


def _check_options(run: AnyRun, asked: EvaluateOptions) -> None:
    """Raise a UserError for options of another kind of task than the run's."""
    data = asked.data_options()
    run.task.refuse_column_options(data)
    if data.source is None and (data.columns or data.scale):
        raise UserError(
            "--columns, --rating-range and --unrated say how the file of --data is read, and "
            "--data was not given. Leave them out, or add --data."
        )
    options = RankingOptions, DialogueOptions
    own = {f.name for one in options if one.of[0] == run.task.kind for f in fields(one)}
    for one in options:
        for item in fields(one):
            if item.name not in own and getattr(asked, item.name) != item.default:
                what = TiesOption.of[1] if item.name == "ties" else one.of[1]
                raise UserError(
                    f"--{item.name.replace('_', '-')} is of {what}, and {run.folder} is a run of "
                    f"the task {run.task.name}. Leave it out."
                )


def ranked_data(run: Any, asked: EvaluateOptions) -> tuple[Any, str, str]:
    """Return the data of a run whose answers are ranked, their split, and what results call it.

    These differ where the data are not the run's own.
    """
    if asked.data is None:
        split = run.scored_split(asked.split)
        return run.data, split, split
    found, split = run.task.with_others(run.data, asked.data_options(), asked.split)
    return found, OTHERS, split


def _by_condition(
    results: Results[Result],
    predictors: Sequence[AnyPredictor | CrossEncoder],
    predicted: Sequence[NDArray[np.float32]],
    rows: Rows,
    run: Run,
    metric: Metric,
) -> Results[Result]:
    """Return results that tell rows apart whose condition training had, and had not."""
    train, rated = run.rows("train"), rows.rated
    known = {train.condition[i] for i in np.flatnonzero(train.rated).tolist()}
    condition = [rows.condition[i] for i in np.flatnonzero(rated).tolist()]
    if not 0 < sum(text in known for text in condition) < len(condition):
        return results
    found = []
    for result, one, similarity in zip(results, predictors, predicted, strict=True):
        parts = {}
        if one.is_fitted:
            scored = similarity[rated]
            rating, pair = rows.rating[rated], rows.pair[rated]
            parts = seen_unseen(known, condition, rating, scored, pair, metric, 0)
            del parts["overall"]
        found.append(replace(result, by_condition=parts))
    return Results(tuple(found))


def _write_page(
    path: Path,
    run: AnyRun,
    examples: Rows | QueryRows,
    results: Results[Any],
    predicted: Mapping[str, NDArray[Any]],
    source: str,
    settings: Mapping[str, Any],
) -> None:
    """Write a page of results; ``source`` is where examples are from."""
    best = best_first(results)
    first = best[0]
    if not first.counts.n:
        raise UserError("there are no ratings to report on; leave out --report.")
    summary = []
    if not np.isnan(first.main.value):
        figures = ", ".join(
            f"{metric_of(name).heading} {estimate_text(metric_of(name), one)}"
            for name, one in first.metrics.items()
            if not metric_of(name).secondary
        )
        summary.append(
            f"{extreme(first.primary)}: {first.name}, {figures}. Whether systems differ by more "
            "than chance is not tested here; compare-prompts tests it for prompts."
        )
    summary.append(
        f"{len(best):,} systems, on {first.counts.text} of {source}. Intervals are 95 %, over "
        f"{first.counts.groups}."
    )
    title = f"Evaluation: {run.encoder_name}"
    page = page_of(run, examples, best, predicted, title=title, summary=summary, settings=settings)
    write_page(page, path)


def _write_predictions(
    path: Path, rows: Rows, similarity: Mapping[str, NDArray[np.float32]]
) -> None:
    rating = ["" if np.isnan(value) else f"{value:g}" for value in rows.rating]
    predicted = ((name, [f"{value:.6f}" for value in own]) for name, own in similarity.items())
    columns = [("row", rows.number), *rows.texts.items(), ("rating", rating), *predicted]
    _write_table(path, columns, "rows")


def _write_table(path: Path, columns: Sequence[tuple[str, Iterable[Any]]], unit: str) -> None:
    """Write columns of as many values each as CSV, complete or not at all."""
    headings, values = zip(*columns, strict=True)
    table = list(zip(*values, strict=True))
    write_csv(path, headings, table)
    log.info(f"predictions for {len(table):,} {unit} -> {path}")
