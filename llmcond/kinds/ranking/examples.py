"""The examples of a ranking run: heads are fitted on queries, rank answers, and are scored."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from typing_extensions import override

from llmcond.base.arrays import (
    ConcatenatedMatrix,
    Matrix,
    MatrixLike,
    Positions,
    SharedRows,
    as_matrix,
)
from llmcond.base.errors import UserError
from llmcond.base.metrics import Floats, choose_metrics
from llmcond.base.options import Ties
from llmcond.base.output import log
from llmcond.data.rows import QueryRows
from llmcond.evaluation.results import (
    BLOCK,
    Added,
    CandidatePool,
    RankedQueries,
    Ranks,
    Result,
    Term,
    rank,
    rank_each,
)
from llmcond.features.store import FeatureStore
from llmcond.features.view import FeaturePart, FeatureView
from llmcond.heads import load_recipe
from llmcond.kinds.ranking.graph import (
    Graph,
    IndexArray,
    KnownTriples,
    QueryInputs,
    QueryTexts,
    Triples,
    adjacency,
    both_directions,
)
from llmcond.kinds.ranking.heads import FittedQueryHead, QueryArrays, fit_queries
from llmcond.options.scoring import EvaluateOptions
from llmcond.prompts import Prompt
from llmcond.runs.examples import (
    AnyPredictor,
    Evaluation,
    RankedExamples,
    read_ranked_data,
    resolve_predictors,
    result_without_metrics,
    score_ranks,
)
from llmcond.runs.open import extract_other_data
from llmcond.runs.run import Run

#: Maximum number of queries that are scored after each epoch. Those of dev choose the epoch.
_EPOCH_QUERIES = 1_000


@cache
def create_zero_shot_head(dim: int, reads_joint: bool) -> FittedQueryHead:
    """Create the zero-shot head, which leaves features (n, dim) of unit length unchanged."""
    recipe = load_recipe("none", "kgc")
    module: Any = recipe.family(replace(recipe.settings, score="dot"), dim)
    module.reads_joint = reads_joint
    return FittedQueryHead(recipe.kind, module.freeze(), 0)


class QueryExamples(RankedExamples):
    """The queries and candidates of a run, with their features."""

    fit_head = staticmethod(fit_queries)

    def __init__(self, run: Run, data: Any = None, store: FeatureStore | None = None) -> None:
        super().__init__(run, data, store)
        self.task = run.task
        self._arrays: dict[FeatureView, QueryArrays] = {}
        self._columns: dict[tuple[str, str], Matrix] = {}

    @cached_property
    def texts(self) -> QueryTexts:
        """The texts of queries and candidates."""
        texts: QueryTexts = self.task.texts(self.data)
        return texts

    @cached_property
    def known(self) -> Any:
        """The known answers of all splits: a query's other answers are left out of its ranking."""
        return self.task.known(self.data)

    # -- features ------------------------------------------------------------------------------

    @override
    def arrays(self, view: FeatureView) -> QueryArrays:
        if view not in self._arrays:
            columns = [self._read_column(prompt, "candidates") for prompt in view.prompts]
            self._arrays[view] = self.task.arrays(
                self.data,
                candidates=columns[0] if len(columns) == 1 else ConcatenatedMatrix(columns),
                conditions=view.condition_features(
                    lambda prompt, _: self._read_column(prompt, "conditions")
                ),
                joint=(
                    None
                    if view.features == "separate"
                    else view.sentence_features(self._read_sentences)
                ),
                query_pairs=self.texts.query_pairs,
            )
        return self._arrays[view]

    def _read_sentences(self, prompt: Prompt, text_part: FeaturePart) -> Matrix:
        """Return one part of a prompt's features for each pair of sentence and condition."""
        if text_part == "conditional":
            return self._read_column(prompt, "joint")
        column, name = (1, "conditions") if prompt.subtracts_condition else (0, "sentences")
        table = self._read_column(prompt, name)
        return SharedRows(table, self.texts.query_pairs[:, column], unique_table=False)

    def _read_column(self, prompt: Prompt, name: str) -> Matrix:
        key = prompt.digest, name
        if key not in self._columns:
            self._columns[key] = self._store.lookup(getattr(QueryInputs(self.texts, prompt), name))
        return self._columns[key]

    # -- the interface of Examples -------------------------------------------------------------

    @override
    def dim(self, view: FeatureView) -> int:
        return self.arrays(view).dims[0]

    @property
    @override
    def dev_sample(self) -> str:
        if "dev" not in self.data.splits or len(self.data.queries("dev")) <= _EPOCH_QUERIES:
            return ""
        return f"{_EPOCH_QUERIES:,} queries"

    @override
    def epoch_rows(self, split: str) -> Any:
        n = len(self.data.queries(split))
        if n <= _EPOCH_QUERIES:
            return slice(None)
        return np.sort(np.random.default_rng(0).permutation(n)[:_EPOCH_QUERIES])

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
        rows: QueryRows = self.task.rows(self.data, split)
        return rows

    @override
    def pool_keys(self) -> list[Any]:
        keys: list[Any] = self.task.pool_keys(self.data)
        return keys

    @override
    def subsets(
        self, split: str, trained_on: Collection[str] = (), others: Sequence[Run] = ()
    ) -> Mapping[str, NDArray[np.bool_]]:
        return query_subsets(self.data, split) if isinstance(self.data, Graph) else {}

    @override
    def ranks(
        self,
        predictor: AnyPredictor,
        split: str,
        rows: Any = slice(None),
        terms: Sequence[Term] = (),
        exclude_head: bool = False,
    ) -> Ranks:
        # Other known answers are left out.
        queries, head = self.data.queries(split)[rows], self.head(predictor)
        vectors = head.queries(queries[:, 0], queries[:, 1])
        return rank(vectors, head.candidates(), queries, self.known, terms, exclude_head)

    def head(self, predictor: AnyPredictor, arrays: QueryArrays | None = None) -> FittedQueryHead:
        """Return a predictor's head, applied to arrays: by default, those of the examples.

        Zero-shot leaves features unchanged.
        """
        arrays = arrays or self.arrays(predictor.view)
        head: FittedQueryHead = predictor.head
        if not predictor.is_fitted:
            head = create_zero_shot_head(arrays.dims[0], predictor.view.features != "separate")
        return head.bind(arrays)


