"""Results of rankings: the ranks of right answers, and how candidates were scored."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from typing_extensions import override

from llmcond.data.rows import QueryRows
from llmcond.evaluation.ranking import QuerySubset
from llmcond.evaluation.results import Result, Results
from llmcond.metrics import Floats, finite_or_none
from llmcond.options import Ties


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryResult(Result):
    """The result of one system's ranking of the answers of a split's queries.

    Attributes:
        ties: The rank of an answer among candidates with the same score.
    """

    ties: Ties = "realistic"

    @property
    @abstractmethod
    def variant(self) -> tuple[str, str]:
        """The kind and the name of the variant, if a head and prompt have several results."""

    @property
    @abstractmethod
    def subsets(self) -> Mapping[str, Mapping[str, QuerySubset]]:
        """The figures of subsets of queries, by the kind of subset and by its name."""


Q_co = TypeVar("Q_co", bound=QueryResult, covariant=True)


@dataclass(frozen=True)
class RankedResults(Results[Q_co]):
    """Results of rankings, with the ranks that they are computed from.

    Attributes:
        ranks: For each result, the ranks, (m,), of the queries' right answers.
        queries: The m queries.
    """

    ranks: Sequence[Floats]
    queries: QueryRows


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedResult(QueryResult):
    """The scores of one system on the queries of a split.

    Attributes:
        added: The values of options that add to scores, or exclude candidates, by option; an option
            that is not used is missing.
        neighbours: Whether the head reads entities with their neighbours in train.
        parts: The figures of subsets of queries: ``forward``, ``backward``, ...
        by_category: The figures by category of relations, if requested.
        by_relation: The figures by relation, if requested.
    """

    added: Mapping[str, Any] = field(default_factory=dict)
    neighbours: bool = False
    parts: Mapping[str, QuerySubset] = field(default_factory=dict)
    by_category: Mapping[str, QuerySubset] = field(default_factory=dict)
    by_relation: Mapping[str, QuerySubset] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of ``evaluate``."""
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
    @override
    def variant(self) -> tuple[str, str]:
        """The components of scores in addition to embeddings."""
        added = self.added.get
        additions = {
            "neighbours": self.neighbours,
            "reversed edge": added("reverse"),
            f"hops {added('rerank')}": added("rerank"),
            "head left out": added("exclude_head"),
        }
        return "with", ", ".join(name for name, is_so in additions.items() if is_so)

    @property
    @override
    def subsets(self) -> Mapping[str, Mapping[str, QuerySubset]]:
        groups = {
            "part": self.parts,
            "category of relations": self.by_category,
            "relation": self.by_relation,
        }
        return {name: parts for name, parts in groups.items() if parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class DialogueResult(QueryResult):
    """The result of one system's ranking of the next turns of a split's dialogues.

    Attributes:
        score: The score that compares dialogues with candidates.
        candidates: The ranked candidates: ``same-depth``, ``all``, or the name of a file.
        median_rank: The median rank over all queries.
        by_history: The figures by the number of previous turns.
    """

    score: str = ""
    candidates: str = ""
    median_rank: float = math.nan
    by_history: Mapping[str, QuerySubset] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of ``evaluate``."""
        return {
            **self.scored_json(ties=self.ties, score=self.score, candidates=self.candidates),
            "median_rank": finite_or_none(self.median_rank),
            "by_history": {name: part.to_json() for name, part in self.by_history.items()},
        }

    @property
    @override
    def variant(self) -> tuple[str, str]:
        """The score that compares dialogues with candidates."""
        return "score", self.score

    @property
    @override
    def subsets(self) -> Mapping[str, Mapping[str, QuerySubset]]:
        return {"number of turns before": self.by_history}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult(QueryResult):
    """The result of one system's ranking of turns that lead to a goal, as means over cells.

    Attributes:
        score: ``plan`` (equation 4) or ``plan-bi`` (the candidate alone); without a goal, the score
            of next turns.
        plan: The source of the other candidates.
        goal: Whether the goal is known in addition to the context.
        cells: The figures by the number of previous turns and of turns to the goal, such as
            ``2+1``.
    """

    score: str = ""
    plan: str = ""
    goal: bool = True
    cells: Mapping[str, QuerySubset] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON output of ``evaluate``."""
        about = {"ties": self.ties, "score": self.score, "plan": self.plan, "goal": self.goal}
        cells = {name: part.to_json() for name, part in self.cells.items()}
        return {**self.scored_json(**about), "cells": cells}

    @property
    @override
    def variant(self) -> tuple[str, str]:
        """Whether the goal is known, and the context."""
        known = "known, without context" if self.score == "plan-bi" else "known"
        return "goal", known if self.goal else "context only"

    @property
    @override
    def subsets(self) -> Mapping[str, Mapping[str, QuerySubset]]:
        return {"turns before + turns to the goal": self.cells}
