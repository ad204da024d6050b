"""Options of what ranks candidates: entities of a knowledge graph, or turns of a dialogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from llmcond.options import Positive, Ties, option
from llmcond.workflows.options.common import WithHead

_RANKING = "ranking, of tasks that rank candidates"
_GRAPH = "ranking, of knowledge graphs (task kgc)"
_DIALOGUE = "ranking, of dialogues (task dialogue)"
_PLANNING = "planning, of dialogues (task dialogue)"


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """What a knowledge graph itself adds to the scores of entities."""

    rerank: str | None = option(
        None,
        metavar="HOPS:ALPHA[:no-head]",
        help="add ALPHA to entities within so many links of the head in train (SimKGC: 5:0.05); "
        "no-head: not to the head itself",
        group=_GRAPH,
    )
    reverse: bool = option(
        False,
        help="add a weight to entities that have the same relation to the head in train; it is "
        "fitted on dev, one for each relation",
        group=_GRAPH,
    )


@dataclass(frozen=True, kw_only=True)
class TripleOptions(GraphOptions):
    """Which triple is completed, and among which entities."""

    relation: str = option(metavar="REL", help="id or name")
    head_entity: str | None = option(
        None, metavar="E", help="id or name: complete (E, relation, ?)"
    )
    tail_entity: str | None = option(
        None, metavar="E", help="id or name: complete (?, relation, E)"
    )
    k: Positive = option(10, flag="-k", metavar="K", help="how many entities")
    filtered: bool = option(True, help="leave out what some split of the data has")
    exclude_head: bool = option(True, help="leave out the entity that is asked of")


@dataclass(frozen=True, kw_only=True)
class CompleteOptions(TripleOptions, WithHead):
    """Which triple is completed, by which head of which run."""


@dataclass(frozen=True, kw_only=True)
class TiesOption:
    """How right answers rank among equals, in every task that ranks candidates.

    Attributes:
        of: the kind of task that options are of, and how messages say it.
    """

    of: ClassVar[tuple[str, str]] = "", "tasks that rank candidates"

    ties: Ties | None = option(
        None,
        help="how an answer ranks among candidates of its score: in their middle, first or last "
        "(default: realistic)",
        group=_RANKING,
    )


@dataclass(frozen=True, kw_only=True)
class RankingOptions(GraphOptions, TiesOption):
    """How candidates are ranked, in runs of knowledge graphs."""

    of: ClassVar[tuple[str, str]] = "ranking", "knowledge graphs"

    exclude_head: bool = option(
        False,
        help="a query's own head entity is no candidate, unless it is the answer",
        group=_GRAPH,
    )
    by_relation: bool = option(
        False,
        help="figures of each relation and category of relations as well, with --json",
        group=_GRAPH,
    )


@dataclass(frozen=True, kw_only=True)
class DialogueOptions(TiesOption):
    """How the next turns of dialogues are ranked, or planned for."""

    of: ClassVar[tuple[str, str]] = "dialogue", "dialogues"

    history: str | None = option(
        None,
        metavar="FROM-TO",
        help="turns that are given, such as 2-10 or 2,5 (default: 2-10; with --plan 2,5)",
        group=_DIALOGUE,
    )
    score: Sequence[str] = option(
        (),
        metavar="NAME",
        help="average, last:L (last:2), bi, neighbours, maxsim, weighted (default: what a head was "
        "fitted for; zero-shot by several)",
        group=_DIALOGUE,
    )
    candidates: str | None = option(
        None,
        metavar="POOL",
        help="same-depth: the turns at the answer's place in all dialogues; all: every turn that "
        "answers; or a file of texts, one a line (default: same-depth)",
        group=_DIALOGUE,
    )
    plan: str | None = option(
        None,
        metavar="POOL",
        help="rank turns by how well they lead to a later one, the goal, among 100 others: "
        "retrieved, same-depth, random, or a file of samples (.jsonl)",
        group=_PLANNING,
    )
    distance: str | None = option(
        None,
        metavar="FROM-TO",
        help="turns from the answer to the goal (default: 1-4)",
        group=_PLANNING,
    )
    generate: str | None = option(
        None,
        metavar="MODEL",
        help="plan among what a causal language model says, a hub name or a folder; kept in the "
        "run, and made once",
        group=_PLANNING,
    )
    samples: Positive | None = option(
        None,
        metavar="N",
        help="candidates that it makes for each history (default: 100)",
        group=_PLANNING,
    )

    @property
    def plans(self) -> bool:
        """Return whether planning is asked for."""
        return self.plan is not None or self.generate is not None


@dataclass(frozen=True, kw_only=True)
class ReplyOptions(WithHead):
    """What was said so far, and what may be said next."""

    turns: Sequence[str] = option(flag="", metavar="TURN", help="what was said so far, in order")
    candidates: str | Path = option(
        metavar="FILE",
        help="what may come next: a text file, one a line, or a table with a column text",
    )
    goal: str | None = option(
        None, metavar="TEXT", help="a later turn that the candidates are to lead to"
    )
    score: str | None = option(
        None,
        metavar="NAME",
        help="average, last:L (last:2), bi, neighbours, maxsim, weighted (default: what the head "
        "was fitted for)",
    )
    k: Positive = option(3, flag="-k", metavar="K", help="how many candidates are shown")
