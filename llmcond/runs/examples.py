"""A run's examples and predictors: features as arrays, heads that predict from them, and scores.

Commands that fit or score heads use ``Examples``, so that they need not know whether examples are
rated pairs or queries against candidates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.base.arrays import Array, ConcatenatedMatrix, Matrix
from llmcond.base.errors import UserError
from llmcond.base.metrics import DEFAULT_METRICS, Estimate, Floats, Metric, get_metric
from llmcond.base.output import log
from llmcond.base.package import DEFAULT_RUN
from llmcond.data.rows import QueryRows, Rows, leaked_pairs
from llmcond.evaluation.paired import RESAMPLES
from llmcond.evaluation.results import (
    RankedQueries,
    Ranks,
    Result,
    Results,
    Scored,
    add_subsets,
    score_results,
    score_subset,
)
from llmcond.features.view import FeaturePart, FeatureView, ReadFeatures, recipe_view
from llmcond.heads import PairArrays
from llmcond.heads.numpy_heads import DEV_SCORE_KEY, DevScore, NumpyHead, score_key
from llmcond.prompts import Prompt
from llmcond.prompts.template import render_rows
from llmcond.runs.cross import CrossEncoder
from llmcond.runs.open import open_run
from llmcond.runs.run import Run, RunEmbeddingHead, RunHead, zero_shot_head
from llmcond.tasks import DEFAULT_TASK, OTHER_SPLIT

if TYPE_CHECKING:
    from llmcond.features.store import FeatureStore
    from llmcond.heads.fitted import FittedModule
    from llmcond.heads.numpy_heads import HeldOut, OnEpoch
    from llmcond.heads.recipes import Recipe

# -- features of rows --------------------------------------------------------------------------

Side = Literal["first", "second"]


class RowFeatures:
    """The features of rows, in the stored type. Each kind is read once; equal inputs share it."""

    def __init__(self, rows: Rows, store: FeatureStore) -> None:
        self.rows = rows
        inputs = cache(partial(render_rows, rows))

        @cache
        def column(prompt: Prompt, name: str) -> Matrix:
            return store.lookup(getattr(inputs(prompt), name))

        self._column = column

    def pairs(self, view: FeatureView) -> PairArrays:
        """Return the features of all rows under a view, including unrated rows (NaN)."""
        view.check_sides(self.rows.conditioned)
        first, second = self.rows.conditioned
        return PairArrays(
            first=view.sentence_features(self._reader("first"), conditioned=first),
            second=view.sentence_features(self._reader("second"), conditioned=second),
            rating=self.rows.rating,
            condition=view.condition_features(self._reader("first")),
            pair=self.rows.pair,
        )

    def _reader(self, side: Side) -> ReadFeatures:
        def read(prompt: Prompt, part: FeaturePart) -> Matrix:
            column = side if part == "conditional" else f"{side}_{part}"
            if (
                prompt.subtracts_condition
                and part == "unconditional"
                and all(self.rows.conditioned)
            ):
                # The input is the same for both sentences.
                column = "first_unconditional"
            return self._column(prompt, column)

        return read


class PairFeatures(NamedTuple):
    """The training data of ``llmcond.Head``: ``fit(X, y, pair=pair)``.

    Attributes:
        X: (n, 2 d + n_condition) float32, in the layout that ``Head`` expects.
        y: (n,) ratings from 0 to 1.
        pair: (n,) the number of each row's sentence pair. It can be used as ``groups`` in
            scikit-learn.
        n_condition: The number of last columns that hold the features of conditions; 0 for heads
            without them.

    Examples:
        >>> import llmcond
        >>> data = [
        ...     {"sentence1": f"{n} dogs run.", "sentence2": f"{n} cats run.",
        ...      "condition": condition, "label": label}
        ...     for n in range(20)
        ...     for condition, label in (("the animal", 1), ("the action", 5))
        ... ]
        >>> result = llmcond.extract(model="minilm", data=data, run="pets")
        >>> features = llmcond.load_features("pets")
        >>> features.X.shape, features.y.shape, features.n_condition
        ((28, 768), (28,), 0)
    """

    X: Array
    y: NDArray[np.float64]
    pair: NDArray[np.int64]
    n_condition: int


def load_features(
    run: str | Path = DEFAULT_RUN,
    head: str = "linear",
    *,
    split: str = "train",
    prompt: str | None = None,
    subtract: bool = True,
) -> PairFeatures:
    """Load the features of a run's rated rows as training data for ``llmcond.Head``.

    ``llmcond fit-head`` fits on the same features; it also lets dev choose the epoch.

    Args:
        run: The run's folder.
        head: The recipe of the head. It determines whether features are e(s|c) or e(s), and
            whether the features of conditions are appended.
        split: ``train``, ``dev`` or ``test``.
        prompt: The name of the prompt. The features of several prompts, joined by ``+``, are
            concatenated. None: the run's only prompt.
        subtract: Whether to subtract the unconditional features.

    Returns:
        The features, ratings and sentence pairs of the n rated rows.

    Raises:
        UserError: The run, recipe, split or prompt does not exist, or features are missing.

    Examples:
        >>> import llmcond
        >>> data = [
        ...     {"sentence1": f"{n} dogs run.", "sentence2": f"{n} cats run.",
        ...      "condition": condition, "label": label}
        ...     for n in range(20)
        ...     for condition, label in (("the animal", 1), ("the action", 5))
        ... ]
        >>> result = llmcond.extract(model="minilm", data=data, run="pets")
        >>> llmcond.load_features("pets", split="dev").X.shape
        (6, 768)
    """
    from llmcond.heads import load_recipe

    opened, recipe = open_run(Path(run)), load_recipe(head)
    view = recipe_view(recipe, opened.find_prompts(prompt, recipe.features), subtract)
    rows = opened.rows(split)
    pairs = RowFeatures(rows, opened.store()).pairs(view).take(rows.rated)
    parts = [pairs.first, pairs.second, *([] if pairs.condition is None else [pairs.condition])]
    pair = np.arange(len(pairs)) if pairs.pair is None else pairs.pair
    return PairFeatures(ConcatenatedMatrix(parts).read(), pairs.rating, pair, pairs.dim_condition)


# -- predictors --------------------------------------------------------------------------------

#: The number of rows that are compared at a time.
_BLOCK = 8_192

#: A head of a run of any kind.
AnyPredictor: TypeAlias = RunHead[Any]


def zero_shot_heads(run: Run, prompt: Prompt) -> list[RunHead[NumpyHead]]:
    """Return the zero-shot heads of a prompt, the one with subtraction last."""
    return [zero_shot_head(view) for view in run.zero_shot_views(prompt)]


def load_fitted_heads(
    run: Run, names: Sequence[str], split: str | None = None
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


def resolve_predictors(
    run: Run, names: Sequence[str], split: str | None = None
) -> tuple[list[AnyPredictor], list[Prompt]]:
    """Return the systems to score, zero-shot first, and the prompts of zero-shot.

    Raises:
        UserError: As ``load_fitted_heads``, or the run has no features.
    """
    fitted = load_fitted_heads(run, names, split)
    prompts = list({p.name: p for head in fitted for p in head.view.prompts}.values())
    if not fitted or not names:
        prompts = list(run.prompts().values())
    if not prompts:
        raise UserError(f"{run.folder} has no extracted features yet. Run `llmcond extract` first.")
    return [
        *(zero for prompt in prompts for zero in zero_shot_heads(run, prompt)),
        *fitted,
    ], prompts


def check_scorable(
    rows: Rows,
    run: Run,
    is_other_data: bool,
    predictions: bool = False,
    heads: Sequence[AnyPredictor] = (),
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


def score_ranks(
    results: Sequence[Result],
    ranks: Sequence[Floats],
    queries: RankedQueries,
    metrics: Sequence[Metric],
    masks: Mapping[str, Mapping[str, NDArray[np.bool_]]],
) -> Results:
    """Add the figures on queries, and on subsets of them, to results that have none.

    ``ranks`` holds the ranks of the answers, (n,), for each result, and ``masks`` the queries of
    each subset, (n,), by the kind and the name of the subset. Confidence intervals are by bootstrap
    over the examples of the queries.
    """
    systems = [system_ranks[None] for system_ranks in ranks]
    parts = {
        kind: {name: score_subset(systems, queries, metrics, mask) for name, mask in named.items()}
        for kind, named in masks.items()
    }
    return Results(tuple(add_subsets(score_results(results, systems, queries, metrics), parts)))


def predict(predictor: RunEmbeddingHead, pairs: PairArrays) -> NDArray[np.float32]:
    """Return the predicted similarity of each row, (n,) float32."""
    blocks = []
    for start in range(0, len(pairs), _BLOCK):
        block = pairs.take(np.arange(len(pairs))[start : start + _BLOCK])
        blocks.append(predictor.head.similarity(block.first, block.second, block.condition))
    return np.concatenate(blocks)


# -- examples of any kind of task --------------------------------------------------------------


class Examples(ABC):
    """The examples of a run with their features, which are read once per prompt and split."""

    run: Run
    data: Any
    #: The noun for the examples in messages.
    unit: str

    @abstractmethod
    def dim(self, view: FeatureView) -> int:
        """Return the size of the features of a text that are a head's input."""

    def counts(self) -> Mapping[str, int]:
        """Return the number of examples in each split that fitting uses: ``n_train``, ``n_dev``."""
        splits = self.data.splits
        return {f"n_{name}": len(splits[name]) for name in ("train", "dev") if name in splits}

    @property
    def dev_sample(self) -> str:
        """The dev examples that choose the epoch, such as "1,000 queries"; empty: all."""
        return ""

    @property
    def epoch_score(self) -> str:
        """The name of the score that chooses the epoch, such as "MRR on 1,000 queries"."""
        heading = get_metric(self.run.dev_metric).heading
        return f"{heading} on {self.dev_sample}" if self.dev_sample else heading

    @property
    def epoch_score_key(self) -> str:
        """The key of the score that chooses the epoch in learning curves."""
        return DEV_SCORE_KEY

    @abstractmethod
    def fit(
        self,
        recipe: Recipe,
        view: FeatureView,
        seed: int,
        on_epoch: OnEpoch,
        device: str,
        start: Any = None,
        curve_split: str | None = None,
    ) -> FittedModule:
        """Fit a head on train. Dev chooses the epoch, if the run has it.

        ``start`` is a fitted head of the same family whose parameters are the initial ones. With
        dev, the learning curve also has the score on ``curve_split``, if it is named.
        """

    @abstractmethod
    def score_on_dev(self, head: Any, view: FeatureView) -> float:
        """Return a head's score on dev by the run's ``dev_metric``; NaN if it is undefined."""

    def score_zero_shot_on_dev(self, view: FeatureView) -> tuple[str, float]:
        """Return the name of zero-shot under a view's first prompt, and its score on dev.

        Returns:
            The name, and the score by the run's ``dev_metric``; NaN if it is undefined.
        """
        zero_shot = zero_shot_head(self.run.zero_shot_view(view.prompts[0]))
        return zero_shot.name, self.score_on_dev(zero_shot.head, zero_shot.view)

    def score_held_out(self, held_out: Sequence[HeldOut | None]) -> Mapping[str, Estimate]:
        """Return the scores of held-out predictions of dev, as means over the fits of a system.

        The result has an entry for the run's ``dev_metric``. It is empty if a fit has no such
        predictions, for example because its epoch was not chosen on dev.
        """
        return {}

    @abstractmethod
    def scored_rows(self, split: str) -> Scored:
        """Return the rows or queries of a split that predictions are scored against.

        Raises:
            UserError: The split does not exist, or has nothing to score.
        """

    @abstractmethod
    def rows(self, split: str) -> Rows | QueryRows:
        """Return the examples of a split as text."""

    def keys(self, split: str) -> list[tuple[Any, ...]]:
        """Return what identifies each example of a split, so that runs can be compared.

        Texts that a run may word differently, such as those of entities with ids, are left out.
        """
        rows = self.rows(split)
        if isinstance(rows, Rows):
            ratings = [None if np.isnan(rating) else float(rating) for rating in rows.rating]
            columns: list[Any] = [rows.sentence1, rows.sentence2, rows.condition, ratings]
        else:
            ids = [values for name, values in rows.columns.items() if not name.endswith("_text")]
            columns = ids
        return list(zip(*columns, strict=True))

    def pool_keys(self) -> list[Any]:
        """Return what else determines the ranks of answers: candidates and known answers."""
        return []

    def subsets(
        self, split: str, trained_on: Collection[str] = (), others: Sequence[Run] = ()
    ) -> Mapping[str, NDArray[np.bool_]]:
        """Return masks (n,) of the subsets of a split's examples that are reported separately.

        Args:
            split: split that is scored.
            trained_on: splits that count as training, besides those of the run's encoder.
            others: other runs, whose training counts as well.
        """
        return {}

    @abstractmethod
    def predict(self, predictor: AnyPredictor, split: str) -> NDArray[np.float32]:
        """Return the input of metrics for each example, (n,): its similarity or answer's rank."""

    def add_new_sentences(
        self,
        results: Sequence[Result],
        similarity: Sequence[NDArray[np.floating]],
        split: str,
        metrics: Sequence[Metric],
    ) -> Sequence[Result]:
        """Add the score on examples that share no sentence with train to each result.

        ``similarity`` holds, for each result, the (seeds, n) predictions of a split. Results are
        unchanged if examples are not pairs of sentences.
        """
        return results


