"""Options of commands that score or explain heads, compare prompts, or rank candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from annotated_types import Ge

from llmcond.base.files import PAGE_SUFFIXES, check_folder, file_output
from llmcond.base.options import Options, Positive, Seed, Ties, option
from llmcond.data.readers import FILES
from llmcond.options.common import (
    DATA,
    ColumnOptions,
    DeviceOption,
    FigureOption,
    HeadOptions,
    MetricOption,
    RunOption,
    RunOptions,
    SplitOption,
    TextInputOptions,
)
from llmcond.options.training import TrialOptions

_RANKING = "ranking (tasks kgc and dialogue)"
_PLANNING = "planning in a dialogue (task dialogue)"
_SCORES = (
    "average, last:L (such as last:2), neighbours, bi, maxsim, weighted, average+bi, average:b1, "
    "average:b2, bi:b1, bi:both"
)


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """Options that adjust the scores of entities by links of the knowledge graph."""

    option_group: ClassVar[str] = "ranking entities of a knowledge graph (task kgc)"

    rerank: str | None = option(
        None,
        metavar="HOPS:ALPHA[:no-head]",
        help="add ALPHA to the score of entities within HOPS links of the head entity in train "
        "(SimKGC: 5:0.05); no-head: except to the head entity itself",
    )
    reverse: bool = option(
        False,
        help="add a weight to the score of entities that have the same relation to the head entity "
        "in train; one weight per relation is fitted on dev",
    )


@dataclass(frozen=True, kw_only=True)
class TripleOptions(GraphOptions):
    """Options that name the triple to complete and the candidate entities."""

    relation: str = option(metavar="REL", help="relation of the triple, by id or name")
    head_entity: str | None = option(
        None, metavar="E", help="head entity, by id or name: complete (E, relation, ?)"
    )
    tail_entity: str | None = option(
        None, metavar="E", help="tail entity, by id or name: complete (?, relation, E)"
    )
    k: Positive = option(10, flag="-k", metavar="K", help="number of entities to show")
    filtered: bool = option(
        True,
        help="leave out entities that complete the triple in any split of the data",
    )
    exclude_head: bool = option(True, help="leave out the entity that the query names")


@dataclass(frozen=True, kw_only=True)
class CompleteOptions(TripleOptions, RunOption, HeadOptions):
    """Options of ``llmcond complete``: the triple, and the run and head that complete it."""


@dataclass(frozen=True, kw_only=True)
class TiesOption:
    """Options of every task that ranks candidates: how ties are ranked.

    Attributes:
        task_kind: the kind of task that the options apply to, and its name in messages.
    """

    task_kind: ClassVar[tuple[str, str]] = "", "tasks that rank candidates"

    ties: Ties | None = option(
        None,
        help="rank of the right answer among candidates with the same score: realistic (in their "
        "middle), optimistic (first) or pessimistic (last) (default: realistic)",
        group=_RANKING,
    )


@dataclass(frozen=True, kw_only=True)
class RankingOptions(GraphOptions, TiesOption):
    """Options of ranking in runs of knowledge graphs."""

    option_group: ClassVar[str] = "ranking entities of a knowledge graph (task kgc)"

    task_kind: ClassVar[tuple[str, str]] = "ranking", "knowledge graphs"

    exclude_head: bool = option(
        False,
        help="exclude a query's head entity from its candidates, unless it is the answer",
    )
    by_relation: bool = option(
        False,
        help="with --json: also print the scores of each relation and relation category",
    )


@dataclass(frozen=True, kw_only=True)
class DialogueOptions(TiesOption):
    """Options of ranking, or planning towards, the next turn of a dialogue."""

    option_group: ClassVar[str] = "ranking turns of a dialogue (task dialogue)"

    task_kind: ClassVar[tuple[str, str]] = "dialogue", "dialogues"

    history: str | int | None = option(
        None,
        metavar="FROM-TO",
        help="history lengths in turns, such as 2-10 or 2,5 (default: 2-10, with --plan 2,5)",
    )
    score: Sequence[str] = option(
        (),
        help=f"scoring functions: {_SCORES}; joined: encode all turns as one text (default: the "
        "one that the head was fitted for, or several for zero-shot). With --plan: average, bi "
        "(default: average)",
    )
    candidates: str | None = option(
        None,
        metavar="POOL",
        help="candidate pool. same-depth: the turns at the answer's position in all dialogues; "
        "all: every turn that answers a history; or a text file with one candidate per line "
        "(default: same-depth)",
    )
    plan: str | None = option(
        None,
        metavar="POOL",
        help="rank the answer among 100 other turns by how well it leads to a later turn, the "
        "goal. Source of the others: retrieved, same-depth, random, or a .jsonl file of samples",
        conflicts="--candidates or --metric",
        group=_PLANNING,
    )
    distance: str | int | None = option(
        None,
        metavar="FROM-TO",
        help="number of turns from the answer to the goal (default: 1-4)",
        needs="--plan POOL or --generate MODEL",
        group=_PLANNING,
    )
    generate: str | None = option(
        None,
        metavar="MODEL",
        help="causal language model, a hub name or folder, that generates the candidates of the "
        "plan; they are generated once and stored in the run",
        conflicts="--plan or --data or --candidates or --metric",
        group=_PLANNING,
    )
    samples: Positive | None = option(
        None,
        help="with --generate: number of candidates to generate for each history (default: 100)",
        needs="--generate MODEL",
        group=_PLANNING,
    )

    @property
    def plans(self) -> bool:
        """Whether the options request planning."""
        return self.plan is not None or self.generate is not None


@dataclass(frozen=True, kw_only=True)
class ReplyOptions(RunOption, HeadOptions, TextInputOptions):
    """Options of ``llmcond reply``: the dialogue so far, and the candidates for its next turn."""

    turns: Sequence[str] = option(
        flag="", metavar="TURN", help="turns of the dialogue so far, in order"
    )
    candidates: str | Path = option(
        help="candidates for the next turn: a text file with one per line, a table with a "
        "column text, or - for standard input"
    )
    goal: str | None = option(
        None,
        metavar="TEXT",
        help="later turn that the candidates should lead to",
        conflicts="--score",
    )
    score: str | None = option(
        None,
        help=f"scoring function: {_SCORES} (default: the one that the head was fitted for)",
    )
    k: Positive = option(3, flag="-k", metavar="K", help="number of candidates to show")


#: Analyses of rated pairs, and of dialogues.
RatedAnalysis = Literal["isotropy", "clusters", "conditions", "norms", "examples", "answers"]
DialogueAnalysis = Literal["similarity", "turns"]
Analysis = Literal[RatedAnalysis, DialogueAnalysis]


@dataclass(frozen=True, kw_only=True)
class ReportOption(Options):
    """Options of commands that write a report of scores."""

    report: str | Path | None = option(
        None,
        metavar="FILE.html",
        writes=file_output(*PAGE_SUFFIXES),
        help="HTML report to write, with charts, texts and settings",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(
    ReportOption,
    RunOption,
    ColumnOptions,
    SplitOption,
    MetricOption,
    DeviceOption,
    DialogueOptions,
    RankingOptions,
):
    """Options of ``llmcond evaluate``: the heads and rows to score, and the files to write."""

    head: Sequence[str] = option(
        (),
        help="fitted heads to score, next to zero-shot with their prompts; none: only zero-shot "
        "(default: all)",
    )
    data: Any = option(
        None,
        source=DATA,
        help=f"other rows to score: {DATA}; a single file is scored as a whole (default: the data "
        "of the run)",
    )
    predictions: str | Path | None = option(
        None,
        metavar="FILE.csv",
        writes=file_output(".csv"),
        help="file to write the prediction for each row to: its similarity, or the rank of its "
        "answer",
    )


@dataclass(frozen=True, kw_only=True)
class AnalyseOptions(RunOption, SplitOption, FigureOption):
    """Options of ``llmcond analyse``: the heads to explain, and the analyses."""

    head: Sequence[str] = option((), help="fitted heads to explain (default: all)")
    what: Sequence[Analysis] = option(
        (),
        metavar="NAME",
        help=f"analyses to run: {', '.join(get_args(RatedAnalysis))}; of dialogues: "
        f"{', '.join(get_args(DialogueAnalysis))} (default: all; answers only with --answers)",
    )
    answers: Any = option(
        None,
        source=FILES,
        help="table of sentence pairs to compare before and after each head: columns sentence1, "
        "sentence2 and condition, and optionally answer1 and answer2, the words in each sentence "
        "that answer the condition",
    )
    out: str | Path | None = option(
        None,
        metavar="DIR",
        writes=check_folder,
        help="folder for the figures (default: in the run)",
    )
    conditions: Annotated[int, Ge(2)] = option(3, help="number of conditions to cluster")
    sentences: Positive = option(20, help="number of sentences per condition to cluster")
    top: Annotated[int, Ge(0)] = option(
        5, help="number of rows to list, those whose similarity changed most"
    )
    seed: Seed = option(0, metavar="S", help="random seed")


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SplitOption, MetricOption, TrialOptions):
    """Options that say which prompts are compared, and how.

    Prompts that the encoder cannot use are skipped with a message.
    """

    prompts: Sequence[str] = option(
        (),
        metavar="FILE",
        help="prompts to compare, by name or file (default: every bundled one that the model can "
        "use)",
    )
    baseline: str | None = option(
        None,
        help="prompt that the others are compared with (default: the one that suits the model)",
    )
    heads: Sequence[str] = option(
        (),
        help="recipes to fit in addition to zero-shot; none: only zero-shot (default: linear mlp, "
        "for dialogues c3l-released rank)",
    )
    plain: bool = option(
        False,
        help="also fit heads without subtracting the unconditional embedding, or with it for tasks "
        "that do not subtract it by default",
    )


@dataclass(frozen=True, kw_only=True)
class ComparePromptsOptions(CompareOptions, ReportOption, RunOptions, FigureOption):
    """Options of ``llmcond compare-prompts``: the prompts, the encoder and the data."""

    figures: str | Path | None = option(
        None,
        metavar="DIR",
        writes=check_folder,
        help="folder to write the charts of the report to, as image files",
    )


@dataclass(frozen=True, kw_only=True)
class CompareSystemsOptions(ReportOption, SplitOption, MetricOption, DeviceOption):
    """Options of ``llmcond compare``: the systems, and the files to write."""

    systems: Sequence[str] = option(
        flag="",
        metavar="RUN[:HEAD]",
        help="systems to compare: a run with its default head, RUN:HEAD, or RUN:none for zero-shot "
        "(RUN:none@PROMPT). The name of a recipe stands for its heads of all seeds; RUN:HEAD,HEAD "
        "and RUN,RUN name the seeds of one system",
    )
    baseline: str | None = option(
        None,
        metavar="RUN[:HEAD]",
        help="system that the others are compared with, as it is named above (default: the first)",
    )
