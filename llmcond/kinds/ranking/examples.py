"""The examples of a ranking run: heads are fitted on queries and rank their answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from llmcond.arrays import ConcatenatedMatrix, Matrix, MatrixLike, SharedRows
from llmcond.data.rows import QueryRows
from llmcond.errors import UserError
from llmcond.evaluation.ranking import Ranks, Term, rank
from llmcond.evaluation.results import RankedQueries
from llmcond.features.store import FeatureStore
from llmcond.features.view import FeaturePart, FeatureView
from llmcond.heads import Recipe, load_recipe
from llmcond.heads.pairs import DevScore, OnEpoch, score_key
from llmcond.kinds.ranking.graph import Graph
from llmcond.kinds.ranking.heads import FittedQueryHead, QueryFeatures, fit_queries
from llmcond.kinds.ranking.rules import query_subsets
from llmcond.kinds.ranking.task import QueryData, QueryInputs, QueryTexts, RankingTask
from llmcond.metrics import get_metric
from llmcond.prompts import Prompt
from llmcond.runs.examples import AnyPredictor, Examples
from llmcond.runs.run import Run

#: Maximum number of queries that are scored after each epoch. Those of dev choose the epoch.
_EPOCH_QUERIES = 1_000


@cache
def create_zero_shot_head(dim: int, reads_joint: bool) -> FittedQueryHead:
    """Create the zero-shot head, which leaves features (n, dim) of unit length unchanged."""
    recipe = load_recipe("none", "kgc")
    module: Any = recipe.family(replace(recipe.settings, score="dot"), dim)
    module.reads_joint = reads_joint
    return FittedQueryHead(recipe.kind, recipe.family, module.freeze(), 0)


class QueryExamples(Examples):
    """The queries and candidates of a run, with their features."""

    data: QueryData
    task: RankingTask[Any]

    def __init__(
        self, run: Run, data: QueryData | None = None, store: FeatureStore | None = None
    ) -> None:
        """Prepare the examples; features are read when they are needed.

        Args:
            run: run with the candidates.
            data: other queries on these candidates; by default the run's.
            store: store with the features of ``data``; by default the run's.
        """
        self.run, self.data, self.task = run, data or run.data, run.task
        self.unit = run.task.unit
        self._store = store or run.store()
        self._features: dict[FeatureView, QueryFeatures] = {}
        self._columns: dict[tuple[str, str], Matrix] = {}

    @cached_property
    def texts(self) -> QueryTexts:
        """The texts of queries and candidates."""
        return self.task.texts(self.data)

    @cached_property
    def known(self) -> Any:
        """The known answers of all splits: a query's other answers are left out of its ranking."""
        return self.task.known(self.data)

    # -- features ------------------------------------------------------------------------------

    def features(self, view: FeatureView) -> QueryFeatures:
        """Return the features of queries and candidates under a view."""
        if view not in self._features:
            columns = [self._read_column(prompt, "candidates") for prompt in view.prompts]
            separate = view.features == "separate"
            arrays = self.task.arrays(
                self.data,
                candidates=columns[0] if len(columns) == 1 else ConcatenatedMatrix(columns),
                conditions=view.condition_features(
                    lambda prompt, _: self._read_column(prompt, "conditions")
                ),
                joint=None if separate else view.sentence_features(self._read_sentences),
                query_pairs=self.texts.query_pairs,
            )
            self._features[view] = QueryFeatures(arrays)
        return self._features[view]

    def _read_sentences(self, prompt: Prompt, text_part: FeaturePart) -> Matrix:
        """Return one part of a prompt's features for each pair of sentence and condition."""
        if text_part == "conditional":
            return self._read_column(prompt, "joint")
        column = 1 if prompt.subtracts_condition else 0
        table = self._read_column(
            prompt, "conditions" if prompt.subtracts_condition else "sentences"
        )
        return SharedRows(table, self.texts.query_pairs[:, column], unique_table=False)

    def _read_column(self, prompt: Prompt, name: str) -> Matrix:
        key = prompt.digest, name
        if key not in self._columns:
            self._columns[key] = self._store.lookup(getattr(QueryInputs(self.texts, prompt), name))
        return self._columns[key]

    # -- the interface of Examples -------------------------------------------------------------

    @override
    def dim(self, view: FeatureView) -> int:
        return self.features(view).arrays.dims[0]

    @property
    @override
    def dev_sample(self) -> str:
        if "dev" not in self.data.splits or len(self.data.queries("dev")) <= _EPOCH_QUERIES:
            return ""
        return f"{_EPOCH_QUERIES:,} queries"

    @override
    def fit(
        self,
        recipe: Recipe,
        view: FeatureView,
        seed: int,
        on_epoch: OnEpoch,
        device: str,
        start: FittedQueryHead | None = None,
        curve_split: str | None = None,
    ) -> FittedQueryHead:
        arrays = self.features(view).arrays
        dev: DevScore[FittedQueryHead] | None = None
        if "dev" in self.data.splits:
            metric, others = get_metric(self.run.dev_metric), {}
            if curve_split is not None:
                queries = self._sample_queries(curve_split)
                others[score_key(curve_split)] = partial(self._score, queries=queries)
            score_dev = partial(self._score, queries=self._sample_queries("dev"))
            dev = DevScore(metric, score_dev, others)
        return fit_queries(recipe, arrays, dev, seed, on_epoch, device, start)

    def _sample_queries(self, split: str) -> NDArray[np.int32]:
        """Return the queries of a split that are scored after each epoch: always the same ones."""
        queries = self.data.queries(split)
        if len(queries) <= _EPOCH_QUERIES:
            return queries
        sample = np.random.default_rng(0).permutation(len(queries))[:_EPOCH_QUERIES]
        return queries[np.sort(sample)]

    @override
    def score_on_dev(self, head: FittedQueryHead, view: FeatureView) -> float:
        if "dev" not in self.data.splits:
            return math.nan
        return self._score(head.bind(self.features(view)), self.data.queries("dev"))

    def _score(self, head: FittedQueryHead, queries: NDArray[np.int32]) -> float:
        vectors = head.queries(queries[:, 0], queries[:, 1])
        ranks = rank(vectors, head.candidates(), queries, self.known).resolve_ties()
        metric = get_metric(self.run.dev_metric)
        return metric(ranks, np.zeros(len(ranks)), np.arange(len(ranks)))

    @override
    def scored_rows(self, split: str) -> RankedQueries:
        if split not in self.data.splits:
            split_names = ", ".join(self.run.splits)
            raise UserError(f"{self.run.folder} has no {split} split; it has {split_names}.")
        # Several queries may come from one example, such as both directions of a triple.
        queries, n_examples = self.data.queries(split), len(self.data.splits[split])
        example, clusters = np.arange(len(queries)) % n_examples, self.task.clusters
        # The subject and the answer of the example's first query, such as a triple's two entities.
        crossed = (queries[example, 0], queries[example, 2]) if clusters else ()
        return RankedQueries(example, self.unit, crossed=crossed, clusters=clusters)

    @override
    def rows(self, split: str) -> QueryRows:
        return self.task.rows(self.data, split)

    @override
    def pool_keys(self) -> list[Any]:
        return self.task.pool_keys(self.data)

    @override
    def subsets(self, split: str) -> Mapping[str, NDArray[np.bool_]]:
        return query_subsets(self.data, split) if isinstance(self.data, Graph) else {}

    @override
    def predict(self, predictor: AnyPredictor, split: str) -> NDArray[np.float32]:
        # The rank of each query's answer; ties get their mean rank.
        return self.ranks(predictor, split).resolve_ties().astype(np.float32)

    # -- ranks ---------------------------------------------------------------------------------

    def vectors(
        self, predictor: AnyPredictor, sentences: NDArray[Any], conditions: NDArray[Any]
    ) -> tuple[MatrixLike, Matrix]:
        """Return the embeddings of queries (m, k) and of all candidates (n, k).

        Scores are their inner products.

        Args:
            predictor: predictor whose head maps the features.
            sentences: positions of the queries' sentences, (m,).
            conditions: positions of their conditions, (m,).
        """
        head = self.head(predictor, self.features(predictor.view))
        return head.queries(sentences, conditions), head.candidates()

    def head(self, predictor: AnyPredictor, features: QueryFeatures) -> FittedQueryHead:
        """Return a predictor's head, bound to features; zero-shot leaves features unchanged."""
        head: FittedQueryHead = predictor.head
        if not predictor.is_fitted:
            head = create_zero_shot_head(
                features.arrays.dims[0], predictor.view.features != "separate"
            )
        return head.bind(features)

    def ranks(
        self,
        predictor: AnyPredictor,
        split: str,
        terms: Sequence[Term] = (),
        exclude_head: bool = False,
    ) -> Ranks:
        """Return the ranks of the answers of a split's queries, without other known answers."""
        queries = self.data.queries(split)
        vectors, candidates = self.vectors(predictor, queries[:, 0], queries[:, 1])
        return rank(vectors, candidates, queries, self.known, terms, exclude_head)
