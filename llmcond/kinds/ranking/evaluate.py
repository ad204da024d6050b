"""Scoring of rankings: fitted heads, zero-shot and the reverse rule of the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.errors import UserError
from llmcond.evaluation.ranking import Term, score_rankings
from llmcond.evaluation.results import RankedQueries, Result, Results, RowCounts, Subset
from llmcond.kinds.ranking.examples import (
    QueryExamples,
    TrainGraph,
    fit_reverse_weights,
    query_subsets,
    rank_rule,
    relation_subsets,
)
from llmcond.kinds.ranking.graph import Graph
from llmcond.kinds.ranking.inputs import QueryInputs
from llmcond.log import log
from llmcond.metrics import Floats, Metric, choose_metrics
from llmcond.options import Ties
from llmcond.runs.examples import (
    AnyPredictor,
    Evaluation,
    read_ranked_data,
    resolve_predictors,
    result_without_metrics,
)
from llmcond.runs.extraction import extract_other_data
from llmcond.runs.run import Run
from llmcond.workflows.options.scoring import EvaluateOptions

#: Name, in results, of the rule that ranks by reversed edges alone.
REVERSE_RULE = "rule:reverse"


def evaluate_ranking(run: Run, options: EvaluateOptions) -> Evaluation:
    """Rank the answers of a split by a run's heads, by zero-shot, and by the reverse rule.

    Options and errors are those of ``AnyTask.evaluate``.
    """
    computed = choose_metrics(run.task.metrics, options.metric)
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
    results, systems = [], []
    for predictor in predictors:
        neighbours = bool(getattr(predictor.head.settings, "neighbours", False))
        described = _describe_scores(ties, terms.to_json(), neighbours)
        results.append(result_without_metrics(predictor, split, run.task.name, **described))
        systems.append(
            examples.ranks(predictor, split_key, terms.for_predictor(predictor), terms.exclude_head)
        )
    if terms.train_graph is not None:
        # The rule follows the zero-shot predictors: neither is trained.
        n_zero_shot = sum(not predictor.is_fitted for predictor in predictors)
        results.insert(n_zero_shot, _reverse_rule_result(run, split, ties))
        by_rule = rank_rule(terms.train_graph, data.queries(split_key), examples.known)
        systems.insert(n_zero_shot, by_rule)
    results = [replace(result, counts=RowCounts.of(rows)) for result in results]
    ranks = [system_ranks.resolve_ties(ties) for system_ranks in systems]
    graph = data if isinstance(data, Graph) else None
    results = _add_figures(results, ranks, rows, graph, split_key, computed, options.by_relation)
    return Evaluation(Results(tuple(results)), ranks, examples.rows(split_key))


def _reverse_rule_result(run: Run, split: str, ties: Ties) -> Result:
    """Return the result of the reverse rule, without metrics."""
    return Result(
        name=REVERSE_RULE,
        head=REVERSE_RULE,
        prompts=(),
        subtract=False,
        split=split,
        task=run.task.name,
        **_describe_scores(ties, {"rerank": None, "exclude_head": False, "reverse": True}, False),
    )


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


def _add_figures(
    results: Sequence[Result],
    ranks: Sequence[Floats],
    rows: RankedQueries,
    graph: Graph | None,
    split: str,
    metrics: Sequence[Metric],
    by_relation: bool,
) -> list[Result]:
    """Return results with their metrics, on all queries and on each subset of queries."""
    seeded = [system_ranks[None] for system_ranks in ranks]

    def figures(mask: NDArray[np.bool_] | None = None) -> list[Subset]:
        return score_rankings(seeded, rows.pair, metrics, mask=mask, crossed=rows.crossed)

    overall = figures()
    subset_figures: dict[str, list[Subset]] = {}
    relation_figures: list[tuple[str, list[Subset]]] = []
    n_categories = 0
    if graph is not None:
        subset_figures = {
            name: figures(in_subset) for name, in_subset in query_subsets(graph, split).items()
        }
        if by_relation:
            relation_figures = [
                (name, figures(in_subset)) for name, in_subset in relation_subsets(graph, split)
            ]
            n_categories = len(relation_figures) - graph.n_relations
    return [
        replace(
            result,
            metrics=overall[i].metrics,
            subsets={
                kind: {name: values[i] for name, values in figures_by_name}
                for kind, figures_by_name in (
                    ("parts", list(subset_figures.items())),
                    ("by_category", relation_figures[:n_categories]),
                    ("by_relation", relation_figures[n_categories:]),
                )
                if figures_by_name
            },
        )
        for i, result in enumerate(results)
    ]


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


class GraphTerms:
    """The terms of a run's graph.

    Attributes:
        train_graph: the training graph; None if the run has no graph.
        exclude_head: whether the head of a query is left out of the candidates.
    """

    def __init__(
        self,
        examples: QueryExamples,
        rerank: str | None = None,
        reverse: bool = False,
        exclude_head: bool = False,
    ) -> None:
        """Check the options.

        Args:
            examples: examples of the run.
            rerank: ``HOPS:ALPHA[:no-head]``; None for no such term.
            reverse: whether to add a fitted weight for reversed edges.
            exclude_head: whether to leave out the head of a query.

        Raises:
            UserError: ``rerank`` is invalid, or the run has no graph and an option needs one.
        """
        self._examples, self.exclude_head = examples, exclude_head
        self._rerank_text, self._reverse = rerank, reverse
        self._rerank = None if rerank is None else _parse_rerank(rerank)
        data, folder = examples.data, examples.run.folder
        self.train_graph = TrainGraph.from_graph(data) if isinstance(data, Graph) else None
        if self.train_graph is None and any(self.to_json().values()):
            raise UserError(
                f"--rerank, --reverse and --exclude-head are for knowledge graphs, but {folder} "
                "has none. Leave them out."
            )

    def to_json(self) -> Mapping[str, Any]:
        """Return the options, as they are recorded in results."""
        return {
            "rerank": self._rerank_text,
            "exclude_head": self.exclude_head,
            "reverse": self._reverse,
        }

    def for_predictor(self, predictor: AnyPredictor) -> list[Term]:
        """Return the terms of a predictor's scores; weights of reversed edges are fitted on dev."""
        terms: list[Term] = []
        if self.train_graph is None:
            return terms
        if self._rerank is not None:
            terms.append(self.train_graph.create_hops_term(*self._rerank))
        if self._reverse:
            queries, known = self._examples.data.queries("dev"), self._examples.known
            vectors, candidates = self._examples.vectors(predictor, queries[:, 0], queries[:, 1])
            weights = fit_reverse_weights(
                vectors, candidates, queries, known, self.train_graph, terms, self.exclude_head
            )
            terms.append(self.train_graph.create_reverse_term(weights))
        return terms
