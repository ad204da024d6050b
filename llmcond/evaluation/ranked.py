"""Results of rankings: how right answers rank, and by what candidates were scored."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from llmcond.data.queries import QueryRows
from llmcond.evaluation.ranking import Part
from llmcond.evaluation.results import Result, Results
from llmcond.metrics import Floats, finite
from llmcond.options import Ties


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryResult(Result):
    """How one system ranks the answers of a split's queries.

    Attributes:
        ties: how an answer ranks among candidates of its score.
    """

    ties: Ties = "realistic"

    @property
    @abstractmethod
    def variant(self) -> tuple[str, str]:
        """Return what tells it from others of its head and prompt: of what kind, and which."""

    @property
    @abstractmethod
    def grouped(self) -> Mapping[str, Mapping[str, Part]]:
        """Return figures of some of the queries: by what they are parted, the part, its own."""


Q_co = TypeVar("Q_co", bound=QueryResult, covariant=True)


@dataclass(frozen=True)
class RankedResults(Results[Q_co]):
    """Results of rankings, and the ranks behind them.

    Attributes:
        ranks: of each result (m,) the ranks of the queries' right answers.
        queries: the m queries.
    """

    ranks: Sequence[Floats]
    queries: QueryRows


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedResult(QueryResult):
    """What one system scores on the queries of a split.

    Attributes:
        added: what scores had added, or candidates left out, by the names of options; values are
            those of options, and nothing where it was not asked for.
        neighbours: whether the head reads entities with their neighbours in train.
        parts: figures of some of the queries: ``forward``, ``backward``, ...
        by_category, by_relation: of queries by relation, where asked for.
    """

    added: Mapping[str, Any] = field(default_factory=dict)
    neighbours: bool = False
    parts: Mapping[str, Part] = field(default_factory=dict)
    by_category: Mapping[str, Part] = field(default_factory=dict)
    by_relation: Mapping[str, Part] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as ``evaluate --json`` prints it."""
        grouped = {"by_category": self.by_category, "by_relation": self.by_relation}
        return {
            **self.scored_json(ties=self.ties, **self.added, neighbours=self.neighbours),
            **{name: part.to_json() for name, part in self.parts.items()},
            **{
                name: {key: part.to_json() for key, part in parts.items()}
                for name, parts in grouped.items()
                if parts
            },
        }

    @property
    def variant(self) -> tuple[str, str]:
        """Return what scores were made of besides embeddings."""
        added = self.added.get
        made_of = {
            "neighbours": self.neighbours,
            "reversed edge": added("reverse"),
            f"hops {added('rerank')}": added("rerank"),
            "head left out": added("exclude_head"),
        }
        return "with", ", ".join(name for name, is_so in made_of.items() if is_so)

    @property
    def grouped(self) -> Mapping[str, Mapping[str, Part]]:
        """See :class:`QueryResult`."""
        found = {
            "part": self.parts,
            "category of relations": self.by_category,
            "relation": self.by_relation,
        }
        return {name: parts for name, parts in found.items() if parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class DialogueResult(QueryResult):
    """How one system ranks the next turns of a split's dialogues.

    Attributes:
        score: how dialogues are compared with candidates.
        candidates: what is ranked: ``same-depth``, ``all``, or the name of a file.
        median_rank: of all queries.
        by_history: of queries with so many turns before them.
    """

    score: str = ""
    candidates: str = ""
    median_rank: float = math.nan
    by_history: Mapping[str, Part] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as ``evaluate --json`` prints it."""
        return {
            **self.scored_json(ties=self.ties, score=self.score, candidates=self.candidates),
            "median_rank": finite(self.median_rank),
            "by_history": {name: part.to_json() for name, part in self.by_history.items()},
        }

    @property
    def variant(self) -> tuple[str, str]:
        """Return how dialogues are compared with candidates."""
        return "score", self.score

    @property
    def grouped(self) -> Mapping[str, Mapping[str, Part]]:
        """See :class:`QueryResult`."""
        return {"number of turns before": self.by_history}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult(QueryResult):
    """How one system ranks turns that lead to a goal; figures are means over cells.

    Attributes:
        score: ``plan`` (equation 4), or without a goal that of next turns.
        plan: where the other candidates are from.
        goal: whether the goal is known, or the context only.
        cells: of queries by turns before them, and from them to the goal: ``2+1``.
    """

    score: str = ""
    plan: str = ""
    goal: bool = True
    cells: Mapping[str, Part] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as ``evaluate --json`` prints it."""
        about = {"ties": self.ties, "score": self.score, "plan": self.plan, "goal": self.goal}
        cells = {name: part.to_json() for name, part in self.cells.items()}
        return {**self.scored_json(**about), "cells": cells}

    @property
    def variant(self) -> tuple[str, str]:
        """Return whether the goal is known."""
        return "goal", "known" if self.goal else "context only"

    @property
    def grouped(self) -> Mapping[str, Mapping[str, Part]]:
        """See :class:`QueryResult`."""
        return {"turns before + turns to the goal": self.cells}
