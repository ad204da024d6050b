"""Scoring the predictions of fitted heads and zero-shot against ratings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.data.datasets import DataOptions
from llmcond.data.formats import ReadOptions
from llmcond.data.readers import IN_MEMORY
from llmcond.data.rows import QueryRows, Rows
from llmcond.errors import UserError
from llmcond.evaluation.analyses import seen_unseen
from llmcond.evaluation.results import RankedResults, Result, Results, best_first
from llmcond.files import check_output, write_csv
from llmcond.log import log
from llmcond.metrics import Estimate, Metric, choose_metrics, get_metric
from llmcond.prompts import Prompt
from llmcond.prompts.inputs import SplitInputs
from llmcond.report.page import check_page, make_page, write_page
from llmcond.report.tables import estimate_text, highest_or_lowest
from llmcond.runs import AnyRun, Run, RunFittedHead, open_any_run
from llmcond.runs.cross import CrossEncoder, load_cross_encoder
from llmcond.runs.extraction import extract_other_data
from llmcond.runs.features import RowFeatures
from llmcond.runs.kind import find_kind
from llmcond.runs.new_sentences import add_new_sentences, collect_training_sentences
from llmcond.runs.predictors import (
    AnyPredictor,
    check_scorable,
    predict,
    resolve_heads_and_prompts,
    score_predictors,
    zero_shot_heads,
)
from llmcond.tasks import OTHER_SPLIT
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
    return find_kind(run.kind).evaluate(run, options)


def evaluate_pairs(run: Run, options: EvaluateOptions) -> Results:
    """Score a run of rated pairs; see ``llmcond.runs.kind.Kind.evaluate``."""
    data = options.data_options()
    metrics = choose_metrics(run.task.metrics, options.metric)
    if "dev" in run.trained_on:
        log.info(f"the encoder of {run.folder} was trained on dev as well as on train")
    rows, split = _choose_rows(run, data, options.split)
    has_other_data = data.source is not None
    if run.cross and options.head:
        raise UserError(
            f"{run.folder} holds a cross-encoder, which has no separate heads. Leave out --head."
        )
    fitted: list[RunFittedHead] = []
    prompts: list[Prompt] = []
    if not run.cross:
        fitted, prompts = resolve_heads_and_prompts(
            run, options.head, None if has_other_data else split
        )
    check_scorable(
        rows, run, has_other_data, predictions=options.predictions is not None, heads=fitted
    )
    predictors: list[AnyPredictor | CrossEncoder]
    if run.cross:
        cross = load_cross_encoder(run.folder, device=options.device)
        predictors, predictions = [cross], [cross.predict(rows)]
    else:
        store = run.store()
        if has_other_data:
            inputs = partial(SplitInputs, [rows])
            store = extract_other_data(run, prompts, inputs, options.device)
        compared: list[AnyPredictor]
        compared = [
            *(predictor for prompt in prompts for predictor in zero_shot_heads(run, prompt)),
            *fitted,
        ]
        features = RowFeatures(rows, store)
        predictions = [predict(predictor, features.pairs(predictor.view)) for predictor in compared]
        predictors = [*compared]
    similarity = {
        predictor.name: values for predictor, values in zip(predictors, predictions, strict=True)
    }
    if options.predictions is not None:
        _write_predictions(Path(options.predictions), rows, similarity)
    results = score_predictors(predictors, predictions, rows, split, metrics, task=run.task.name)
    known_sentences = collect_training_sentences(run, fitted, None if has_other_data else split)
    single_seed = [values[None] for values in predictions]
    results = Results(
        tuple(add_new_sentences(results, single_seed, rows, known_sentences, metrics))
    )
    if not has_other_data and split == "dev":
        results = Results(tuple(map(_add_held_out, results, predictors)))
    results = _add_condition_scores(results, predictors, predictions, rows, run, metrics[0])
    if options.report is not None:
        settings = {"heads": [predictor.name for predictor in predictors if predictor.is_fitted]}
        _write_page(Path(options.report), run, rows, results, similarity, rows.file, settings)
    return results


def write_ranks(
    results: RankedResults, run: AnyRun, options: EvaluateOptions, kind: type[TiesOption]
) -> Results:
    """Write the files that the options name: the ranks of each query, and a page.

    Args:
        results: the results with the ranks.
        run: the run whose heads were scored.
        options: the options, which name the files.
        kind: the class of options for the run's kind of task, which the page lists.

    Returns:
        The results without the ranks.
    """
    ranks = {
        result.name: query_ranks for result, query_ranks in zip(results, results.ranks, strict=True)
    }
    if options.predictions is not None:
        row_numbers = ("row", range(1, len(results.queries) + 1))
        rank_columns = (
            (name, [f"{rank:g}" for rank in query_ranks]) for name, query_ranks in ranks.items()
        )
        columns = [row_numbers, *results.queries.columns.items(), *rank_columns]
        _write_table(Path(options.predictions), columns, "queries")
    if options.report is not None:
        data = options.data if isinstance(options.data, str | Path | None) else IN_MEMORY
        source = str(run.manifest["data"]["source"] if data is None else data)
        settings = {
            **asdict(options.select(kind)),
            "data": data,
            "heads": list(options.head),
        }
        _write_page(Path(options.report), run, results.queries, results, ranks, source, settings)
    return Results(results.rows)


def _choose_rows(run: Run, options: DataOptions, split: str | None) -> tuple[Rows, str]:
    """Return the rows to score, and the name of their split."""
    if options.source is not None:
        rows, split = run.task.read_split(options.with_defaults(run.data_options), split)
        log.info(f"scoring all {len(rows):,} rows of {rows.file}, as {split}")
        return rows, split
    split = run.scored_split(split)
    return run.rows(split), split


def _check_options(run: AnyRun, options: EvaluateOptions) -> None:
    """Raise a UserError for options that another kind of task than the run's has."""
    data = options.data_options()
    run.task.reject_column_options(data)
    has_reading = data.reading != ReadOptions() and options.candidates is None
    if data.source is None and (data.columns or data.scale or has_reading):
        raise UserError(
            "--columns, --rating-range, --unrated, --encoding, --delimiter and --skip-empty say "
            "how the file of --data is read, and --data was not given. Leave them out, or add it."
        )
    option_classes = RankingOptions, DialogueOptions
    allowed = {
        f.name
        for option_class in option_classes
        if option_class.task_kind[0] == run.task.kind
        for f in fields(option_class)
    }
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


