"""Score predictions against ratings: fitted heads, with zero-shot beside them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.data.datasets import DataOptions, read_rows
from llmcond.data.rows import Rows, leaked_pairs
from llmcond.errors import UserError
from llmcond.files import check_writable, replacing
from llmcond.log import log
from llmcond.metrics import RESAMPLES, Estimate, score
from llmcond.prompts import Prompt
from llmcond.report.page import Page, check_page, write_page
from llmcond.report.terminal import best_first, finite
from llmcond.runs import Run, SavedHead, StaleHeadError, open_run
from llmcond.runs.features import RowFeatures
from llmcond.runs.predictors import Zeroshot, label, predict, zeroshots
from llmcond.workflows.extract import LazyEncoder, extract_rows, extraction_note
from llmcond.workflows.page import page_of


def evaluate(
    run_folder: Path,
    heads: Sequence[str] = (),
    split: str | None = None,
    data: DataOptions = DataOptions(),
    predictions: Path | None = None,
    device: str = "auto",
    report: Path | None = None,
) -> list[dict[str, Any]]:
    """Score a run's heads, with the zero-shot rows of their prompts beside them.

    Args:
        run_folder: a run with extracted features.
        heads: names of fitted heads or recipes; none is every head. ``none`` is zero-shot only.
        split: ``train``, ``dev`` or ``test``; None: test if the run has one, else dev.
        data: other rows to score, extracted into the run's store; all rows of a single file.
        predictions: a .csv file for each row's predicted similarities.
        device: for extracting other rows.
        report: a page to write, .html.

    Returns:
        A result for each way of predicting.

    Raises:
        UserError: no run, no such head or split, no rated rows.
    """
    run = open_run(run_folder)
    if predictions is not None:
        check_writable(predictions)
    if report is not None:
        check_page(report)
    fitted = heads_to_score(run, heads)
    prompts = list({p.name: p for head in fitted for p in head.view.prompts}.values())
    if not fitted or not heads:
        prompts = list(run.prompts().values())
    if not prompts:
        raise UserError(f"{run_folder} has no extracted features yet. Run `llmcond extract` first.")
    if data.source is None:
        if data.columns or data.scale:
            raise UserError("columns and rating range belong to --data, which was not given.")
        split = split or run.default_split()
        rows = run.rows(split)
        check_scorable(rows, run, other=False, predictions=predictions is not None)
        features = RowFeatures(rows, run.store())
    else:
        columns, scale = data.columns or run.columns, data.scale or run.scale
        rows, split = read_rows(data.source, split, columns, scale)
        check_scorable(rows, run, other=True, predictions=predictions is not None)
        log.info(f"scoring all {len(rows):,} rows of {rows.file}, as {split}")
        features = _features_of(run, prompts, rows, device)
    ways: list[SavedHead | Zeroshot] = [way for prompt in prompts for way in zeroshots(prompt)]
    ways += fitted
    similarity = {label(way): predict(way, features.pairs(way.view)) for way in ways}
    if predictions is not None:
        _write_predictions(predictions, rows, similarity)
        log.info(f"predictions for {len(rows):,} rows -> {predictions}")
    results = [result_of(way, similarity[label(way)], rows, split) for way in ways]
    if report is not None:
        write_page(_page(run, rows, results, similarity, fitted), report)
        log.info(f"report -> {report}")
    return results


def _page(
    run: Run,
    rows: Rows,
    results: Sequence[Mapping[str, Any]],
    similarity: Mapping[str, NDArray[np.float32]],
    fitted: Sequence[SavedHead],
) -> Page:
    first = results[0]
    if first["n"] == 0:
        raise UserError("there are no ratings to report on; leave out --report.")
    best = best_first(results)
    summary = [
        f"{len(results):,} ways of predicting, on {first['n']:,} rated rows of "
        f"{first['n_pairs']:,} sentence pairs of {rows.file}."
    ]
    if best[0]["spearman"] is not None:
        low, high = (100 * end for end in best[0]["spearman_ci"])
        summary.append(
            f"Best: {best[0]['name']}, Spearman {100 * best[0]['spearman']:.1f} [{low:.1f}, "
            f"{high:.1f}], accuracy {100 * (best[0]['accuracy'] or 0):.1f}. Intervals are 95 %, "
            "over sentence pairs; to tell whether two ways differ, use compare-prompts."
        )
    return page_of(
        run,
        rows,
        best,
        similarity,
        {head.name: [head.head.fit.record.get("curve") or []] for head in fitted},
        title=f"Evaluation: {run.encoder_name}",
        summary=summary,
        settings={"heads": [head.name for head in fitted]},
    )


def _features_of(run: Run, prompts: Sequence[Prompt], rows: Rows, device: str) -> RowFeatures:
    store = run.store()
    encoder = LazyEncoder(run.resolve_encoder(device))
    for prompt in prompts:
        done = extract_rows(store, encoder, prompt, [rows])
        log.info(extraction_note(prompt.name, done, run.identity.max_length))
    return RowFeatures(rows, store)


def heads_to_score(run: Run, names: Sequence[str]) -> list[SavedHead]:
    """Return the heads named, or all that fit the run's features; zero-shot rows come anyway."""
    if names:
        wanted = [name for name in names if name != "none"]
        found = run.find_heads(wanted) if wanted else []
    else:
        found = []
        for name in run.head_names():
            try:
                found.append(run.load_head(name))
            except StaleHeadError as error:
                log.info(f"left out: {error}")
    return [head for head in found if not head.head.is_identity]