class TrainGraph:
    """The training graph: neighbours, hops and reversed edges.

    Args:
        graph: a graph, of which only train is used.

    Attributes:
        known: triples of train in both directions.
        adjacency: adjacency matrix; see ``graph.adjacency``.
    """

    def __init__(self, graph: Graph) -> None:
        triples = graph.splits["train"]
        self.n_entities, self.n_relations = graph.n_entities, graph.n_relations
        self.known = KnownTriples(both_directions(triples, self.n_relations), self.n_entities)
        self.adjacency = adjacency(triples, self.n_entities)

    def find_neighbourhood(self, head: IndexArray, hops: int) -> tuple[Positions, Positions]:
        """Return the entities within ``hops`` links of each of m heads, including the head.

        Returns:
            Flat arrays: the position of the head, (k,), and the entity, (k,).
        """
        distinct, inverse = np.unique(head, return_inverse=True)
        n = len(distinct)
        start = (np.ones(n, dtype=np.float32), (np.arange(n), distinct))
        step = reached = csr_array(start, shape=(n, self.n_entities))
        for _ in range(hops):
            step = step @ self.adjacency
            reached = reached + step
        entities = reached[inverse.reshape(-1)].tocoo()
        return entities.row.astype(np.int64), entities.col.astype(np.int64)

    def create_hops_term(self, hops: int, alpha: float, head: bool = True) -> Term:
        """Return a term that adds ``alpha`` to entities near a query's head (SimKGC, section 3.4).

        Args:
            hops: maximum distance from the head, in links of the training graph.
            alpha: value that is added; .05 in SimKGC.
            head: whether to add it to the head itself, as SimKGC does.
        """

        def term(heads: IndexArray, _: IndexArray, /) -> Added:
            row, entity = self.find_neighbourhood(heads, hops)
            if not head:
                others = entity != np.asarray(heads)[row]
                row, entity = row[others], entity[others]
            return row, entity, np.full(len(row), alpha, dtype=np.float32)

        return term

    def create_reverse_term(self, weights: float | NDArray[np.floating] = 1.0) -> Term:
        """Return a term that adds a weight to every t with the reversed edge (t, r, h) in train.

        Args:
            weights: value that is added, or an array (2R,) with a value for each relation; see
                ``fit_reverse_weights``.
        """
        by_relation = np.broadcast_to(
            np.asarray(weights, dtype=np.float32), (2 * self.n_relations,)
        )

        def term(head: IndexArray, relation: IndexArray, /) -> Added:
            row, entity = self.reversed_edges(head, relation)
            return row, entity, by_relation[np.asarray(relation)[row]]

        return term

    def reversed_edges(self, head: IndexArray, relation: IndexArray) -> tuple[Positions, Positions]:
        """Return every t with (t, r, h) in train, for m queries (h, r, ?), as flat arrays."""
        inverse = (np.asarray(relation) + self.n_relations) % (2 * self.n_relations)
        return self.known.gather(head, inverse)