def read_ranked_data(run: Any, options: EvaluateOptions) -> tuple[Any, str, str]:
    """Return the data of a run that ranks candidates, the split to score, and the results' split.

    The two splits differ if the options name other data than the run's.
    """
    if options.data is None:
        split = run.scored_split(options.split)
        return run.data, split, split
    data, split = run.task.add_external_data(run.data, options.data_options(), options.split)
    return data, OTHER_SPLIT, split


def _add_held_out(result: Result, predictor: AnyPredictor | CrossEncoder) -> Result:
    """Add the held-out score on dev that the fit recorded, if dev chose the epoch."""
    record = {} if isinstance(predictor, CrossEncoder) else predictor.record.get("held_out", {})
    name = result.primary.name
    if name not in record:
        return result
    return replace(result, held_out=Estimate.from_json(record[name], record[f"{name}_ci"]))


def _add_condition_scores(
    results: Results,
    predictors: Sequence[AnyPredictor | CrossEncoder],
    predicted: Sequence[NDArray[np.float32]],
    rows: Rows,
    run: Run,
    metric: Metric,
) -> Results:
    """Add the scores on rows with seen and with unseen conditions to results."""
    train, rated = run.rows("train"), rows.rated
    known_conditions = {train.condition[i] for i in np.flatnonzero(train.rated).tolist()}
    condition = [rows.condition[i] for i in np.flatnonzero(rated).tolist()]
    if not 0 < sum(text in known_conditions for text in condition) < len(condition):
        return results
    new_results = []
    for result, predictor, similarity in zip(results, predictors, predicted, strict=True):
        if predictor.is_fitted:
            scored = similarity[rated]
            rating, pair = rows.rating[rated], rows.pair[rated]
            parts = seen_unseen(known_conditions, condition, rating, scored, pair, metric, 0)
            del parts["overall"]
            subsets = {"conditions": parts, **result.subsets}
            new_results.append(replace(result, subsets=subsets))
        else:
            new_results.append(result)
    return Results(tuple(new_results))


def _write_page(
    path: Path,
    run: AnyRun,
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


def _write_predictions(
    path: Path, rows: Rows, similarity: Mapping[str, NDArray[np.float32]]
) -> None:
    rating = ["" if np.isnan(value) else f"{value:g}" for value in rows.rating]
    predicted = (
        (name, [f"{value:.6f}" for value in similarities])
        for name, similarities in similarity.items()
    )
    columns = [("row", rows.number), *rows.texts.items(), ("rating", rating), *predicted]
    _write_table(path, columns, "rows")


def _write_table(path: Path, columns: Sequence[tuple[str, Iterable[Any]]], unit: str) -> None:
    """Write columns of equal length as CSV, completely or not at all."""
    headings, values = zip(*columns, strict=True)
    table = list(zip(*values, strict=True))
    write_csv(path, headings, table)
    log.info(f"predictions for {len(table):,} {unit} -> {path}")