def check_scorable(rows: Rows, run: Run, other: bool, predictions: bool = False) -> None:
    """Refuse rows without a rating; warn of pairs in ``other`` rows that the run trained on.

    Where predictions are to be written, rows without a rating have their use: a hidden test.
    """
    if not rows.rated.any() and not predictions:
        raise UserError(
            f"none of the {len(rows):,} rows of {rows.file} is rated; there is nothing to score."
        )
    leaked = leaked_pairs(rows, run.rows("train")) if other else 0
    if leaked:
        log.warning(f"{leaked:,} sentence pairs of {rows.file} are in the run's train split")


def result_of(
    way: SavedHead | Zeroshot,
    similarity: NDArray[np.float32],
    rows: Rows,
    split: str,
    resamples: int = RESAMPLES,
) -> dict[str, Any]:
    """Return one row of results: what predicted, on what, and how well.

    Args:
        way: a head, or none.
        similarity: (n,) predicted.
        rows: the rows.
        split: their name.
        resamples: of the bootstrap; 0: no intervals.
    """
    head = way.head if isinstance(way, SavedHead) else None
    return {
        "name": label(way),
        "head": way.recipe if isinstance(way, SavedHead) else "none",
        "prompt": way.view.name,
        "subtract": way.view.subtracts,
        "split": split,
        **_scores(similarity, rows, resamples),
        "dim": head.dim_out if head else None,
        "seed": head.seed if head else None,
        "selected_on": head.fit.record.get("selected_on") if head else None,
    }


def _scores(similarity: NDArray[np.float32], rows: Rows, resamples: int) -> dict[str, Any]:
    rated = rows.rated
    if not rated.any():
        nothing = dict.fromkeys(("spearman", "pearson", "accuracy"))
        intervals = {f"{name}_ci": [None, None] for name in nothing}
        counts = {"n": 0, "n_dropped": len(rows), "n_pairs": 0, "n_compared": 0, "n_tied": 0}
        return {**counts, **nothing, **intervals}
    scores = score(similarity[rated], rows.rating[rated], rows.pair[rated], resamples=resamples)
    return {
        "n": scores.n,
        "n_dropped": int((~rated).sum()),
        "n_pairs": scores.n_pairs,
        **_estimate("spearman", scores.spearman),
        **_estimate("pearson", scores.pearson),
        **_estimate("accuracy", scores.accuracy),
        "n_compared": scores.n_compared,
        "n_tied": scores.n_tied,
    }


def _estimate(name: str, estimate: Estimate) -> dict[str, Any]:
    interval = [finite(estimate.low), finite(estimate.high)]
    return {name: finite(estimate.value), f"{name}_ci": interval}


def _write_predictions(
    path: Path, rows: Rows, similarity: Mapping[str, NDArray[np.float32]]
) -> None:
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["row", "sentence1", "sentence2", "condition", "rating", *similarity])
        for i in range(len(rows)):
            rating = "" if np.isnan(rows.rating[i]) else f"{rows.rating[i]:g}"
            texts = [rows.sentence1[i], rows.sentence2[i], rows.condition[i]]
            predicted = [f"{column[i]:.6f}" for column in similarity.values()]
            writer.writerow([rows.number[i], *texts, rating, *predicted])
