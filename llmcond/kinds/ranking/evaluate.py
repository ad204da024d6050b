"""Score how predictors rank right answers: fitted heads, zero-shot, and rules of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Positions
from llmcond.evaluation.ranked import RankedResult, RankedResults
from llmcond.evaluation.ranking import Part, measure_each
from llmcond.evaluation.results import Counts
from llmcond.kinds.ranking.examples import QueryExamples
from llmcond.kinds.ranking.graph import Graph
from llmcond.kinds.ranking.inputs import QueryInputs
from llmcond.kinds.ranking.rules import parts, rank_rule, relation_parts
from llmcond.kinds.ranking.run import RankingRun
from llmcond.kinds.ranking.terms import GraphTerms
from llmcond.log import log
from llmcond.metrics import Floats, Metric, choose_metrics
from llmcond.options import Ties
from llmcond.runs.extraction import extract_others
from llmcond.runs.predictors import AnyPredictor, asked_for, unscored, zeroshots
from llmcond.workflows.evaluate import ranked_data
from llmcond.workflows.options.scoring import EvaluateOptions

#: What results call the rule that an edge goes both ways.
REVERSE_RULE = "rule:reverse"


def evaluate_ranking(run: RankingRun, asked: EvaluateOptions) -> RankedResults[RankedResult]:
    """Rank the answers of a split by a run's heads, by zero-shot, and by the reversed edge alone.

    See :meth:`llmcond.runs.kind.Kind.evaluate`.
    """
    computed = choose_metrics(run.task.metrics, asked.metric)
    fitted, prompts = asked_for(run, asked.head)
    # What it is called in results is another thing where data is not the run's own.
    data, own, split = ranked_data(run, asked)
    store = run.store()
    if data is not run.data:
        inputs = partial(QueryInputs, run.task.texts(data))
        store = extract_others(run, prompts, inputs, asked.device)
    examples = QueryExamples(run, data, store)
    rows = examples.scored(own)
    plain = [one for prompt in prompts for one in zeroshots(run, prompt)]
    predictors: list[AnyPredictor] = [*plain, *fitted]
    terms = GraphTerms(examples, asked.rerank, asked.reverse, asked.exclude_head)
    ties = asked.ties or "realistic"
    log.info(f"ranking {len(rows.pair):,} queries of {split} by {len(predictors)} systems")
    described, systems = [], []
    for one in predictors:
        neighbours = bool(getattr(one.head.settings, "neighbours", False))
        about = {"ties": ties, "added": terms.to_json(), "neighbours": neighbours}
        described.append(unscored(RankedResult, one, split, run.task.name, **about))
        systems.append(examples.ranks(one, own, terms.of(one), terms.exclude_head))
    if terms.context is not None:
        # What takes no training stands together.
        described.insert(len(plain), _rule(run, split, ties))
        by_rule = rank_rule(terms.context, data.queries(own), examples.known)
        systems.insert(len(plain), by_rule)
    counted = [replace(one, counts=Counts.of(rows)) for one in described]
    ranks = [one.of(ties) for one in systems]
    graph = data if isinstance(data, Graph) else None
    by_relation = asked.by_relation
    scored = _with_figures(counted, ranks, rows.pair, graph, own, computed, by_relation)
    return RankedResults(tuple(scored), ranks, examples.rows(own))


def _rule(run: RankingRun, split: str, ties: Ties) -> RankedResult:
    """Return the result of the reversed edge alone, without figures."""
    return RankedResult(
        name=REVERSE_RULE,
        head=REVERSE_RULE,
        prompts=(),
        subtract=False,
        split=split,
        task=run.task.name,
        ties=ties,
        added={"rerank": None, "exclude_head": False, "reverse": True},
    )


def _with_figures(
    results: Sequence[RankedResult],
    ranks: Sequence[Floats],
    group: Positions,
    graph: Graph | None,
    split: str,
    metrics: Sequence[Metric],
    by_relation: bool,
) -> list[RankedResult]:
    """Return results with their figures, of all queries and of each part."""
    seeded = [own[None] for own in ranks]

    def figures(chosen: NDArray[np.bool_] | None = None) -> list[Part]:
        return measure_each(seeded, group, metrics, chosen=chosen)

    overall = figures()
    by_part: dict[str, list[Part]] = {}
    grouped: list[tuple[str, list[Part]]] = []
    n_categories = 0
    if graph is not None:
        by_part = {name: figures(chosen) for name, chosen in parts(graph, split).items()}
        if by_relation:
            grouped = [(name, figures(chosen)) for name, chosen in relation_parts(graph, split)]
            n_categories = len(grouped) - graph.n_relations
    return [
        replace(
            one,
            metrics=overall[i].metrics,
            parts={name: own[i] for name, own in by_part.items()},
            by_category={name: own[i] for name, own in grouped[:n_categories]},
            by_relation={name: own[i] for name, own in grouped[n_categories:]},
        )
        for i, one in enumerate(results)
    ]