class RankedExamples(Examples):
    """Examples whose answers are ranked among candidates: metrics get the rank of each answer."""

    #: Fits a head on ``arrays``.
    fit_head: ClassVar[Callable[..., Any]]

    def __init__(self, run: Run, data: Any = None, store: FeatureStore | None = None) -> None:
        """Prepare the examples; features are read when they are needed.

        Args:
            run: The run.
            data: Other data of its task. None: the run's.
            store: The store with the features of ``data``. None: the run's.
        """
        self.run, self.data, self.unit = run, data or run.data, run.task.unit
        self._store = store or run.store()

    @abstractmethod
    def arrays(self, view: FeatureView) -> Any:
        """Return the features and the training examples that ``fit_head`` takes."""

    @abstractmethod
    def ranks(self, predictor: AnyPredictor, split: str, rows: Any = slice(None)) -> Ranks:
        """Return the ranks of the answers of a split, or of some of its rows."""

    def epoch_rows(self, split: str) -> Any:
        """Return the rows of a split that are scored after each epoch: always the same ones."""
        return slice(None)

    @override
    def fit(
        self,
        recipe: Recipe,
        view: FeatureView,
        seed: int,
        on_epoch: OnEpoch,
        device: str,
        start: Any = None,
        curve_split: str | None = None,
    ) -> Any:
        dev: DevScore[Any] | None = None
        if "dev" in self.data.splits:
            on_dev, on_other = (
                partial(self._score, view, split, self.epoch_rows(split))
                for split in ("dev", curve_split or "dev")
            )
            others = {score_key(curve_split): on_other} if curve_split else {}
            dev = DevScore(get_metric(self.run.dev_metric), on_dev, others)
        return type(self).fit_head(recipe, self.arrays(view), dev, seed, on_epoch, device, start)

    @override
    def score_on_dev(self, head: Any, view: FeatureView) -> float:
        return self._score(view, "dev", slice(None), head) if "dev" in self.data.splits else nan

    def _score(self, view: FeatureView, split: str, rows: Any, head: Any) -> float:
        ranks = self.ranks(RunHead("", head, view, {}), split, rows).resolve_ties()
        queries = self.scored_rows(split)
        return get_metric(self.run.dev_metric)(ranks, queries.rating[rows], queries.pair[rows])

    @override
    def predict(self, predictor: AnyPredictor, split: str) -> NDArray[np.float32]:
        # The rank of each query's answer; ties get their mean rank.
        return self.ranks(predictor, split).resolve_ties().astype(np.float32)


def load_examples(run: Run) -> Examples:
    """Return the examples of a run of any kind of task.

    Raises:
        UserError: Heads are not fitted for the run's task.
    """
    examples: Examples = run.kind.examples(run)
    return examples


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation, with what the files of ``evaluate`` are written from.

    Attributes:
        results: The result of each system.
        predictions: For each result, the similarity of each example or the rank of its answer.
        examples: The examples as text; None: no files can be written.
        store: The store of the features of rated rows; None: There are none.
    """

    results: Results
    predictions: Sequence[NDArray[Any]] = ()
    examples: Rows | QueryRows | None = None
    store: FeatureStore | None = None


def read_ranked_data(run: Run, options: Any) -> tuple[Any, str, str]:
    """Return the data of a run that ranks candidates, the split to score, and the results' split.

    The two splits differ if the ``EvaluateOptions`` name other data than the run's.

    Raises:
        UserError: The data or the split does not exist.
    """
    if options.data is None:
        split = run.scored_split(options.split)
        return run.data, split, split
    task: Any = run.task
    data, split = task.add_external_data(run.data, options.data_options(), options.split)
    return data, OTHER_SPLIT, split
