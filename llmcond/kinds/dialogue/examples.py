"""The examples of a dialogue run: heads map utterances to roles and rank next turns."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.arrays import Array, ConcatenatedMatrix, Matrix, MatrixLike, Positions, as_matrix
from llmcond.data.rows import QueryRows
from llmcond.errors import format_count
from llmcond.evaluation.results import RankedQueries
from llmcond.features.store import FeatureStore
from llmcond.features.view import FeatureView
from llmcond.heads import Recipe, load_recipe
from llmcond.heads.pairs import DevScore, OnEpoch, score_key
from llmcond.kinds.dialogue.data import Dialogues
from llmcond.kinds.dialogue.heads import FittedRoleHead, TurnArrays, fit_turns
from llmcond.kinds.dialogue.queries import (
    NextQueries,
    next_queries,
    query_rows,
    rank_next,
    stack_queries,
)
from llmcond.kinds.dialogue.task import UtteranceInputs
from llmcond.kinds.dialogue.turns import plan_scores, turn_scores
from llmcond.metrics import get_metric
from llmcond.runs.examples import AnyPredictor, Examples
from llmcond.runs.run import Run


def resolve_head(predictor: AnyPredictor, dim: int) -> FittedRoleHead:
    """Return a predictor's head; for zero-shot, a head with the features (n, dim) in all roles."""
    if predictor.is_fitted:
        head: FittedRoleHead = predictor.head
        return head
    recipe = load_recipe("none", "dialogue")
    module: Any = recipe.family(recipe.settings, dim)
    return FittedRoleHead(recipe.kind, recipe.family, module.freeze(), 0)


class UtteranceRoles:
    """Some utterances in their roles, with scores of contexts and candidates.

    Contexts, candidates and goals are given by their positions among all texts.

    Attributes:
        head: head that maps the utterances; its ``score`` compares them.
    """

    def __init__(self, head: FittedRoleHead, features: MatrixLike, indices: Positions) -> None:
        """Map utterances to their roles.

        Args:
            head: head that maps them.
            features: features of all texts, (n, d).
            indices: distinct positions of the utterances, (u,).
        """
        self.head = head
        used_features = as_matrix(features).take(indices)
        self._b1, self._b2 = head.before(used_features)
        self._after = head.after(used_features)
        self._row_of = np.full(len(features), -1)
        self._row_of[indices] = np.arange(len(indices))

    def with_score(self, score: str) -> UtteranceRoles:
        """Return a copy that compares the same vectors by another score."""
        roles = copy.copy(self)
        roles.head = self.head.with_score(score)
        return roles

    def before(self, contexts: Positions) -> tuple[Array, Array]:
        """Return the roles before-1 and before-2 of contexts (n, h), each (n, h, k)."""
        rows = self._row_of[contexts]
        return self._b1[rows], self._b2[rows]

    def after(self, candidates: Positions) -> Array:
        """Return the role after of candidates (c,), (c, k)."""
        vectors: Array = self._after[self._row_of[candidates]]
        return vectors

    def scores(self, contexts: Positions, candidates: Positions) -> Array:
        """Return the scores (n, c) of candidates (c,) as the next turns of contexts (n, h)."""
        head, after = self.head, self.after(candidates)
        return turn_scores(*self.before(contexts), after, head.score, head.weights)

    def score_next_turns(
        self, contexts: Positions, candidates: Positions, goals: Positions
    ) -> Array:
        """Return the scores (n, c) of candidates (n, c) as next turns; goals are ignored."""
        distinct = np.unique(candidates)
        scores = self.scores(contexts, distinct)
        return np.take_along_axis(scores, np.searchsorted(distinct, candidates), axis=1)

    def score_plans(self, contexts: Positions, candidates: Positions, goals: Positions) -> Array:
        """Score how likely candidates (n, c) are to lead from contexts (n, h) to goals (n,)."""
        _, before = self.before(candidates)
        return plan_scores(self.before(contexts)[0], before, self.after(goals))

    def score_steps(self, contexts: Positions, candidates: Positions, goals: Positions) -> Array:
        """Score how likely candidates (n, c) alone lead to goals (n,); contexts are ignored."""
        _, before = self.before(candidates)
        return plan_scores(before[:, :0], before, self.after(goals))


