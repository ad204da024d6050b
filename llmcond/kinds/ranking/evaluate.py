"""Score how predictors rank right answers: fitted heads, zero-shot, and rules of the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmcond.arrays import Positions
from llmcond.data.datasets import DataOptions
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
from llmcond.prompts import Prompt
from llmcond.runs.extraction import LazyEncoder, extract_prompt
from llmcond.runs.predictors import AnyPredictor, asked_for, unscored, zeroshots
from llmcond.tasks import OTHERS
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
    examples, own, split = _examples(run, asked.data_options(), asked.split, prompts, asked.device)
    rows = examples.scored(own)
    plain = [one for prompt in prompts for one in zeroshots(run, prompt)]
    predictors: list[AnyPredictor] = [*plain, *fitted]
    terms = GraphTerms(examples, asked.rerank, asked.reverse, asked.exclude_head)
    ties = asked.ties or "realistic"
    log.info(f"ranking {len(rows.pair):,} queries of {split} by {len(predictors)} systems")
    described = [_described(one, run, split, ties, terms.to_json()) for one in predictors]
    systems = [examples.ranks(one, own, terms.of(one), terms.exclude_head) for one in predictors]
    if terms.context is not None:
        # What takes no training stands together.
        described.insert(len(plain), _rule(run, split, ties))
        by_rule = rank_rule(terms.context, examples.data.queries(own), examples.known)
        systems.insert(len(plain), by_rule)
    counted = [replace(one, counts=Counts.of(rows)) for one in described]
    ranks = [one.of(ties) for one in systems]
    graph = examples.data if isinstance(examples.data, Graph) else None
    by_relation = asked.by_relation
    scored = _with_figures(counted, ranks, rows.pair, graph, own, computed, by_relation)
    return RankedResults(tuple(scored), ranks, examples.rows(own))


def _examples(
    run: RankingRun, data: DataOptions, split: str | None, prompts: Sequence[Prompt], device: str
) -> tuple[QueryExamples, str, str]:
    """Return what is scored: the examples, their split, and what results call it."""
    if data.source is None:
        split = run.scored_split(split)
        return QueryExamples(run), split, split
    found, split = run.task.with_others(run.data, data, split)
    store, encoder = run.store_for_others(), LazyEncoder(run.resolve_encoder(device))
    for prompt in prompts:
        extract_prompt(store, encoder, prompt, QueryInputs(run.task.texts(found), prompt))
    return QueryExamples(run, found, store), OTHERS, split


def _described(
    predictor: AnyPredictor, run: RankingRun, split: str, ties: Ties, added: Mapping[str, Any]
) -> RankedResult:
    """Return the result of a predictor, without figures."""
    result = unscored(predictor, split, run.task.name)
    return RankedResult(
        **{item.name: getattr(result, item.name) for item in fields(result)},
        ties=ties,
        added=added,
        neighbours=bool(getattr(predictor.head.settings, "neighbours", False)),
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
    graph: Graph | None,
    split: str,
    metrics: Sequence[Metric],
    by_relation: bool,
) -> list[RankedResult]:
    """Return results with their figures, of all queries and of each part."""
    seeded = [own[None] for own in ranks]

    def figures(chosen: NDArray[np.bool_]) -> list[Part]:
        return measure_each(seeded, group, metrics, chosen=chosen)

    overall = measure_each(seeded, group, metrics)
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
