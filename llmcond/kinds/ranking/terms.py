"""The terms that a knowledge graph adds to scores, according to the options of a command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmcond.errors import UserError
from llmcond.evaluation.ranking import Term
from llmcond.kinds.ranking.examples import QueryExamples
from llmcond.kinds.ranking.graph import Graph
from llmcond.kinds.ranking.rules import TrainGraph, fit_reverse_weights
from llmcond.runs.examples import AnyPredictor


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
