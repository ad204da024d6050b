"""Results of rankings: how right answers rank, and by what candidates were scored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcond.evaluation.ranking import Part
from llmcond.evaluation.results import Result
from llmcond.metrics import finite
from llmcond.options import Ties


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedResult(Result):
    """What one system scores on the queries of a split.

    Attributes:
        ties: how an answer ranks among candidates of its score.
        added: what scores had added, or candidates left out, by the names of options; values are
            those of options, and nothing where it was not asked for.
        neighbours: whether the head reads entities with their neighbours in train.
        parts: figures of some of the queries: ``forward``, ``backward``, ...
        by_category, by_relation: of queries by relation, where asked for.
    """

    ties: Ties = "realistic"
    added: Mapping[str, Any] = field(default_factory=dict)
    neighbours: bool = False
    parts: Mapping[str, Part] = field(default_factory=dict)
    by_category: Mapping[str, Part] = field(default_factory=dict)
    by_relation: Mapping[str, Part] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as ``evaluate --json`` prints it."""
        grouped = {"by_category": self.by_category, "by_relation": self.by_relation}
        return {
            **self.identity_json(),
            "ties": self.ties,
            **self.added,
            "neighbours": self.neighbours,
            **self.metrics_json(deviations=False),
            "seed": self.seeds[0] if self.seeds else None,
            "selected_on": self.fits[0].get("selected_on") if self.fits else None,
            **{name: part.to_json() for name, part in self.parts.items()},
            **{
                name: {key: part.to_json() for key, part in parts.items()}
                for name, parts in grouped.items()
                if parts
            },
        }

    @property
    def terms(self) -> str:
        """Return what scores were made of besides embeddings, for tables."""
        named = {
            "neighbours": "neighbours" if self.neighbours else "",
            "reverse": "reversed edge" if self.added.get("reverse") else "",
            "rerank": f"hops {self.added['rerank']}" if self.added.get("rerank") else "",
            "exclude_head": "head left out" if self.added.get("exclude_head") else "",
        }
        return ", ".join(text for text in named.values() if text)


@dataclass(frozen=True, slots=True, kw_only=True)
class DialogueResult(Result):
    """How one system ranks the next turns of a split's dialogues.

    Attributes:
        ties: how an answer ranks among candidates of its score.
        score: how dialogues are compared with candidates.
        candidates: what is ranked: ``same-depth``, ``all``, or the name of a file.
        median_rank: of all queries.
        by_history: of queries with so many turns before them.
    """

    ties: Ties = "realistic"
    score: str = ""
    candidates: str = ""
    median_rank: float = math.nan
    by_history: Mapping[str, Part] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as ``evaluate --json`` prints it."""
        about = {"ties": self.ties, "score": self.score, "candidates": self.candidates}
        return {
            **_ranked_json(self, about),
            "median_rank": finite(self.median_rank),
            "by_history": {name: part.to_json() for name, part in self.by_history.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult(Result):
    """How one system ranks turns that lead to a goal; figures are means over cells.

    Attributes:
        ties: how an answer ranks among candidates of its score.
        score: ``plan`` (equation 4), or without a goal that of next turns.
        plan: where the other candidates are from.
        goal: whether the goal is known, or the context only.
        cells: of queries by turns before them, and from them to the goal: ``2+1``.
    """

    ties: Ties = "realistic"
    score: str = ""
    plan: str = ""
    goal: bool = True
    cells: Mapping[str, Part] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as ``evaluate --json`` prints it."""
        about = {"ties": self.ties, "score": self.score, "plan": self.plan, "goal": self.goal}
        return {
            **_ranked_json(self, about),
            "cells": {name: part.to_json() for name, part in self.cells.items()},
        }


def _ranked_json(result: Result, about: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **result.identity_json(),
        **about,
        **result.metrics_json(deviations=False),
        "seed": result.seeds[0] if result.seeds else None,
        "selected_on": result.fits[0].get("selected_on") if result.fits else None,
    }
