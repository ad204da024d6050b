"""Queries against candidates as examples: heads are fitted on the right answers, and rank them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Concatenated, Gathered, Matrix, MatrixLike
from llmcond.data.queries import QueryRows
from llmcond.errors import UserError
from llmcond.evaluation.ranking import Ranks, Term, rank
from llmcond.evaluation.results import Queries
from llmcond.features.store import FeatureStore
from llmcond.features.view import Part, View
from llmcond.heads import Recipe, load_recipe
from llmcond.heads.pairs import DevScore, OnEpoch
from llmcond.kinds.ranking.arrays import QueryFeatures
from llmcond.kinds.ranking.fit import fit_queries
from llmcond.kinds.ranking.heads import FittedQueryHead
from llmcond.kinds.ranking.inputs import QueryInputs
from llmcond.kinds.ranking.run import RankingRun
from llmcond.kinds.ranking.task import QueryData, QueryTexts
from llmcond.metrics import metric_of
from llmcond.prompts import Prompt
from llmcond.runs.examples import Examples
from llmcond.runs.predictors import AnyPredictor

#: Queries of dev that choose an epoch, at most.
_DEV_QUERIES = 1_000


@cache
def no_head(dim: int, reads_joint: bool) -> FittedQueryHead:
    """Return the head of zero-shot: features (n, dim) of length 1 as they are, for cosines."""
    recipe = load_recipe("none", "kgc")
    module: Any = recipe.family(replace(recipe.settings, score="dot"), dim)
    module.reads_joint = reads_joint
    return FittedQueryHead(recipe.kind, recipe.family, module.finished(), 0)


class QueryExamples(Examples):
    """See :class:`Examples`."""

    run: RankingRun
    data: QueryData

    def __init__(
        self, run: RankingRun, data: QueryData | None = None, store: FeatureStore | None = None
    ) -> None:
        """Prepare a run, or other ``data`` on its candidates; ``store`` has the features."""
        self.run, self.data, self.unit = run, data or run.data, run.task.unit
        self._store = store or run.store()
        self._features: dict[View, QueryFeatures] = {}
        self._read: dict[tuple[str, str], Matrix] = {}

    @cached_property
    def texts(self) -> QueryTexts:
        """Return the texts behind the queries."""
        return self.run.task.texts(self.data)

    @cached_property
    def known(self) -> Any:
        """Return the right answers of all splits, of which a query's others are left out."""
        return self.run.task.known(self.data)

    # -- features ------------------------------------------------------------------------------

    def features(self, view: View) -> QueryFeatures:
        """Return what heads read of queries and candidates under a view."""
        if view not in self._features:
            columns = [self._column(prompt, "candidates") for prompt in view.prompts]
            separate = view.features == "separate"
            arrays = self.run.task.arrays(
                self.data,
                candidates=columns[0] if len(columns) == 1 else Concatenated(columns),
                conditions=view.condition(lambda prompt, _: self._column(prompt, "conditions")),
                joint=None if separate else view.sentence(self._of_asked),
                asked=self.texts.asked,
            )
            self._features[view] = QueryFeatures(arrays)
        return self._features[view]

    def _of_asked(self, prompt: Prompt, part: Part) -> Matrix:
        """Return the features of sentences under the conditions that they are asked under."""
        if part == "conditional":
            return self._column(prompt, "joint")
        column = 1 if prompt.of_condition else 0
        table = self._column(prompt, "conditions" if prompt.of_condition else "sentences")
        return Gathered(table, self.texts.asked[:, column], unique_table=False)

    def _column(self, prompt: Prompt, name: str) -> Matrix:
        key = prompt.digest, name
        if key not in self._read:
            self._read[key] = self._store.lookup(getattr(QueryInputs(self.texts, prompt), name))
        return self._read[key]

    # -- what every kind of examples has -------------------------------------------------------

    def dim(self, view: View) -> int:
        """See :class:`Examples`."""
        return self.features(view).arrays.dims[0]

    @property
    def dev_sample(self) -> str:
        """See :class:`Examples`."""
        if "dev" not in self.data.splits or len(self.data.queries("dev")) <= _DEV_QUERIES:
            return ""
        return f"{_DEV_QUERIES:,} queries"

    def fit(
        self, recipe: Recipe, view: View, seed: int, on_epoch: OnEpoch, device: str
    ) -> FittedQueryHead:
        """See :class:`Examples`; a sample of dev, always the same, chooses the epoch."""
        arrays = self.features(view).arrays
        dev: DevScore[FittedQueryHead] | None = None
        if "dev" in self.data.splits:
            queries = self.data.queries("dev")
            if len(queries) > _DEV_QUERIES:
                chosen = np.random.default_rng(0).permutation(len(queries))[:_DEV_QUERIES]
                queries = queries[np.sort(chosen)]
            dev = DevScore(metric_of(self.run.dev_metric), lambda head: self._score(head, queries))
        return fit_queries(recipe, arrays, dev, seed, on_epoch, device)

    def on_dev(self, head: FittedQueryHead, view: View) -> float:
        """See :class:`Examples`."""
        if "dev" not in self.data.splits:
            return math.nan
        return self._score(head.on(self.features(view)), self.data.queries("dev"))

    def _score(self, head: FittedQueryHead, queries: NDArray[np.int32]) -> float:
        vectors = head.queries(queries[:, 0], queries[:, 1])
        ranks = rank(vectors, head.candidates(), queries, self.known).of()
        metric = metric_of(self.run.dev_metric)
        return metric(ranks, np.zeros(len(ranks)), np.arange(len(ranks)))

    def scored(self, split: str) -> Queries:
        """See :class:`Examples`: the queries of a split, by the examples that ask them."""
        if split not in self.data.splits:
            has = ", ".join(self.run.splits)
            raise UserError(f"{self.run.folder} has no {split} split; it has {has}.")
        n, n_examples = len(self.data.queries(split)), len(self.data.splits[split])
        return Queries(np.arange(n) % n_examples, self.unit)

    def rows(self, split: str) -> QueryRows:
        """See :class:`Examples`."""
        return self.run.task.rows(self.data, split)

    def predict(self, predictor: AnyPredictor, split: str) -> NDArray[np.float32]:
        """See :class:`Examples`: the rank of each query's answer, of ties the mean one."""
        return self.ranks(predictor, split).of().astype(np.float32)

    # -- ranks ---------------------------------------------------------------------------------

    def vectors(
        self, predictor: AnyPredictor, sentences: NDArray[Any], conditions: NDArray[Any]
    ) -> tuple[MatrixLike, Matrix]:
        """Return (m, k) vectors of queries, by positions (m,), and those of all candidates (n, k).

        Scores are their products.
        """
        head = self.head(predictor, self.features(predictor.view))
        return head.queries(sentences, conditions), head.candidates()

    def head(self, predictor: AnyPredictor, features: QueryFeatures) -> FittedQueryHead:
        """Return a predictor's head, bound to features; zero-shot returns them as they are."""
        head: FittedQueryHead = predictor.head
        if not predictor.is_fitted:
            head = no_head(features.arrays.dims[0], predictor.view.features != "separate")
        return head.on(features)

    def ranks(
        self,
        predictor: AnyPredictor,
        split: str,
        terms: Sequence[Term] = (),
        exclude_head: bool = False,
    ) -> Ranks:
        """Return the ranks of the answers of a split's queries, other known answers left out."""
        queries = self.data.queries(split)
        vectors, candidates = self.vectors(predictor, queries[:, 0], queries[:, 1])
        return rank(vectors, candidates, queries, self.known, terms, exclude_head)
