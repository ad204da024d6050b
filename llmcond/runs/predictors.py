"""Predictors of similarity from a run's features: fitted heads, and zero-shot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmcond.data.rows import Rows, leaked_pairs
from llmcond.errors import UserError
from llmcond.evaluation.paired import RESAMPLES
from llmcond.evaluation.results import Result, Results, Scored, score_results
from llmcond.heads import PairArrays
from llmcond.heads.numpy_heads import NumpyHead
from llmcond.log import log
from llmcond.metrics import DEFAULT_METRICS, Metric
from llmcond.prompts import Prompt
from llmcond.runs.cross import CrossEncoder
from llmcond.runs.run import AnyRun
from llmcond.runs.run_heads import RunEmbeddingHead, RunHead, zero_shot_head
from llmcond.runs.task_runs import Run
from llmcond.tasks import DEFAULT_TASK

#: The number of rows that are compared at a time.
_BLOCK = 8_192

#: A head of a run of any kind.
AnyPredictor: TypeAlias = RunHead[Any]


def zero_shot_heads(run: AnyRun, prompt: Prompt) -> list[RunHead[NumpyHead]]:
    """Return the zero-shot heads of a prompt, the one with subtraction last."""
    return [zero_shot_head(view) for view in run.zero_shot_views(prompt)]


def load_fitted_heads(
    run: AnyRun, names: Sequence[str], split: str | None = None
) -> list[RunHead[Any]]:
    """Load the named heads, or all heads that match the run's features. Zero-shot is left out.

    ``split`` is the split of the run's data that they are scored on. Heads that were fitted on dev
    are not scored on dev.

    Raises:
        UserError: A head does not exist, or a named head was fitted on ``split``.
    """
    if names:
        heads = run.find_heads([name for name in names if name != "none"])
    else:
        heads = []
        for name in run.head_names():
            try:
                heads.append(run.load_head(name))
            except UserError as error:  # The head is stale, or its plug-in cannot be loaded.
                log.info(f"left out: {error}")
    with_dev = [head.name for head in heads if split == "dev" and "dev" in head.trained_on]
    if with_dev and names:
        raise UserError(
            f"the head {with_dev[0]} was fitted on dev, so it cannot be scored on dev. Give "
            "--split test, or leave out this head."
        )
    if with_dev:
        log.info(
            f"left out: {', '.join(with_dev)}, because dev is scored and they were fitted on it"
        )
    return [head for head in heads if not head.head.is_identity and head.name not in with_dev]


def resolve_heads_and_prompts(
    run: AnyRun, names: Sequence[str], split: str | None = None
) -> tuple[list[RunHead[Any]], list[Prompt]]:
    """Return the fitted heads to score, and the prompts to score zero-shot with.

    Raises:
        UserError: As ``load_fitted_heads``, or the run has no features.
    """
    fitted = load_fitted_heads(run, names, split)
    prompts = list({p.name: p for head in fitted for p in head.view.prompts}.values())
    if not fitted or not names:
        prompts = list(run.prompts().values())
    if not prompts:
        raise UserError(f"{run.folder} has no extracted features yet. Run `llmcond extract` first.")
    return fitted, prompts


def check_scorable(
    rows: Rows,
    run: Run,
    is_other_data: bool,
    predictions: bool = False,
    heads: Sequence[RunHead[Any]] = (),
) -> None:
    """Check that rows have ratings, and warn of sentence pairs that were trained on.

    The warning is for other data than the run's (``is_other_data``). It covers the run's train
    split, and dev if the run's encoder or one of ``heads`` was trained on it. Unrated rows are
    accepted if ``predictions`` are written, for example for a hidden test set.

    Raises:
        UserError: No row is rated.
    """
    if not rows.rated.any() and not predictions:
        raise UserError(
            f"none of the {len(rows):,} rows of {rows.file} is rated, so there is nothing to score."
        )
    with_dev = any(
        "dev" in splits for splits in (run.trained_on, *(head.trained_on for head in heads))
    )
    for split in (("train", "dev") if with_dev else ("train",)) if is_other_data else ():
        leaked = leaked_pairs(rows, run.rows(split))
        if leaked:
            log.warning(
                f"{leaked:,} sentence pairs of {rows.file} are in the run's {split} split"
                + (", which was trained on" if split == "dev" else "")
            )


def result_without_metrics(
    predictor: AnyPredictor | CrossEncoder,
    split: str,
    task: str = DEFAULT_TASK,
    **about: Any,
) -> Result:
    """Return the result of a predictor on a split without figures; ``about`` are further fields."""
    head = predictor.head
    view = None if isinstance(predictor, CrossEncoder) else predictor.view
    return Result(
        name=predictor.name,
        head=predictor.recipe,
        prompts=tuple(prompt.name for prompt in view.prompts) if view else (),
        subtract=view is not None and view.subtracts,
        split=split,
        task=task,
        dim=(head.dim_out or None) if view else None,
        seeds=(head.seed,) if predictor.is_fitted else (),
        fits=(head.fit.record,) if predictor.is_fitted else (),
        **about,
    )


def score_predictors(
    predictors: Sequence[AnyPredictor | CrossEncoder],
    similarity: Sequence[NDArray[np.float32]],
    rows: Scored,
    split: str,
    metrics: Sequence[Metric] = DEFAULT_METRICS,
    resamples: int = RESAMPLES,
    task: str = DEFAULT_TASK,
) -> Results:
    """Score predictors, with confidence intervals from the same bootstrap samples.

    ``similarity`` holds the finite predictions, (n,), of each predictor for the rows. ``split`` is
    the name of the rows in results. With ``resamples=0`` there are no intervals.
    """
    described = [result_without_metrics(predictor, split, task) for predictor in predictors]
    seeded = [predictions[None] for predictions in similarity]
    return Results(tuple(score_results(described, seeded, rows, metrics, resamples)))


def predict(predictor: RunEmbeddingHead, pairs: PairArrays) -> NDArray[np.float32]:
    """Return the predicted similarity of each row, (n,) float32."""
    blocks = []
    for start in range(0, len(pairs), _BLOCK):
        block = pairs.take(np.arange(len(pairs))[start : start + _BLOCK])
        blocks.append(predictor.head.similarity(block.first, block.second, block.condition))
    return np.concatenate(blocks)