def rank_rule(train_graph: TrainGraph, triples: Triples, known: KnownTriples | None) -> Ranks:
    """Rank by the reversed edge alone: entities with it come first, and all others tie."""
    nothing = np.zeros((len(triples), 0)), np.zeros((train_graph.n_entities, 0))
    return rank(*nothing, triples, known, [train_graph.create_reverse_term()])


#: Weights that are tried, in standard deviations of the scores, in the order of preference if
#: several are equally good.
_WEIGHTS = (0, 0.5, -0.5, 1, -1, 2, -2, 4, -4, 8, -8)
#: Minimum number of queries for a relation; with fewer its weight stays 0.
_LEAST_QUERIES = 10
#: Maximum number of queries that are ranked, spread over the relations.
_MOST_QUERIES = 1_000


def fit_reverse_weights(
    queries: MatrixLike,
    candidates: MatrixLike,
    triples: Triples,
    known: KnownTriples | None,
    train_graph: TrainGraph,
    terms: Sequence[Term] = (),
    exclude_head: bool = False,
) -> Floats:
    """Fit the weight of the reversed edge for each relation on dev queries.

    The weight is chosen from a few multiples of the standard deviation of the scores, by the MRR
    on the dev queries of the relation. It is positive for a symmetric relation, and negative for
    one that never holds in both directions, such as hypernym.

    Args:
        queries: embeddings of dev queries, (m, k).
        candidates: embeddings of candidates, (n, k).
        triples: dev queries with their answers, (m, 3).
        known: known answers, which are left out.
        train_graph: the training graph.
        terms: other terms of the scores.
        exclude_head: whether the head of a query is left out; see ``rank``.

    Returns:
        Weights of shape (2R,), equal for both directions of a relation.
    """
    matrix, relation = as_matrix(queries), triples[:, 1] % train_graph.n_relations
    query_rows, _ = train_graph.reversed_edges(triples[:, 0], triples[:, 1])
    affected = np.random.default_rng(0).permutation(np.unique(query_rows))
    affected = affected[np.argsort(relation[affected], kind="stable")]
    # The first query of each relation, then the second of each, and so on.
    occurrence = np.arange(len(affected)) - np.searchsorted(relation[affected], relation[affected])
    affected = affected[np.argsort(occurrence, kind="stable")][:_MOST_QUERIES]
    if not len(affected):
        return np.zeros(2 * train_graph.n_relations)
    vectors, affected_triples = matrix.read(affected), triples[affected]
    sample = slice(None, None, max(1, len(candidates) // 4_096))
    score_std = float(np.std(vectors[:BLOCK] @ as_matrix(candidates).read(sample).T, axis=1).mean())
    reverse_terms = [train_graph.create_reverse_term(weight * score_std) for weight in _WEIGHTS[1:]]
    pool = CandidatePool(candidates, known, terms, exclude_head)
    ranks = rank_each(vectors, pool, affected_triples, reverse_terms)
    reciprocal_ranks = [1 / term_ranks.resolve_ties() for term_ranks in ranks]
    weights = np.zeros(train_graph.n_relations)
    for relation_index in np.unique(relation[affected]):
        has_relation = relation[affected] == relation_index
        if has_relation.sum() >= _LEAST_QUERIES:
            best = int(np.argmax([values[has_relation].mean() for values in reciprocal_ranks]))
            weights[relation_index] = _WEIGHTS[best] * score_std
    return np.tile(weights, 2)


def query_subsets(graph: Graph, split: str) -> dict[str, NDArray[np.bool_]]:
    """Return masks (2n,) of the subsets of a split's queries that are scored separately.

    ``forward`` and ``backward`` are the directions. ``reversible`` triples are those whose reversed
    edge is in train, which the reverse rule answers, and ``rest`` are the others. ``unseen``
    triples have an entity that is in no train triple.
    """
    triples, train = graph.splits[split], graph.splits["train"]
    forward = np.repeat([True, False], len(triples))
    reversible = np.tile(KnownTriples(train, graph.n_entities).contains(triples[:, ::-1]), 2)
    seen = np.isin(triples[:, [0, 2]], train[:, [0, 2]]).all(axis=1)
    return {
        "forward": forward,
        "backward": ~forward,
        "reversible": reversible,
        "rest": ~reversible,
        "unseen": np.tile(~seen, 2),
    }


#: A side of a relation counts as N if it has at least this mean number of entities for each entity
#: of the other side.
_MANY = 1.5


def relation_categories(graph: Graph) -> list[str]:
    """Return the category of each relation: ``1-1``, ``1-N``, ``N-1`` or ``N-N``.

    The category depends on the mean number of heads per tail, and of tails per head, in train
    (Bordes et al. 2013, section 4.2).
    """
    labels = []
    for relation in range(graph.n_relations):
        train = graph.splits["train"]
        triples = train[train[:, 1] == relation]
        heads, tails = (len(triples) / max(len(np.unique(triples[:, i])), 1) for i in (2, 0))
        labels.append(f"{'N' if heads >= _MANY else '1'}-{'N' if tails >= _MANY else '1'}")
    return labels


def relation_subsets(graph: Graph, split: str) -> list[dict[str, NDArray[np.bool_]]]:
    """Return the masks (2n,) of a split's queries by category of relation, and by relation's id."""
    relation = np.tile(graph.splits[split][:, 1], 2)
    categories = np.array(relation_categories(graph))
    return [
        {name: categories[relation] == name for name in sorted(set(categories.tolist()))},
        {name: relation == number for number, name in enumerate(graph.relations.ids)},
    ]


#: Name, in results, of the rule that ranks by reversed edges alone.
REVERSE_RULE = "rule:reverse"


def evaluate_ranking(run: Run, options: EvaluateOptions) -> Evaluation:
    """Rank the answers of a split by a run's heads, by zero-shot, and by the reverse rule.

    Options and errors are those of ``AnyTask.evaluate``.
    """
    metrics = choose_metrics(run.task.metrics, options.metric)
    predictors, prompts = resolve_predictors(run, options.head)
    # With --data, results name a split that differs from the key of the split in the data.
    data, split_key, split = read_ranked_data(run, options)
    store = run.store()
    if data is not run.data:
        inputs = partial(QueryInputs, run.task.texts(data))
        store = extract_other_data(run, prompts, inputs, options.device)
    examples = QueryExamples(run, data, store)
    rows = examples.scored_rows(split_key)
    terms = GraphTerms(examples, options.rerank, options.reverse, options.exclude_head)
    ties = options.ties or "realistic"
    log.info(f"ranking {len(rows.pair):,} queries of {split} by {len(predictors)} systems")
    results, ranks = [], []
    for predictor in predictors:
        neighbours = bool(getattr(predictor.head.settings, "neighbours", False))
        described = _describe_scores(ties, terms.to_json(), neighbours)
        results.append(result_without_metrics(predictor, split, run.task.name, **described))
        added = terms.for_predictor(predictor)
        ranks.append(
            examples.ranks(predictor, split_key, terms=added, exclude_head=terms.exclude_head)
        )
    masks: dict[str, Mapping[str, NDArray[np.bool_]]] = {}
    if isinstance(data, Graph) and terms.train_graph is not None:
        # The rule follows the zero-shot predictors: neither is trained.
        n_zero_shot = sum(not predictor.is_fitted for predictor in predictors)
        options_of_rule = {"rerank": None, "exclude_head": False, "reverse": True}
        rule = Result(
            name=REVERSE_RULE,
            head=REVERSE_RULE,
            prompts=(),
            subtract=False,
            split=split,
            task=run.task.name,
            **_describe_scores(ties, options_of_rule, False),
        )
        results.insert(n_zero_shot, rule)
        by_rule = rank_rule(terms.train_graph, data.queries(split_key), examples.known)
        ranks.insert(n_zero_shot, by_rule)
        masks["parts"] = query_subsets(data, split_key)
        if options.by_relation:
            masks["by_category"], masks["by_relation"] = relation_subsets(data, split_key)
    resolved = [system_ranks.resolve_ties(ties) for system_ranks in ranks]
    scored = score_ranks(results, resolved, rows, metrics, masks)
    return Evaluation(scored, resolved, examples.rows(split_key))


def _describe_scores(ties: Ties, added: Mapping[str, Any], neighbours: bool) -> dict[str, Any]:
    """Return the fields of a result that say how candidates were scored.

    Args:
        ties: the rank of an answer among candidates with the same score.
        added: the values of options that add to scores, or exclude candidates, by option.
        neighbours: whether the head reads entities with their neighbours in train.
    """
    additions = {
        "neighbours": neighbours,
        "reversed edge": added.get("reverse"),
        f"hops {added.get('rerank')}": added.get("rerank"),
        "head left out": added.get("exclude_head"),
    }
    variant = "with", ", ".join(name for name, is_so in additions.items() if is_so)
    return {"variant": variant, "about": {"ties": ties, **added, "neighbours": neighbours}}


def _parse_rerank(text: str) -> tuple[int, float, bool]:
    """Parse ``HOPS:ALPHA[:no-head]`` into the hops, ALPHA, and whether the head is included.

    Raises:
        UserError: The text is invalid.
    """
    words = text.split(":")
    try:
        hops, alpha = int(words[0]), float(words[1])
        is_valid = words[2:] in ([], ["no-head"]) and 1 <= hops <= 100 and np.isfinite(alpha)
    except (IndexError, ValueError):
        is_valid = False
    if not is_valid:
        raise UserError(
            f"--rerank is {text!r}; expected HOPS:ALPHA or HOPS:ALPHA:no-head, such as 5:0.05, "
            "with 1 to 100 hops."
        )
    return hops, alpha, len(words) == 2


@dataclass(frozen=True)
class GraphTerms:
    """The terms of a run's graph that are added to the scores of candidates.

    Attributes:
        examples: examples of the run.
        rerank: ``HOPS:ALPHA[:no-head]``; None for no such term.
        reverse: whether to add a fitted weight for reversed edges.
        exclude_head: whether to leave out the head of a query.
    """

    examples: QueryExamples
    rerank: str | None = None
    reverse: bool = False
    exclude_head: bool = False

    def __post_init__(self) -> None:
        """Raise a UserError if ``rerank`` is invalid, or an option needs a missing graph."""
        if self.rerank is not None:
            _parse_rerank(self.rerank)
        if self.train_graph is None and any(self.to_json().values()):
            raise UserError(
                "--rerank, --reverse and --exclude-head are for knowledge graphs, but "
                f"{self.examples.run.folder} has none. Leave them out."
            )

    @cached_property
    def train_graph(self) -> TrainGraph | None:
        """The training graph; None if the run has no graph."""
        data = self.examples.data
        return TrainGraph(data) if isinstance(data, Graph) else None

    def to_json(self) -> Mapping[str, Any]:
        """Return the options, as they are recorded in results."""
        return {name: getattr(self, name) for name in ("rerank", "exclude_head", "reverse")}

    def for_predictor(self, predictor: AnyPredictor) -> list[Term]:
        """Return the terms of a predictor's scores; weights of reversed edges are fitted on dev."""
        terms: list[Term] = []
        if self.train_graph is None:
            return terms
        if self.rerank is not None:
            terms.append(self.train_graph.create_hops_term(*_parse_rerank(self.rerank)))
        if self.reverse:
            queries, head = self.examples.data.queries("dev"), self.examples.head(predictor)
            vectors, candidates = head.queries(queries[:, 0], queries[:, 1]), head.candidates()
            known, excluded = self.examples.known, self.exclude_head
            weights = fit_reverse_weights(
                vectors, candidates, queries, known, self.train_graph, terms, excluded
            )
            terms.append(self.train_graph.create_reverse_term(weights))
        return terms