class DialogueExamples(Examples):
    """The dialogues of a run, with the features of their utterances.

    Attributes:
        texts: the distinct utterances of the data, followed by additional texts.
    """

    run: Run
    data: Dialogues

    def __init__(
        self,
        run: Run,
        data: Dialogues | None = None,
        extra_texts: Sequence[str] = (),
        store: FeatureStore | None = None,
    ) -> None:
        """Prepare the examples; features are read when they are needed.

        Args:
            run: run with the dialogues.
            data: other dialogues; by default the run's.
            extra_texts: additional texts that are ranked.
            store: store with the features of ``data`` and ``extra_texts``; by default the run's.
        """
        self.run, self.data, self.unit = run, data or run.data, run.task.unit
        self.texts = [*self.data.texts, *extra_texts]
        self._store = store or run.store()
        self._feature_cache: dict[tuple[str, ...], Matrix] = {}
        self._query_cache: dict[str, Sequence[NextQueries]] = {}

    def features(self, view: FeatureView) -> Matrix:
        """Return the features of all texts, (n, d)."""
        key = tuple(prompt.digest for prompt in view.prompts)
        if key not in self._feature_cache:
            columns = [
                self._store.lookup(UtteranceInputs(self.texts, prompt)) for prompt in view.prompts
            ]
            self._feature_cache[key] = (
                columns[0] if len(columns) == 1 else ConcatenatedMatrix(columns)
            )
        return self._feature_cache[key]

    def roles(self, predictor: AnyPredictor, indices: Positions) -> UtteranceRoles:
        """Return utterances, by distinct positions, in the roles to which a predictor maps them."""
        features = self.features(predictor.view)
        return UtteranceRoles(resolve_head(predictor, int(features.shape[1])), features, indices)

    # -- the interface of Examples -------------------------------------------------------------

    @override
    def dim(self, view: FeatureView) -> int:
        return int(self.features(view).shape[1])

    @override
    def fit(
        self,
        recipe: Recipe,
        view: FeatureView,
        seed: int,
        on_epoch: OnEpoch,
        device: str,
        start: FittedRoleHead | None = None,
        curve_split: str | None = None,
    ) -> FittedRoleHead:
        train = self.data.turns_of("train")
        arrays = TurnArrays(self.features(view), train.utterances, train.starts)
        dev: DevScore[FittedRoleHead] | None = None
        if "dev" in self.data.splits:
            metric, others = get_metric(self.run.dev_metric), {}
            if curve_split is not None:
                others[score_key(curve_split)] = partial(self._score, view=view, split=curve_split)
            dev = DevScore(metric, partial(self._score, view=view, split="dev"), others)
        return fit_turns(recipe, arrays, dev, seed, on_epoch, device, start)

    @override
    def score_on_dev(self, head: FittedRoleHead, view: FeatureView) -> float:
        if "dev" not in self.data.splits:
            return math.nan
        return self._score(head, view, "dev")

    def _score(self, head: FittedRoleHead, view: FeatureView, split: str) -> float:
        roles = UtteranceRoles(head, self.features(view), self._distinct_utterances(split))
        rank = rank_next(self._queries(split), roles.scores).resolve_ties()
        queries = self.scored_rows(split)
        return get_metric(self.run.dev_metric)(rank, queries.rating, queries.pair)

    @override
    def scored_rows(self, split: str) -> RankedQueries:
        return stack_queries(self._queries(split))

    @override
    def rows(self, split: str) -> QueryRows:
        return query_rows(self.data, split, self._queries(split))

    @override
    def subsets(self, split: str) -> Mapping[str, NDArray[np.bool_]]:
        queries = self._queries(split)
        stratum = self.scored_rows(split).rating
        return {
            f"after {format_count(subset.history, 'turn')}": stratum == number
            for number, subset in enumerate(queries)
        }

    @override
    def predict(self, predictor: AnyPredictor, split: str) -> NDArray[np.float32]:
        roles = self.roles(predictor, self._distinct_utterances(split))
        # The rank of each query's answer; ties get their mean rank.
        return rank_next(self._queries(split), roles.scores).resolve_ties().astype(np.float32)

    def _queries(self, split: str) -> Sequence[NextQueries]:
        if split not in self._query_cache:
            self._query_cache[split] = next_queries(self.data, split)
        return self._query_cache[split]

    def _distinct_utterances(self, split: str) -> Positions:
        return np.unique(self.data.turns_of(split).utterances)
