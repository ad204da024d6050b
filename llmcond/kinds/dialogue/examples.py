"""Dialogues as examples: heads map utterances to their roles, and rank what comes next."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Array, Concatenated, Matrix, MatrixLike, Positions, as_matrix
from llmcond.data.queries import QueryRows
from llmcond.evaluation.results import Queries
from llmcond.features.store import FeatureStore
from llmcond.features.view import View
from llmcond.heads import Recipe, load_recipe
from llmcond.heads.pairs import DevScore, OnEpoch
from llmcond.kinds.dialogue.data import Dialogues
from llmcond.kinds.dialogue.fit import TurnArrays, fit_turns
from llmcond.kinds.dialogue.inputs import UtteranceInputs
from llmcond.kinds.dialogue.queries import (
    NextQueries,
    next_queries,
    queries_of,
    query_rows,
    rank_next,
)
from llmcond.kinds.dialogue.roles import FittedRoles
from llmcond.kinds.dialogue.run import DialogueRun
from llmcond.kinds.dialogue.turns import plan_scores, turn_scores
from llmcond.metrics import metric_of
from llmcond.runs.examples import Examples
from llmcond.runs.predictors import AnyPredictor


def head_of(predictor: AnyPredictor, dim: int) -> FittedRoles:
    """Return a predictor's head; that of zero-shot has features (n, dim) in every role."""
    if predictor.is_fitted:
        head: FittedRoles = predictor.head
        return head
    recipe = load_recipe("none", "dialogue")
    module: Any = recipe.family(recipe.settings, dim)
    return FittedRoles(recipe.kind, recipe.family, module.finished(), 0)


class Roles:
    """Utterances of some splits in their roles, and scores by positions among all texts.

    Attributes:
        head: that maps them; its ``score`` compares them.
    """

    def __init__(self, head: FittedRoles, features: MatrixLike, used: Positions) -> None:
        """Map the utterances ``used``, (u,) distinct positions, of all features (n, d)."""
        self.head = head
        own = as_matrix(features).take(used)
        self._b1, self._b2 = head.before(own)
        self._after = head.after(own)
        self._place = np.full(len(features), -1)
        self._place[used] = np.arange(len(used))

    def scored_by(self, score: str) -> Roles:
        """Return the same vectors, compared by another score."""
        found = copy.copy(self)
        found.head = self.head.scoring(score)
        return found

    def scores(self, contexts: Positions, candidates: Positions) -> Array:
        """Return the scores (n, c) of candidates (c,) as the next turns of contexts (n, h)."""
        at, after = self._place[contexts], self._after[self._place[candidates]]
        head = self.head
        return turn_scores(self._b1[at], self._b2[at], after, head.score, head.weights)

    def nexts(self, contexts: Positions, candidates: Positions, goals: Positions) -> Array:
        """Return the scores (n, c) of candidates (n, c) as next turns; goals do not count."""
        every = np.unique(candidates)
        scores = self.scores(contexts, every)
        return np.take_along_axis(scores, np.searchsorted(every, candidates), axis=1)

    def plans(self, contexts: Positions, candidates: Positions, goals: Positions) -> Array:
        """Return how likely candidates (n, c) lead from contexts (n, h) to goals (n,): (n, c)."""
        at, goal = self._place[contexts], self._after[self._place[goals]]
        return plan_scores(self._b1[at], self._b2[self._place[candidates]], goal)


class DialogueExamples(Examples):
    """See :class:`Examples`.

    Attributes:
        texts: the distinct utterances, and further texts that are ranked.
    """

    run: DialogueRun
    data: Dialogues

    def __init__(
        self,
        run: DialogueRun,
        data: Dialogues | None = None,
        further: Sequence[str] = (),
        store: FeatureStore | None = None,
    ) -> None:
        """Prepare a run, or other ``data``, and ``further`` texts; ``store`` has their features."""
        self.run, self.data, self.unit = run, data or run.data, run.task.unit
        self.texts = [*self.data.texts, *further]
        self._store = store or run.store()
        self._read: dict[tuple[str, ...], Matrix] = {}
        self._asked: dict[str, Sequence[NextQueries]] = {}

    def features(self, view: View) -> Matrix:
        """Return the features of all texts, (n, d)."""
        key = tuple(prompt.digest for prompt in view.prompts)
        if key not in self._read:
            columns = [
                self._store.lookup(UtteranceInputs(self.texts, prompt)) for prompt in view.prompts
            ]
            self._read[key] = columns[0] if len(columns) == 1 else Concatenated(columns)
        return self._read[key]

    def roles(self, predictor: AnyPredictor, used: Positions) -> Roles:
        """Return utterances ``used``, distinct positions, in the roles a predictor gives them."""
        features = self.features(predictor.view)
        return Roles(head_of(predictor, int(features.shape[1])), features, used)

    # -- what every kind of examples has -------------------------------------------------------

    def dim(self, view: View) -> int:
        """See :class:`Examples`."""
        return int(self.features(view).shape[1])

    def fit(
        self, recipe: Recipe, view: View, seed: int, on_epoch: OnEpoch, device: str
    ) -> FittedRoles:
        """See :class:`Examples`."""
        train = self.data.of("train")
        arrays = TurnArrays(self.features(view), train.utterances, train.starts)
        dev: DevScore[FittedRoles] | None = None
        if "dev" in self.data.splits:
            dev = DevScore(metric_of(self.run.dev_metric), lambda head: self.on_dev(head, view))
        return fit_turns(recipe, arrays, dev, seed, on_epoch, device)

    def on_dev(self, head: FittedRoles, view: View) -> float:
        """See :class:`Examples`."""
        if "dev" not in self.data.splits:
            return math.nan
        roles = Roles(head, self.features(view), self._used("dev"))
        rank = rank_next(self._queries("dev"), roles.scores).of()
        rows = self.scored("dev")
        return metric_of(self.run.dev_metric)(rank, rows.rating, rows.pair)

    def scored(self, split: str) -> Queries:
        """See :class:`Examples`: the next turns of a split, by the dialogues they are of."""
        return queries_of(self._queries(split))

    def rows(self, split: str) -> QueryRows:
        """See :class:`Examples`."""
        return query_rows(self.data, split, self._queries(split))

    def predict(self, predictor: AnyPredictor, split: str) -> NDArray[np.float32]:
        """See :class:`Examples`: the rank of each query's answer, of ties the mean one."""
        roles = self.roles(predictor, self._used(split))
        return rank_next(self._queries(split), roles.scores).of().astype(np.float32)

    def _queries(self, split: str) -> Sequence[NextQueries]:
        if split not in self._asked:
            self._asked[split] = next_queries(self.data, split)
        return self._asked[split]

    def _used(self, split: str) -> Positions:
        return np.unique(self.data.of(split).utterances)
