"""Predictors of similarity from a run's features: fitted heads, and zero-shot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from llmcond.data.rows import Rows, leaked_pairs
from llmcond.errors import UserError
from llmcond.evaluation.paired import RESAMPLES
from llmcond.evaluation.results import R, Result, Results, Scored, score
from llmcond.heads import PairArrays
from llmcond.heads.plain import PlainHead
from llmcond.log import log
from llmcond.metrics import DEFAULT, Metric
from llmcond.prompts import Prompt
from llmcond.runs.cross import CrossEncoder
from llmcond.runs.run import AnyRun
from llmcond.runs.saved import Saved, SavedEmbeddingHead, StaleHeadError, zero_shot
from llmcond.runs.task_runs import Run
from llmcond.tasks import DEFAULT_TASK

#: Rows compared at a time.
_BLOCK = 8_192

#: A head of a run of any kind.
AnyPredictor: TypeAlias = Saved[Any]


def zeroshots(run: AnyRun, prompt: Prompt) -> list[Saved[PlainHead]]:
    """Return the heads of zero-shot under a prompt, the one with subtraction last."""
    return [zero_shot(view) for view in run.zero_shot_views(prompt)]


def fitted_heads(run: AnyRun, names: Sequence[str], split: str | None = None) -> list[Saved[Any]]:
    """Return the heads named, or all that fit the run's features; zero-shot comes anyway.

    ``split`` is what they are scored on, of the run's own data: heads that were fitted on dev are
    not scored there.

    Raises:
        UserError: no such head, or one that was named and is not scored there.
    """
    if names:
        found = run.find_heads([name for name in names if name != "none"])
    else:
        found = []
        for name in run.head_names():
            try:
                found.append(run.load_head(name))
            except StaleHeadError as error:
                log.info(f"left out: {error}")
    with_dev = [head.name for head in found if split == "dev" and "dev" in head.trained_on]
    if with_dev and names:
        raise UserError(
            f"the head {with_dev[0]} was fitted on dev, so that it is not scored there. Give "
            "--split test, or leave it out."
        )
    if with_dev:
        log.info(f"left out: {', '.join(with_dev)}, fitted on dev, which is scored here")
    return [head for head in found if not head.head.is_identity and head.name not in with_dev]


def asked_for(
    run: AnyRun, names: Sequence[str], split: str | None = None
) -> tuple[list[Saved[Any]], list[Prompt]]:
    """Return the heads that are scored, and the prompts of which zero-shot is.

    Raises:
        UserError: as :func:`fitted_heads`, or a run without features.
    """
    fitted = fitted_heads(run, names, split)
    prompts = list({p.name: p for head in fitted for p in head.view.prompts}.values())
    if not fitted or not names:
        prompts = list(run.prompts().values())
    if not prompts:
        raise UserError(f"{run.folder} has no extracted features yet. Run `llmcond extract` first.")
    return fitted, prompts


def check_scorable(
    rows: Rows, run: Run, other: bool, predictions: bool = False, heads: Sequence[Saved[Any]] = ()
) -> None:
    """Check that rows have ratings; warn of pairs in ``other`` rows that were trained on.

    That is train, and dev where the run's encoder or one of ``heads`` was trained on it. Where
    predictions are to be written, rows without a rating have their use: a hidden test.

    Raises:
        UserError: no row is rated.
    """
    if not rows.rated.any() and not predictions:
        raise UserError(
            f"none of the {len(rows):,} rows of {rows.file} is rated; there is nothing to score."
        )
    with_dev = any("dev" in own for own in (run.trained_on, *(head.trained_on for head in heads)))
    for split in (("train", "dev") if with_dev else ("train",)) if other else ():
        leaked = leaked_pairs(rows, run.rows(split))
        if leaked:
            log.warning(
                f"{leaked:,} sentence pairs of {rows.file} are in the run's {split} split"
                + (", which was trained on" if split == "dev" else "")
            )


def unscored(
    kind: type[R],
    predictor: AnyPredictor | CrossEncoder,
    split: str,
    task: str = DEFAULT_TASK,
    **about: Any,
) -> R:
    """Return the result of a predictor on a split, without figures; ``about`` is the kind's own."""
    head = predictor.head
    view = None if isinstance(predictor, CrossEncoder) else predictor.view
    return kind(
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


def results_of(
    predictors: Sequence[AnyPredictor | CrossEncoder],
    similarity: Sequence[NDArray[np.float32]],
    rows: Scored,
    split: str,
    metrics: Sequence[Metric] = DEFAULT,
    resamples: int = RESAMPLES,
    task: str = DEFAULT_TASK,
) -> Results[Result]:
    """Return what predictors score, with intervals from the same draws.

    ``similarity`` are (n,) finite predictions of each, of rows that are called ``split``. With 0
    ``resamples`` of the bootstrap there are no intervals.
    """
    described = [unscored(Result, predictor, split, task) for predictor in predictors]
    seeded = [own[None] for own in similarity]
    return Results(tuple(score(described, seeded, rows, metrics, resamples)))


def predict(predictor: SavedEmbeddingHead, pairs: PairArrays) -> NDArray[np.float32]:
    """Return the predicted similarity of each row as the predictor sees it, (n,) float32."""
    blocks = []
    for start in range(0, len(pairs), _BLOCK):
        block = pairs.take(np.arange(len(pairs))[start : start + _BLOCK])
        blocks.append(predictor.head.similarity(block.first, block.second, block.condition))
    return np.concatenate(blocks)
