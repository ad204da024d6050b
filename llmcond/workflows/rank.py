"""Score how predictors rank right answers: fitted heads, zero-shot, and rules of the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Positions
from llmcond.evaluation.graph import parts, rank_rule, relation_parts
from llmcond.evaluation.ranked import RankedResult
from llmcond.evaluation.ranking import Part, measure_each
from llmcond.evaluation.results import Counts, Results
from llmcond.log import log
from llmcond.metrics import Floats, Metric, choose_metrics
from llmcond.options import Ties
from llmcond.runs import RankingRun
from llmcond.runs.predictors import AnyPredictor, asked_for, unscored
from llmcond.runs.ranking import QueryExamples
from llmcond.runs.terms import GraphTerms
from llmcond.tasks import QueryData
from llmcond.tasks.graph import Graph
from llmcond.workflows.options import RankingOptions

#: What results call the rule that an edge goes both ways.
REVERSE_RULE = "rule:reverse"


def evaluate_ranking(
    run: RankingRun,
    heads: Sequence[str],
    split: str | None,
    options: RankingOptions,
    metrics: Sequence[str] = (),
) -> Results[RankedResult]:
    """Rank the answers of a split by a run's heads, by zero-shot, and by the reversed edge alone.

    Arguments as in :func:`llmcond.workflows.evaluate.evaluate`.
    """
    examples, split = QueryExamples(run), split or run.default_split()
    rows = examples.scored(split)
    computed = choose_metrics(run.task.metrics, metrics)
    fitted, prompts = asked_for(run, heads)
    plain = [one for prompt in prompts for one in examples.zeroshots(prompt)]
    predictors: list[AnyPredictor] = [*plain, *fitted]
    terms = GraphTerms(examples, options.rerank, options.reverse, options.exclude_head)
    ties = options.ties or "realistic"
    log.info(f"ranking {len(rows.pair):,} queries of {split} by {len(predictors)} systems")
    described = [_described(one, run, split, ties, terms.to_json()) for one in predictors]
    systems = [examples.ranks(one, split, terms.of(one), terms.exclude_head) for one in predictors]
    if terms.context is not None:
        # What takes no training stands together.
        described.insert(len(plain), _rule(run, split, ties))
        by_rule = rank_rule(terms.context, examples.data.queries(split), examples.known)
        systems.insert(len(plain), by_rule)
    counted = [replace(one, counts=Counts.of(rows)) for one in described]
    ranks = [own.of(ties)[None] for own in systems]
    by_relation = options.by_relation
    scored = _with_figures(counted, ranks, rows.pair, examples.data, computed, by_relation)
    return Results(tuple(scored))


def _described(
    predictor: AnyPredictor, run: RankingRun, split: str, ties: Ties, added: Mapping[str, Any]
) -> RankedResult:
    """Return the result of a predictor, without figures."""
    result, head = unscored(predictor, split, run.task.name), predictor.head
    return RankedResult(
        **{item.name: getattr(result, item.name) for item in fields(result)},
        ties=ties,
        added=added,
        neighbours=bool(head and getattr(head.settings, "neighbours", False)),
    )


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
    data: QueryData,
    metrics: Sequence[Metric],
    by_relation: bool,
) -> list[RankedResult]:
    """Return results with their figures, of all queries and of each part."""

    def figures(chosen: NDArray[np.bool_]) -> list[Part]:
        return measure_each(ranks, group, metrics, chosen=chosen)

    overall, split = measure_each(ranks, group, metrics), results[0].split
    by_part: dict[str, list[Part]] = {}
    grouped: list[tuple[str, list[Part]]] = []
    n_categories = 0
    if isinstance(data, Graph):
        by_part = {name: figures(chosen) for name, chosen in parts(data, split).items()}
        if by_relation:
            grouped = [(name, figures(chosen)) for name, chosen in relation_parts(data, split)]
            n_categories = len(grouped) - data.n_relations
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
