"""Score how predictors rank right answers: fitted heads, zero-shot, and rules of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from llmcond.errors import UserError
from llmcond.evaluation.ranked import RankedResult
from llmcond.evaluation.ranking import (
    Context,
    Part,
    Ranks,
    Term,
    fit_reverse,
    parts,
    rank_rule,
    relation_parts,
    resample_ranks,
)
from llmcond.evaluation.results import Counts, Results
from llmcond.log import log
from llmcond.metrics import Floats, Metric, choose_metrics
from llmcond.runs import RankingRun, Run
from llmcond.runs.predictors import AnyPredictor, fitted_heads, unscored
from llmcond.runs.ranking import QueryExamples
from llmcond.tasks.graph import Graph
from llmcond.workflows.options import RankingOptions

#: Options that need a knowledge graph.
_OF_GRAPHS = ("exclude_head", "rerank", "reverse", "by_relation")
#: What results call the rule that an edge goes both ways.
REVERSE_RULE = "rule:reverse"


@dataclass(frozen=True, slots=True)
class Rerank:
    """Neighbour re-ranking, as ``--rerank HOPS:ALPHA[:no-head]`` asks for it."""

    hops: int
    alpha: float
    head: bool = True

    @classmethod
    def parse(cls, text: str) -> Rerank:
        """Return what a text asks for; a UserError if it has another form."""
        words = text.split(":")
        try:
            hops, alpha = int(words[0]), float(words[1])
            legal = words[2:] in ([], ["no-head"]) and 1 <= hops <= 100 and np.isfinite(alpha)
        except (IndexError, ValueError):
            legal = False
        if not legal:
            raise UserError(
                f"--rerank is {text!r}; expected HOPS:ALPHA or HOPS:ALPHA:no-head, such as 5:0.05, "
                "with 1 to 100 hops."
            )
        return cls(hops, alpha, head=len(words) == 2)


def check_no_ranking(run: Run, options: RankingOptions) -> None:
    """Raise a UserError for options of rankings that a run of rated pairs is asked for."""
    for item in fields(options):
        if getattr(options, item.name) != item.default:
            raise UserError(
                f"--{item.name.replace('_', '-')} is of tasks that rank candidates, and "
                f"{run.folder} is a run of the task {run.task.name}. Leave it out."
            )


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
    fitted = fitted_heads(run, heads)
    prompts = list({p.name: p for head in fitted for p in head.view.prompts}.values())
    if not fitted or not heads:
        prompts = list(run.prompts().values())
    if not prompts:
        raise UserError(f"{run.folder} has no extracted features yet. Run `llmcond extract` first.")
    plain = [one for prompt in prompts for one in examples.zeroshots(prompt)]
    scorer = _Scorer(examples, split, options)
    predictors: list[AnyPredictor] = [*plain, *fitted]
    log.info(f"ranking {len(rows.pair):,} queries of {split} by {len(predictors)} systems")
    described = [scorer.described(one) for one in predictors]
    systems = [scorer.ranks(one) for one in predictors]
    if scorer.context is not None:
        # What takes no training stands together.
        described.insert(len(plain), scorer.rule)
        by_rule = rank_rule(scorer.context, examples.data.queries(split), examples.known)
        systems.insert(len(plain), by_rule)
    ranks = [own.of(options.ties or "realistic")[None] for own in systems]
    return Results(tuple(_with_figures(described, ranks, Counts.of(rows), computed, scorer)))


class _Scorer:
    """Ranks of a split's answers with what the options add to scores."""

    def __init__(self, examples: QueryExamples, split: str, options: RankingOptions) -> None:
        self.examples, self.split, self.options = examples, split, options
        data = examples.data
        self.graph = data if isinstance(data, Graph) else None
        self.context = None if self.graph is None else Context.of(self.graph)
        self._rerank = None if options.rerank is None else Rerank.parse(options.rerank)
        of_graphs = [name for name in _OF_GRAPHS if getattr(options, name)]
        if self.graph is None and of_graphs:
            raise UserError(
                f"--{of_graphs[0].replace('_', '-')} is of knowledge graphs, and "
                f"{examples.run.folder} holds none. Leave it out."
            )

    def described(self, predictor: AnyPredictor) -> RankedResult:
        """Return the result of a predictor, without figures."""
        result = unscored(predictor, self.split, self.examples.run.task.name)
        head = predictor.head
        own = {item.name: getattr(result, item.name) for item in fields(result)}
        return RankedResult(
            **own,
            ties=self.options.ties or "realistic",
            added=self._added(),
            neighbours=bool(getattr(head and head.settings, "neighbours", False)),
        )

    @property
    def rule(self) -> RankedResult:
        """Return the result of the reversed edge alone, without figures."""
        return RankedResult(
            name=REVERSE_RULE,
            head=REVERSE_RULE,
            prompts=(),
            subtract=False,
            split=self.split,
            task=self.examples.run.task.name,
            ties=self.options.ties or "realistic",
            added={"rerank": None, "exclude_head": False, "reverse": True},
        )

    def _added(self) -> dict[str, Any]:
        options = self.options
        return {
            "rerank": options.rerank,
            "exclude_head": options.exclude_head,
            "reverse": options.reverse,
        }

    def ranks(self, predictor: AnyPredictor) -> Ranks:
        """Return the ranks of a split's answers."""
        terms: list[Term] = []
        if self._rerank is not None and self.context is not None:
            own = self._rerank
            terms.append(self.context.hops(own.hops, own.alpha, own.head))
        if self.options.reverse and self.context is not None:
            terms.append(self.context.reverse(self._weights(predictor, terms)))
        return self.examples.ranks(predictor, self.split, terms, self.options.exclude_head)

    def _weights(self, predictor: AnyPredictor, terms: Sequence[Term]) -> Floats:
        """Return what a reversed edge adds under each relation, as dev has it."""
        assert self.context is not None  # noqa: S101 - the caller saw to that
        queries = self.examples.data.queries("dev")
        vectors, candidates = self.examples.vectors(predictor, queries[:, 0], queries[:, 1])
        return fit_reverse(
            vectors,
            candidates,
            queries,
            self.examples.known,
            self.context,
            terms,
            self.options.exclude_head,
        )


def _with_figures(
    results: Sequence[RankedResult],
    ranks: Sequence[Floats],
    counts: Counts,
    metrics: Sequence[Metric],
    scorer: _Scorer,
) -> list[RankedResult]:
    """Return results with their figures, of all queries and of each part."""

    def figures(chosen: Any) -> list[Part]:
        n = int(chosen.sum())
        if not n:
            return [Part(0, {}) for _ in results]
        found = resample_ranks(ranks, metrics, chosen=chosen)
        return [Part(n, found.estimates(i)) for i in range(len(results))]

    overall = resample_ranks(ranks, metrics)
    by_part: dict[str, list[Part]] = {}
    grouped: list[tuple[str, list[Part]]] = []
    n_categories = 0
    if scorer.graph is not None:
        by_part = {k: figures(own) for k, own in parts(scorer.graph, scorer.split).items()}
        if scorer.options.by_relation:
            found = relation_parts(scorer.graph, scorer.split)
            grouped = [(name, figures(own)) for name, own in found]
            n_categories = len(grouped) - scorer.graph.n_relations
    return [
        replace(
            one,
            counts=counts,
            metrics=overall.estimates(i),
            parts={name: own[i] for name, own in by_part.items()},
            by_category={name: own[i] for name, own in grouped[:n_categories]},
            by_relation={name: own[i] for name, own in grouped[n_categories:]},
        )
        for i, one in enumerate(results)
    ]
