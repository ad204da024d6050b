"""What a knowledge graph adds to scores, or leaves out of the candidates, as options ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmcond.errors import UserError
from llmcond.evaluation.ranking import Term
from llmcond.kinds.ranking.examples import QueryExamples
from llmcond.kinds.ranking.graph import Graph
from llmcond.kinds.ranking.rules import Context, fit_reverse
from llmcond.runs.predictors import AnyPredictor


def _parse_rerank(text: str) -> tuple[int, float, bool]:
    """Return the hops, ALPHA, and whether the head counts, of ``HOPS:ALPHA[:no-head]``.

    Raises:
        UserError: the text has another form.
    """
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
    return hops, alpha, len(words) == 2


class GraphTerms:
    """The terms of a run's graph.

    Attributes:
        context: its train graph; None where the run holds no graph.
        exclude_head: whether a query's head is no candidate.
    """

    def __init__(
        self,
        examples: QueryExamples,
        rerank: str | None = None,
        reverse: bool = False,
        exclude_head: bool = False,
    ) -> None:
        """Check the options.

        Raises:
            UserError: a ``rerank`` of another form, or options of graphs where there is none.
        """
        self._examples, self.exclude_head = examples, exclude_head
        self._asked, self._reverse = rerank, reverse
        self._rerank = None if rerank is None else _parse_rerank(rerank)
        data, folder = examples.data, examples.run.folder
        self.context = Context.of(data) if isinstance(data, Graph) else None
        if self.context is None and any(self.to_json().values()):
            raise UserError(
                f"--rerank, --reverse and --exclude-head are of knowledge graphs, and {folder} "
                "holds none. Leave them out."
            )

    def to_json(self) -> Mapping[str, Any]:
        """Return what was asked for, as results have it."""
        return {"rerank": self._asked, "exclude_head": self.exclude_head, "reverse": self._reverse}

    def of(self, predictor: AnyPredictor) -> list[Term]:
        """Return what is added to a predictor's scores; the reversed edge as much as dev has it."""
        terms: list[Term] = []
        if self.context is None:
            return terms
        if self._rerank is not None:
            terms.append(self.context.hops(*self._rerank))
        if self._reverse:
            queries, known = self._examples.data.queries("dev"), self._examples.known
            vectors, candidates = self._examples.vectors(predictor, queries[:, 0], queries[:, 1])
            weights = fit_reverse(
                vectors, candidates, queries, known, self.context, terms, self.exclude_head
            )
            terms.append(self.context.reverse(weights))
        return terms
